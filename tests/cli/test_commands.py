"""The command line as a user has it: words in, text and exit status out."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil
import pytest

from tests.conftest import PYTHONPATH
from tests.launch.programs import alive, eventually
from trireme.cli import main
from trireme.cli.command import COMMANDS
from trireme.errors import DataError
from trireme.launch.config.task_config import TASK_VARIABLE
from trireme.launch.run_directory import JobRecord, claim, is_running, read_record
from trireme.monitor.recording import UNSAVED, records_directory

TRIREME = [sys.executable, "-m", "trireme"]


FINISHED = JobRecord(
    job="abc",
    state="finished",
    status=0,
    host="here",
    launcher=1,
    pids={},
    coordinator="",
    secret_file="",
    command=("train.py",),
    options={},
    origins={},
    started=1.0,
    ended=2.0,
)


@pytest.fixture(autouse=True)
def empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test stands in a directory of its own, in an environment without our variables."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("TRIREME_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    root = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]))
    return tmp_path


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that must end with one line and a status."""

    def run(*words: str, status: int = 2) -> str:
        assert main(list(words)) == status
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("trireme: error: ")
        assert captured.err.count("\n") == 1
        return captured.err

    return run


def write(name: str, text: str) -> str:
    Path(name).write_text(text)
    return name


# Bad usage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rum"], "no command rum (did you mean run?)"),
        (["--hepl"], "no option --hepl (did you mean --help?)"),
        (["plan", "runs/x"], "there is no command plan"),
        (["run"], "name the program to run"),
        (["run", "missing.py"], "no program missing.py"),
        (["run", "--wrokers", "2", "a.py"], "did you mean --workers?"),
        (["run", "--workers", "two", "a.py"], "workers is 'two' (command line)"),
        (["run", "--workers", "2", "--strategy", "sync", "a.py"], "or use --strategy allreduce"),
        (
            ["run", "--ps", "1", "--replicas", "2", "a.py"],
            "replicas is 2 (command line): each copy is on a parameter server of its own, and this "
            "job has 1 server; add --ps 2 or give at most --replicas 1",
        ),
        (["run", "--replicas", "2", "a.py"], "and this job has none; add --ps 2"),
        (["run", "--replicas", "0", "a.py"], "replicas is '0' (command line): it must be a whole"),
        (
            ["run", "--ps", "257", "a.py"],
            "ps is '257' (command line): it must be a whole number from",
        ),
        (
            ["run", "--mesh", "dp=100000000", "a.py"],
            "mesh dp=100000000 makes 100,000,000 processes: a job has at most 4,096",
        ),
        (
            ["run", "--ps", "1", "--workers", "2048", "--mesh", "dp=4", "a.py"],
            "mesh dp=4 makes 8,192 processes",
        ),
        (["run", "--workers", "99999999999", "a.py"], "it must be a whole number from 1 to 4096"),
        (["run", "--ps", "1", "--staleness", "1" * 30, "a.py"], "staleness is '111"),
        (
            ["run", "--run-dir", "", "a.py"],
            "run-dir is '' (command line): it must be the name of a",
        ),
        (
            ["run", "--join-timeout", "1e300", "a.py"],
            "it must be a number above 0, 1000000000 at most",
        ),
        (["run", "--mesh", "pp=2,pp=2", "a.py"], "pp is named twice"),
        (["run", "--ps", "1", "--mesh", "dp=2", "--prefetch", "a.py"], "workers of one process"),
        (["run", "--ps", "1", "--strategy", "fsdp", "a.py"], "has no parameter servers"),
        (["run", "--strategy", "fsdp", "--schedule", "gpipe", "a.py"], "there is no pipeline"),
        (["run", "--workers", "2", "--compress", "fp16", "a.py"], "add --ps 1"),
        (["run", "--on", "moon", "a.py"], "on is moon (command line): there is no engine moon"),
        (["run", "--config", "no.toml", "a.py"], "no.toml cannot be read"),
        (
            ["run", "--job_name=worker", "a.py"],
            "no option --job_name; `trireme task` has it, and starts one task by hand; `trireme",
        ),
        (["task"], "--job-name is missing"),
        (
            ["task", "--job_name=works", "--ps_hosts=a:1", "--worker_hosts=b:1"],
            "did you mean worker?",
        ),
        (
            ["task", "--job_name=ps", "--task_index=x", "--ps_hosts=a:1", "--worker_hosts=b:1"],
            "--task-index is 'x'",
        ),
        (
            ["task", "--job_name=ps", "--task_index=1", "--ps_hosts=a:1", "--worker_hosts=b:1"],
            "ps:1 is outside the cluster",
        ),
        (
            ["task", "--job_name=worker", "--ps_hosts=localhost:1", "--worker_hosts=localhost:2"],
            "worker:0 needs a program",
        ),
        (
            [
                *("task", "--job_name=worker", "--ps_hosts=a:1", "--worker_hosts=b:1"),
                *("--sync_replicas", "--strategy=async", "a.py"),
            ],
            "contradict",
        ),
        (["status", "nowhere"], "no job was started in nowhere"),
        (["stop", "nowhere"], "no job was started in nowhere"),
        (["stop", "--timeout", "x", "nowhere"], "--timeout is 'x'"),
    ],
)
def test_bad_usage_is_one_line_and_status_2(fails, words: list[str], message: str) -> None:
    assert message in fails(*words)


