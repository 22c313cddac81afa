"""The launcher with real processes, which are tiny programs in place of tasks."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.launch.programs import FakeCoordinator, alive, eventually, run_programs
from trireme.launch.launcher import Membership
from trireme.launch.run_directory import read_record
from trireme.launch.supervision_state import SupervisionLimits

pytestmark = pytest.mark.processes

QUICK = SupervisionLimits(settle=0.2, stop=0.3, end=0.3, kill=5.0, echo=0.0)
FOR_EVER = "signal.pause()"
KEEPER = "open(HERE + '/{name}.fifo').read()"
"""Ends when somebody has opened and closed its fifo."""


def fail(kind: str, summary: str, at: float) -> str:
    return f"tell('ended', kind={kind!r}, summary={summary!r}, at={at}); sys.exit(1)"


def assert_nobody_left(ran) -> None:
    assert [pid for pid in ran.record.pids.values() if alive(pid)] == []


def test_shows_each_line_under_the_name_of_its_task(tmp_path: Path) -> None:
    ran = run_programs(
        tmp_path,
        {"worker:0": "print('one'); print('two', file=sys.stderr); sys.stdout.write('three')"},
    )
    assert ran.status == 0
    assert ran.out == "worker:0 | one\nworker:0 | three\n"
    assert ran.err.startswith("worker:0 | two\ntrireme: finished in ")
    assert sorted(ran.log("worker-0").splitlines()) == ["one", "three", "two"]
    assert (ran.record.state, ran.record.status) == ("finished", 0)


@pytest.mark.parametrize("servers", [0, 1])
def test_a_command_that_does_not_exist_is_an_error_of_its_engine(
    tmp_path: Path, servers: int
) -> None:
    tasks = [f"ps:{index}" for index in range(servers)] + ["worker:0", "worker:1"]
    ran = run_programs(tmp_path, dict.fromkeys(tasks, "pass"), through=["no-such-wrapper"])
    assert ran.status == 2
    wrong = "--on local cannot start it: [Errno 2] No such file or directory: 'no-such-wrapper'"
    assert f"First {tasks[0]} failed: {wrong}" in ran.err
    assert ran.record.state == "failed"


def test_tells_each_task_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    os.mkfifo(tmp_path / "ps.fifo")
    show = (
        "import json; t = json.loads(os.environ['TRIREME_TASK']); "
        "print(t['role'], t['index'], t['workers'], t['servers'], t['coordinator'], t['threads'], "
        "os.environ['OMP_NUM_THREADS'], os.getsid(0) == os.getpid()); "
    )
    release = "open(f'{HERE}/ps.fifo', 'w').close()"
    ran = run_programs(
        tmp_path, {"ps:0": KEEPER.format(name="ps"), "worker:0": show + release, "worker:1": show}
    )
    threads = max(1, len(os.sched_getaffinity(0)) // 3)
    for index in (0, 1):
        line = f"worker:{index} | worker {index} 2 1 tcp://127.0.0.1:9 {threads} {threads} True"
        assert line in ran.out
    assert ran.status == 0
    assert ran.record.coordinator == "tcp://127.0.0.1:9"
    assert set(ran.record.pids) == {"ps:0", "worker:0", "worker:1"}
    assert_nobody_left(ran)


def test_a_worker_that_fails_ends_the_job_and_is_named(tmp_path: Path) -> None:
    ran = run_programs(
        tmp_path,
        {
            "ps:0": FOR_EVER,
            "worker:0": fail("victim", "JobFailed: worker:1", 5.0),
            "worker:1": "print('trace'); " + fail("exception", "ValueError: boom (a.py:1)", 9.0),
            "worker:2": FOR_EVER,
        },
    )
    assert ran.status == 1
    assert "First worker:1 failed: ValueError: boom (a.py:1)" in ran.err
    assert ran.err.count("ValueError: boom") == 1
    waited = next(line for line in ran.err.splitlines() if "only waited" in line)
    assert waited.endswith("ps:0, worker:0, worker:2")
    assert str(tmp_path / "logs" / "worker-1.log") in ran.err
    assert "First worker:1 failed: ValueError: boom" in read_record(tmp_path).failure[0]
    assert (ran.record.state, ran.record.status) == ("failed", 1)
    assert_nobody_left(ran)


def test_a_worker_that_ends_without_a_word_shows_its_last_lines(tmp_path: Path) -> None:
    ran = run_programs(tmp_path, {"worker:0": "[print(i) for i in range(30)]; os._exit(7)"})
    assert ran.status == 1
    assert "First worker:0 failed: ended with status 7" in ran.err
    assert "trireme:     29" in ran.err
    assert "trireme:     3\n" not in ran.err


def test_a_worker_may_change_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ran = run_programs(
        Path("run"), {"worker:0": "os.chdir('/'); " + fail("usage", "no such thing", 1.0)}
    )
    assert ran.status == 2
    assert "First worker:0 failed: no such thing" in ran.err


def test_the_job_goes_on_without_a_killed_worker(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    # The kernel closes the fifo of the killed worker: only then does the other one end.
    ran = run_programs(
        tmp_path,
        {
            "worker:0": "open(HERE + '/fifo').read(); print('done')",
            "worker:1": "f = open(HERE + '/fifo', 'w'); os.kill(os.getpid(), signal.SIGKILL)",
        },
    )
    assert ran.status == 0
    assert "worker:0 | done" in ran.out
    assert "WARNING: worker:1 was killed by SIGKILL" in ran.err


def test_a_crashed_worker_is_started_again(tmp_path: Path) -> None:
    program = """
        mark = HERE + "/mark"
        if not os.path.exists(mark):
            open(mark, "w").close()
            os.kill(os.getpid(), signal.SIGSEGV)
        print("second life")
    """
    ran = run_programs(tmp_path, {"worker:0": program}, limits=SupervisionLimits(restarts=2))
    assert ran.status == 0
    assert "worker:0 failed: killed by SIGSEGV; started again (1 of 2)" in ran.err
    assert "worker:0 | second life" in ran.out
    assert [config.restarts_left for config in ran.commands] == [2, 1]
    ((_, event),) = read_record(tmp_path).events
    assert event.endswith("started again (1 of 2)")


def test_a_dead_server_fails_the_job_by_name(tmp_path: Path) -> None:
    ran = run_programs(
        tmp_path,
        {"ps:0": FOR_EVER, "ps:1": "os.kill(os.getpid(), signal.SIGKILL)", "worker:0": FOR_EVER},
    )
    assert ran.status == 1
    assert "First ps:1 was killed by SIGKILL" in ran.err
    assert "memory ran out" in ran.err
    assert "(--max-restarts N does so by itself)" in ran.err
    assert_nobody_left(ran)


ASK = "os.kill(os.getppid(), signal.{signal}); "
BOTH = "[signal.signal(each, {handler}) for each in (signal.SIGTERM, signal.SIGINT)]; "
SAVES = BOTH.format(handler="lambda *_: (print('saved'), os._exit(130))")
DEAF = BOTH.format(handler="lambda *_: print('heard')")
WAIT = "\nwhile True: signal.pause()"


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_lets_the_workers_save(
    tmp_path: Path, name: str, request: pytest.FixtureRequest
) -> None:
    # Tests that run under nohup inherit a SIGHUP that is ignored, and a launcher would keep to it.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    request.addfinalizer(lambda: signal.signal(signal.SIGHUP, before))
    ran = run_programs(
        tmp_path,
        {"ps:0": FOR_EVER, "worker:0": SAVES + ASK.format(signal=name) + WAIT},
        limits=SupervisionLimits(end=0.2),
    )
    assert ran.status == 130
    assert "worker:0 | saved" in ran.out
    assert "interrupted after" in ran.err
    assert (ran.record.state, ran.record.status) == ("interrupted", 130)
    assert_nobody_left(ran)


def test_a_background_job_of_a_script_can_be_interrupted_and_nohup_is_kept(tmp_path: Path) -> None:
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (1, 2)}
    try:
        program = (
            SAVES + ASK.format(signal="SIGHUP") + "print('on'); " + ASK.format(signal="SIGINT")
        )
        ran = run_programs(tmp_path, {"worker:0": program + WAIT})
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert ran.status == 130
    assert "worker:0 | on" in ran.out
    assert ran.err.count("stopping: ") == 1
    assert "asked" not in ran.err


def test_a_second_signal_ends_all_at_once(tmp_path: Path) -> None:
    again = DEAF.replace("print('heard')", "os.kill(os.getppid(), signal.SIGINT)")
    ran = run_programs(tmp_path, {"worker:0": again + ASK.format(signal="SIGINT") + WAIT})
    assert ran.status == 1
    assert "asked twice: ending at once" in ran.err
    assert "worker:0 did not save" in ran.err
    assert_nobody_left(ran)


def test_a_worker_that_does_not_end_in_time_is_killed(tmp_path: Path) -> None:
    ran = run_programs(
        tmp_path, {"worker:0": DEAF + ASK.format(signal="SIGTERM") + WAIT}, limits=QUICK
    )
    assert ran.status == 1
    assert "worker:0 | heard" in ran.out
    assert "worker:0 did not save and end within" in ran.err
    assert_nobody_left(ran)


def test_signals_are_as_before_when_the_job_has_ended(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    run_programs(tmp_path, {"worker:0": "pass"})
    assert signal.getsignal(signal.SIGINT) is before
    assert signal.set_wakeup_fd(-1) == -1


def test_the_children_of_a_task_do_not_outlive_it(tmp_path: Path) -> None:
    child = "[sys.executable, '-S', '-c', 'import signal; print(1, flush=True); signal.pause()']"
    ran = run_programs(
        tmp_path, {"worker:0": f"import subprocess; print('child', subprocess.Popen({child}).pid)"}
    )
    assert ran.status == 0
    pid = next(int(line.split()[-1]) for line in ran.out.splitlines() if "child" in line)
    assert eventually(lambda: not alive(pid))  # killed, and perhaps not yet dead


def test_an_endless_line_does_not_grow_for_ever(tmp_path: Path) -> None:
    ran = run_programs(tmp_path, {"worker:0": "sys.stdout.write('x' * 3_000_000 + '\\rend\\n')"})
    assert ran.out == "worker:0 | end\n"


def test_outcomes_of_an_earlier_start_are_forgotten(tmp_path: Path) -> None:
    first = fail("exception", "ValueError: first", 1.0)
    program = f"""
        mark = HERE + "/mark"
        if not os.path.exists(mark):
            open(mark, "w").close()
            {first}
        os._exit(3)
    """
    ran = run_programs(
        tmp_path, {"worker:0": program}, limits=SupervisionLimits(restarts=1, settle=0.1)
    )
    assert ran.status == 1
    assert "First worker:0 failed: ended with status 3" in ran.err


def test_a_worker_that_its_coordinator_has_given_up_is_killed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pid")
    os.mkfifo(tmp_path / "fifo")

    def script(coordinator: FakeCoordinator) -> None:
        pid = int((tmp_path / "pid").read_text())
        lost = {"worker:1": (pid, "it sulked")}
        coordinator.say(Membership(joined=True, formed=True, lost=lost))

    # The other one ends when the launcher has noticed the end of the killed one: while it has not,
    # the kernel keeps a dead process of that number.
    ran = run_programs(
        tmp_path,
        {
            "ps:0": FOR_EVER,
            "worker:0": "import time; killed = open(HERE + '/fifo').read()\n"
            "while os.path.exists('/proc/' + killed): time.sleep(0.01)\n"
            "print('done')",
            "worker:1": "held = open(HERE + '/fifo', 'w'); held.write(str(os.getpid())); "
            "held.flush(); open(HERE + '/pid', 'w').write(str(os.getpid())); "
            f"{FOR_EVER}",
        },
        limits=SupervisionLimits(settle=0.2, end=0.3),
        script=script,
    )
    assert ran.status == 0, ran.err
    said = "worker:1 was given up and killed: it sulked; the job goes on with the 1 left"
    assert said in ran.err, ran.err
    assert_nobody_left(ran)


def test_when_a_server_dies_all_tasks_are_started_again(tmp_path: Path) -> None:
    once = "once = not os.path.exists(HERE + '/{name}'); open(HERE + '/{name}', 'w'); "
    os.mkfifo(tmp_path / "there")  # a server dies when the worker is there
    die = "(open(HERE + '/there').read() or os.kill(os.getpid(), signal.SIGKILL))"
    ran = run_programs(
        tmp_path,
        {
            "ps:0": once.format(name="p") + f"once and {die}",
            "worker:0": once.format(name="w") + "there = once and open(HERE + '/there', 'w'); "
            f"there and (there.close(), {FOR_EVER}); print('done')",
        },
        limits=SupervisionLimits(restarts=1, save=0.3, kill=5.0),
    )
    assert ran.status == 0, ran.err
    assert "ps:0 was killed by SIGKILL; the whole job is started again" in ran.err
    assert ran.out == "worker:0 | done\n"
    assert [config.name for config in ran.commands] == 2 * ["ps:0", "worker:0"]
    assert [config.restarts_left for config in ran.commands] == [1, 1, 0, 1]
    first, second = ran.coordinators
    assert [first.task.restarts_left, second.task.restarts_left] == [1, 0]
    assert first.closed and second.closed
    assert_nobody_left(ran)