def test_no_command_shows_what_there_is(capsys) -> None:
    assert main([]) == 2
    assert "commands:" in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert "commands:" in capsys.readouterr().out


def test_an_error_that_is_not_bad_usage_is_status_1(fails, monkeypatch) -> None:
    def damaged(arguments: object) -> int:
        raise DataError("the file\n  is damaged")

    monkeypatch.setattr("trireme.control.stop.main", damaged)
    assert fails("stop", "x", status=1) == "trireme: error: the file is damaged\n"


def test_help_is_fast_and_loads_no_pytorch() -> None:
    code = (
        "import sys; from trireme.cli import main; main(['--help']); main(['--version']); "
        "print(sorted({'torch', 'numpy', 'rich', 'tensorboard'} & set(sys.modules)))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert ended.stdout.endswith("[]\n")
    seconds = []
    for _ in range(3):
        before = _children_s_processor_time()
        subprocess.run([*TRIREME, "--help"], capture_output=True, check=True, timeout=60)
        seconds.append(_children_s_processor_time() - before)
    assert min(seconds) < 0.5


@pytest.mark.processes
def test_who_reads_may_go_as_head_does() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run(
        [*TRIREME, "--help"], stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60
    )
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (141, "")


@pytest.mark.processes
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_behind_the_output_is_told() -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        ended = subprocess.run(
            [*TRIREME, "--help"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    wanted = "trireme: error: standard output cannot be written: No space left on device\n"
    assert (ended.returncode, ended.stderr) == (1, wanted)


def _children_s_processor_time() -> float:
    """In seconds; by the clock it would say what else this machine does."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("command", ["run", "task", "stop"])
def test_each_command_has_help(command: str, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: trireme {command} ")


# A job of one worker -----------------------------------------------------------------------------


@pytest.mark.processes
def test_runs_a_program_to_its_end(capsys) -> None:
    write("train.py", "import sys; print(sys.argv[1:], 'torch' in sys.modules)")
    assert main(["run", "--start", "spawn", "train.py", "--max-steps", "4"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "worker:0 | ['--max-steps', '4'] False\n"
    assert "finished in" in captured.err
    record = read_record(Path("runs/train"))
    assert (record.state, record.status, record.command[0]) == ("finished", 0, "train.py")
    assert not is_running(Path("runs/train"))


EVIL = "\n\x1b[2J\x1b]0;title\x07\x9b1m\u202e"


@pytest.mark.parametrize("running", [True, False])
def test_a_strangers_run_directory_controls_no_terminal(capsys, running: bool) -> None:
    record = msgspec.structs.replace(
        FINISHED,
        state="running" if running else f"finished{EVIL}",
        host=f"here{EVIL}",
        command=(f"train.py{EVIL}", "[bold]"),
        failure=(f"failed{EVIL}",),
        events=((1.0, f"event{EVIL}"),),
        pids={f"worker:0{EVIL}": 1},
        options={f"workers{EVIL}": f"2{EVIL}"},
        origins={f"workers{EVIL}": f"somewhere{EVIL}"},
    )
    claimed = claim(Path("run"))
    claimed.write_record(record)
    from trireme.records.records import Begin, Record, RecordWriter

    begin = Begin(task=f"worker:0{EVIL}", job="abc", time=1.0, host=f"h{EVIL}", pid=1)
    writer = RecordWriter(records_directory(Path("run")), begin)
    status = {"state": f"training{EVIL}", "primary_of": f"[0]{EVIL}", UNSAVED: f"no{EVIL}"}
    writer.write(Record(time=2.0, status=status), due=True)
    writer.close()
    if not running:
        claimed.release()
    shown = ""
    here = [name for name in ("status", "report") if name in COMMANDS]
    for command in (*here, *(() if running else ("stop",))):
        assert main([command, "run"]) == 0
        shown += "".join(capsys.readouterr())
    if "report" in COMMANDS:
        shown += Path("run/report.html").read_text()
    assert not here or r"primary_of [0]\x0a\x1b[2J" in shown
    assert not {each for each in shown if not each.isprintable()} - {"\n", "\u200b"}
    if not running:
        assert main(["stop", f"no{EVIL}where"]) == 2
        assert capsys.readouterr().err.strip().isprintable()


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.processes
def test_what_is_refused_is_not_said_to_be_tried_again(capsys) -> None:
    write("train.py", "import trireme\nraise trireme.UsageError('there is no --batchsize')")
    assert main(["run", "--run-dir", "here", "train.py"]) == 2
    error = capsys.readouterr().err
    assert "there is no --batchsize" in error
    assert "the same command would be refused again" in error
    assert "run the same command again" not in error


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.processes
def test_a_program_that_raises_shows_that_once(capsys) -> None:
    write("train.py", "raise ValueError('boom')")
    assert main(["run", "--run-dir", "here", "train.py"]) == 1
    error = capsys.readouterr().err
    assert error.count("Traceback") == 1
    assert "First worker:0 failed: ValueError: boom (train.py:1)" in error
    assert "Traceback" in Path("here/logs/worker-0.log").read_text()


@pytest.mark.thorough
@pytest.mark.processes
def test_bad_usage_found_by_a_worker_is_status_2(capsys) -> None:
    write("train.py", "import trireme\nraise trireme.UnsupportedOptimizerError('no LBFGS')")
    assert main(["run", "train.py"]) == 2
    error = capsys.readouterr().err
    assert "worker:0 | error: no LBFGS" in error
    assert "Traceback" not in error


def test_a_run_directory_in_use_is_refused(fails) -> None:
    write("train.py", "")
    directory = claim(Path("here"))
    assert "a job runs in here already" in fails("run", "--run-dir", "here", "train.py")
    directory.release()


@pytest.mark.processes
@pytest.mark.skipif(not {"status", "stop"} <= set(COMMANDS), reason="they are not installed")
def test_status_and_stop_of_a_running_job(capsys) -> None:
    write(
        "train.py",
        "import signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))\n"
        "print('ready')\n"
        "while True: signal.pause()\n",
    )
    launcher = subprocess.Popen(
        [*TRIREME, "run", "--run-dir", "here", "train.py"], stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "worker:0 | ready\n"
    # A task may print before the launcher has noted its process id.
    assert eventually(lambda: "worker:0" in read_record(Path("here")).pids)
    assert main(["status", "--json", "here"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert (status["state"], status["launcher"]) == ("running", launcher.pid)
    assert [task["name"] for task in status["tasks"]] == ["worker:0"]
    assert status["options"]["run-dir"] == {"value": "here", "origin": "command line"}
    assert main(["stop", "here"]) == 0
    assert "has ended: interrupted" in capsys.readouterr().out
    assert launcher.wait(timeout=30) == 130
    launcher.stdout.close()
    assert main(["stop", "here"]) == 0
    assert "does not run: interrupted" in capsys.readouterr().out


@pytest.mark.thorough
@pytest.mark.processes
def test_a_job_is_found_by_the_directory_of_its_program_and_by_its_own() -> None:
    write(
        "train.py",
        "import signal, sys, torch, trireme\n"
        "session = trireme.Session(torch.nn.Linear(1, 1), torch.nn.MSELoss(),\n"
        "    lambda params: torch.optim.SGD(params, lr=0.1), run_dir='mine')\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))\n"
        "while True: signal.pause()\n",
    )
    words = [*TRIREME, "run", "train.py"]
    launcher = subprocess.Popen(words, stdout=subprocess.DEVNULL, text=True)
    assert eventually(lambda: Path("mine/job.json").exists())
    for name in ("mine", "runs/train"):
        assert read_record(Path(name)).launcher == launcher.pid
    launcher.terminate()
    assert launcher.wait(timeout=30) == 130
    for name in ("mine", "runs/train"):
        assert read_record(Path(name)).launcher == launcher.pid
    assert Path("runs/train").resolve() == Path("mine").resolve()


@pytest.mark.processes
def test_tasks_end_with_a_launcher_that_is_killed(capsys) -> None:
    write("train.py", "import os, signal\nprint(os.getpid())\nwhile True: signal.pause()\n")
    launcher = subprocess.Popen(
        [*TRIREME, "run", "--run-dir", "here", "train.py"], stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None
    pid = int(launcher.stdout.readline().split()[-1])
    os.kill(launcher.pid, signal.SIGKILL)
    assert eventually(lambda: not alive(pid))
    launcher.stdout.close()
    launcher.wait(timeout=10)
    if "status" in COMMANDS:
        assert main(["status", "here"]) == 0
        assert "lost" in capsys.readouterr().out


@pytest.mark.processes
def test_a_job_is_its_launcher_a_template_and_its_tasks_which_all_end_with_the_launcher() -> None:
    write(
        "train.py",
        "import signal, subprocess, trireme\n"
        "child = subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        "print('child', child.pid, flush=True)\nsignal.pause()\n",
    )
    words = ["run", "--ps", "1", "--workers", "2", "--run-dir", "here", "train.py"]
    launcher = subprocess.Popen([*TRIREME, *words], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    shown = (line.split() for line in launcher.stdout)
    children = [int(next(words[-1] for words in shown if "child" in words)) for _ in range(2)]
    try:
        while len(pids := {*read_record(Path("here")).pids.values()}) < 3:  # it notes them soon
            assert launcher.poll() is None
        tasks = psutil.Process(launcher.pid).children()
        assert len({task.pid for task in tasks} - pids) == 1, "and the template"
    finally:
        launcher.kill()
    gone = [*tasks, *map(psutil.Process, children)]
    assert psutil.wait_procs(gone, 30.0)[1] == []
    launcher.stdout.close()
    launcher.wait(timeout=10)


# Dry run and tasks by hand -----------------------------------------------------------------------


SHOW = (
    "import sys\nfrom trireme.launch.environment import detect\nc = detect()\n"
    "t = c.config.training\n"
    "print(c.name, c.workers, c.servers, t.strategy, t.aggregate, c.dry_run, "
    "c.coordinator)\n"
    "print(sys.argv[1:])\n"
)


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program runs in this process: what it may change is put back afterwards."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_a_dry_run_prints_origins_and_asks_the_program_for_the_rest(
    restored, capsys, monkeypatch
) -> None:
    write("train.py", SHOW)
    write("trireme.toml", "workers = 3\nps = 9\n")
    monkeypatch.setenv("TRIREME_PS", "2")
    words = ["--strategy", "sync", "--aggregate", "2", "--dry-run", "train.py", "--x"]
    assert main(["run", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[:5]] == [
        ["workers", "3", "file", "trireme.toml"],
        ["ps", "2", "environment", "TRIREME_PS"],
        ["replicas", "1", "default"],
        ["strategy", "sync", "command", "line"],
        ["aggregate", "2", "command", "line"],
    ]
    assert lines[-2:] == ["worker:0 3 2 sync 2 True ", "['--x']"]
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("gpus", "options", "workers", "origin"),
    [
        (0, (), 1, "auto, 0 GPUs here"),
        (4, (), 4, "auto, 4 GPUs here"),
        (4, ("--ps", "1"), 4, "auto, 4 GPUs here"),
        (4, ("--mesh", "tp=2"), 2, "auto, 4 GPUs here"),
        (1, ("--mesh", "tp=2"), 1, "auto, 1 GPU here"),
    ],
)
def test_workers_auto_is_one_for_each_gpu(
    restored, capsys, monkeypatch, gpus: int, options: tuple[str, ...], workers: int, origin: str
) -> None:
    monkeypatch.setattr("trireme.cli.run._visible_gpus", lambda: gpus)
    write("train.py", "pass")
    assert main(["run", "--workers", "auto", *options, "--dry-run", "train.py"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("workers")]
    assert line.split()[1] == str(workers)
    assert line.endswith(f"command line: {origin}")


@pytest.mark.parametrize(
    "words",
    [
        ["--sync_replicas", "--replicas_to_aggregate=2"],
        ["--sync_replicas=true", "--replicas-to-aggregate", "2"],
        ["--strategy", "sync", "--aggregate", "2"],
    ],
)
def test_a_worker_by_hand_understands_the_classic_spellings(
    restored, capsys, words: list[str]
) -> None:
    write("train.py", SHOW)
    hosts = ["--ps_hosts=localhost:2222", "--worker_hosts=localhost:2223,localhost:2224"]
    index = "--task_id=1" if words[0] == "--sync_replicas=true" else "--task_index=1"
    task = ["task", "--job_name=worker", index, *hosts, *words]
    assert main([*task, "train.py", "--job_name", "mine"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == "worker:1 2 1 sync 2 False tcp://localhost:2222"
    assert second == "['--job_name', 'mine']"
    assert TASK_VARIABLE in os.environ


def test_a_switch_that_is_off_changes_nothing(restored, capsys) -> None:
    write("train.py", SHOW)
    hosts = ["--ps_hosts=localhost:2222", "--worker_hosts=localhost:2223"]
    assert main(["task", "--job_name=worker", *hosts, "--sync_replicas=false", "train.py"]) == 0
    assert "worker:0 1 1 None None" in capsys.readouterr().out


@pytest.mark.processes
def test_a_coordinator_by_hand_tells_where_it_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    hosts = ["--ps_hosts=localhost:1", "--worker_hosts=localhost:2"]
    task = subprocess.Popen(
        [
            *(
                *TRIREME,
                "task",
                "--job_name=coordinator",
                f"--coordinator=127.0.0.1:{port}",
                *hosts,
            ),
            *("--address-file", "address", "--join-timeout", "0.5"),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    out, _ = task.communicate(timeout=60)
    assert Path("address").read_text() == f"tcp://127.0.0.1:{port}\n"
    first, *_, last = out.splitlines()
    assert first == f"coordinator:0 listens on tcp://127.0.0.1:{port}"
    assert last.startswith("coordinator:0 ends: the job failed: ")
    assert "ps:0" in last
    assert task.returncode == 1


@pytest.mark.processes
def test_an_address_file_that_cannot_be_written_is_bad_usage() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    words = ("--job_name=coordinator", "--ps_hosts=localhost:1", "--worker_hosts=localhost:2")
    where = (f"--coordinator=127.0.0.1:{port}", "--address-file", "missing/address")
    task = subprocess.run([*TRIREME, "task", *words, *where], capture_output=True, text=True)
    assert task.returncode == 2
    assert task.stderr.endswith(
        "error: --address-file: missing/address cannot be written: No such file or directory\n"
    )


@pytest.mark.slow(one_in=2)
@pytest.mark.thorough
@pytest.mark.parametrize("closed", [">&-", "<&- >&-"])
def test_a_program_without_standard_streams_starts_jobs(closed: str) -> None:
    Path("program.py").write_text("print('runs')\n")
    words = " ".join([*TRIREME, "run", "--run-dir", "run", "program.py"])
    ended = subprocess.run(
        ["sh", "-c", f"exec {words} {closed}"], stderr=subprocess.PIPE, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "runs" in Path("run/logs/worker-0.log").read_text()


@pytest.mark.parametrize("moment", ["trireme.cli.dispatch", "trireme.launch.local"])
def test_ctrl_c_before_the_job_begins_is_one_line(moment: str) -> None:
    program = (
        "import sys\nclass Interrupts:\n    def find_spec(self, name, path, target=None):\n"
        f"        if name == {moment!r}:\n            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "from trireme.cli import main\nsys.exit(main(['run', 'train.py']))\n"
    )
    write("train.py", "")
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": PYTHONPATH},
        timeout=100,
    )
    assert (ended.returncode, ended.stderr) == (130, "trireme: interrupted\n")
