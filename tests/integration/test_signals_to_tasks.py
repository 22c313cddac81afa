"""SIGTERM to one worker, to all tasks, and to all processes; Ctrl-C at a task by hand."""

from __future__ import annotations

import os
import re
import signal
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from benchmarks.processes import free_ports
from tests.integration.shell import PROGRAMS, PYTHON, TRIREME, Ended, Running, Shell
from tests.integration.test_counting import BATCH, consumed, notes, saved, updates
from trireme.launch.run_directory import read_record
from trireme.session.checkpoint import latest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

TRAIN = (PROGRAMS / "train.py", "--out", "out", "--max-steps", 10**9, "--pause", 0.01)
LOADERS = PROGRAMS / "loaders.py"


class ByHand:
    """Two servers and two workers, each started by hand."""

    def __init__(self, shell: Shell) -> None:
        self.shell = shell
        one, two = free_ports(2)
        self.hosts = (
            f"--ps_hosts=127.0.0.1:{one},127.0.0.1:{two}",
            "--worker_hosts=127.0.0.1:1,127.0.0.1:2",
        )
        self.tasks = {f"ps:{index}": self.start("ps", index) for index in (0, 1)}
        self.tasks |= {f"worker:{index}": self.worker(index) for index in (0, 1)}

    def start(self, role: str, index: int, *words: object) -> Running:
        """Starts a task."""
        return self.shell.start(
            "task", f"--job_name={role}", "--task_index", index, *self.hosts, *words
        )

    def worker(self, index: int) -> Running:
        """Starts a worker."""
        return self.start("worker", index, "--run-dir", "run", *TRAIN)

    def ended(self) -> dict[str, Ended]:
        """How each task that is there now ends."""
        return {name: task.ended() for name, task in self.tasks.items()}


def check_saved(directory: Path, least: int) -> int:
    """Checks that the newest checkpoint is a whole one; returns its step."""
    data = latest(directory / "run", lambda path, error: pytest.fail(f"{path}: {error}"))
    assert data is not None and data.step >= least
    assert not data.state.get("lacks")
    return data.step


def step_of(running: Running, least: int) -> int:
    """Waits until a worker shows a step of at least so many; returns it."""
    found = running.until(rf"global (?:step )?(\d{{{len(str(least))},}})/")
    return int(found[1])


ENDS = {
    "Ctrl-C at one worker": (signal.SIGINT, ("worker:1",)),
    "SIGTERM to all": (signal.SIGTERM, ("ps:0", "ps:1", "worker:0", "worker:1")),
}


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
def test_one_worker_leaves_and_the_others_go_on_until_the_job_is_interrupted(
    end: str, shell: Shell
) -> None:
    job = ByHand(shell)
    for name in ("worker:0", "worker:1"):
        step_of(job.tasks[name], 10)
    chief = job.tasks["worker:0"]
    chief.send(signal.SIGTERM)
    left = chief.ended()
    assert left.status == 143, left.text
    assert "leaves" in left.out and "Traceback" not in left.text
    job.tasks["worker:0"] = job.worker(0)  # another process takes its place
    step_of(job.tasks["worker:0"], 10)
    number, names = ENDS[end]
    for name in names:
        job.tasks[name].send(number)
    ends = job.ended()
    assert {name: end.status for name, end in ends.items()} == {
        "ps:0": 0, "ps:1": 0, "worker:0": 130, "worker:1": 130,
    }, [end.text[-1500:] for end in ends.values()]  # fmt: skip
    assert not any("finished" in ends[name].out for name in ("worker:0", "worker:1"))
    assert ends["ps:1"].out.splitlines()[-1] == "ps:1 ends: the job is interrupted"
    step = check_saved(shell.directory, 10)
    assert (
        f"saved run/checkpoints/step-{step:09d}-writer-"
        in ends["worker:0"].text + ends["worker:1"].text
    )


@pytest.mark.thorough
def test_who_leaves_loses_no_update_and_no_example(shell: Shell) -> None:
    steps = 300
    program = (PROGRAMS / "counting.py", "--out", "out", "--max-steps", steps, "--pause", 0.02)
    words = ("run", "--ps", 2, "--workers", 2, "--strategy", "sync", "--run-dir", "run")
    running = shell.start(*words, *program, "--batch-size", BATCH)
    step_of(running, 10)
    os.kill(read_record(shell.directory / "run").pids["worker:1"], signal.SIGTERM)
    ended = running.ended()
    assert ended.status == 0, ended.text
    assert "worker:1 left: SIGTERM has asked it to; the job goes on with the 1 left" in ended.err
    data, together = saved(shell, steps), notes(shell, 1)["applied"]
    assert notes(shell, 1) == {"attempted": together, "applied": together}
    assert notes(shell, 0) == {"attempted": steps, "applied": steps}
    assert 0 < together < steps
    assert updates(data) == [steps - together / 2, together / 2], "halves while there were two"
    # What worker 1 held and had not used was used by worker 0.
    assert consumed(data) == [[0, (steps + together) * BATCH]]


EPOCHS = """
import time
import torch, trireme

class Examples(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = torch.nn.Parameter(torch.zeros(1200))
        self.others = torch.nn.Parameter(torch.zeros(500))
    def forward(self, numbers):
        time.sleep(0.02)
        return self.seen[numbers].sum() + self.others.sum()

data = torch.utils.data.TensorDataset(torch.arange(1200), torch.zeros(1200))
session = trireme.Session(
    Examples(), lambda outputs, _: -outputs, lambda p: torch.optim.SGD(p, lr=1.0)
)
with session:
    for _ in session.epochs(2):
        for batch in session.loader(data, batch_size=4):
            session.step(batch)
            print("step", session.global_step, flush=True)
"""


@pytest.mark.thorough
def test_a_worker_with_a_push_under_way_leaves_when_a_server_has_died(shell: Shell) -> None:
    (shell.directory / "epochs.py").write_text(EPOCHS)
    words = ("--ps", 3, "--replicas", 2, "--workers", 3, "--prefetch", "--run-dir", "run")
    running = shell.start("run", *words, "epochs.py")
    running.until(r"worker:1 \| step \d\d\d")  # whenever it is, a push is under way
    pids = read_record(shell.directory / "run").pids
    os.kill(pids["ps:1"], signal.SIGKILL)
    os.kill(pids["worker:1"], signal.SIGTERM)
    ended = running.ended()
    assert ended.status == 0, ended.text
    model = saved(shell, 600).model
    assert set(model["seen"].tolist()) == {2.0} and set(model["others"].tolist()) == {600.0}


@pytest.mark.parametrize("words", [("--ps", 1), ("--ps", 1, "--strategy", "sync"), ()])
def test_a_child_that_a_worker_forks_leaves_no_job(shell: Shell, words: tuple[object, ...]) -> None:
    forking = "            session.step(batch)\n"
    child = "            if count == 5 and os.fork() == 0: sys.exit(0)\n"
    program = EPOCHS.replace(forking, child + "            count += 1\n" + forking)
    (shell.directory / "forks.py").write_text("import os, sys\ncount = 0\n" + program)
    ended = shell.start("run", *words, "--workers", 2, "--run-dir", "run", "forks.py").ended()
    assert ended.status == 0, ended.text


@pytest.mark.thorough
def test_a_launcher_starts_again_who_leaves(shell: Shell) -> None:
    words = ("run", "--ps", 1, "--workers", 2, "--max-restarts", 1, "--run-dir", "run")
    running = shell.start(*words, *TRAIN)
    step_of(running, 10)
    running.until(r"worker:1 \| training")  # else worker:0 may have made these steps alone
    os.kill(read_record(shell.directory / "run").pids["worker:1"], signal.SIGTERM)
    running.until(r"worker:1 left: SIGTERM has asked it to; started again \(1 of 1\)")
    running.until(r"worker:1 \| training(?s:.*)worker:1 \| training")
    stopped = shell.run("stop", "run")
    assert "has ended: interrupted" in stopped.text
    ended = running.ended()
    assert ended.status == 130 and "Traceback" not in ended.text, ended.text
    check_saved(shell.directory, 10)


@pytest.mark.thorough
@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces of processes need root")
def test_a_server_that_is_process_1_of_a_container_stops_its_job(shell: Shell) -> None:
    """The kernel drops signals to process 1 that it does not handle."""
    (port,) = free_ports(1)
    hosts = (f"--ps_hosts=127.0.0.1:{port}", "--worker_hosts=127.0.0.1:1")
    contained = ("unshare", "--fork", "--pid", "--kill-child", *TRIREME)
    server = shell.start("task", "--job_name=ps", *hosts, command=contained)
    worker = shell.start("task", "--job_name=worker", *hosts, "--run-dir", "run", *TRAIN)
    step_of(worker, 10)
    psutil.Process(server.pid).children()[0].send_signal(signal.SIGTERM)
    assert worker.ended().status == 130
    ended = server.ended()
    assert ended.status == 0, ended.text
    assert "ps:0 ends: the job is interrupted" in ended.out
    check_saved(shell.directory, 10)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces of processes need root")
def test_a_worker_that_is_process_1_and_waits_for_its_job_ends(shell: Shell) -> None:
    (port,) = free_ports(1)
    hosts = (f"--ps_hosts=127.0.0.1:{port}", "--worker_hosts=127.0.0.1:1")
    contained = ("unshare", "--fork", "--pid", "--kill-child", *TRIREME)
    worker = shell.start("task", "--job_name=worker", *hosts, *TRAIN, command=contained)
    worker.until("joining")
    psutil.Process(worker.pid).children()[0].send_signal(signal.SIGTERM)
    assert worker.ended().status == 143


@pytest.mark.thorough
def test_sigterm_to_all_processes_saves_whole(shell: Shell) -> None:
    """As `scancel` and systemd do: also loader processes, the launcher, and its helpers."""
    words = ("run", "--ps", 2, "--workers", 2, "--run-dir", "run")
    launcher = shell.start(*words, LOADERS, "--save-seconds", 4)
    step_of(launcher, 10)
    everybody = shell.processes()
    assert sum("loaders.py" in " ".join(each.cmdline()) for each in everybody) > 4
    for process in everybody:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGTERM)
    end = launcher.ended()
    assert end.status == 130, end.text
    assert "Traceback" not in end.text and "killed by" not in end.text
    check_saved(shell.directory, 10)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_signal_to_one_process_of_a_group_interrupts_all(shell: Shell) -> None:
    """Without servers the others cannot go on: they end with it, and have not finished."""
    running = shell.start("run", "--workers", 2, "--run-dir", "run", *TRAIN)
    step_of(running, 10)
    os.kill(read_record(shell.directory / "run").pids["worker:1"], signal.SIGTERM)
    ended = running.ended()
    assert ended.status == 130, ended.text
    assert len(re.findall(r"worker:\d \| interrupted", ended.out)) == 2, ended.text
    check_saved(shell.directory, 10)


@pytest.mark.thorough
@pytest.mark.slow(but=("True",))
@pytest.mark.parametrize("closes", [True, False])
def test_a_loop_of_its_own_under_plain_python_ends_with_130(shell: Shell, closes: bool) -> None:
    words = ("--max-steps", 10**9, *(["--close"] if closes else []))
    running = shell.start(PROGRAMS / "loop.py", *words, command=PYTHON)
    running.until(r"training")
    running.send(signal.SIGINT)
    ended = running.ended()
    assert ended.status == 130, ended.text
    assert re.search(r"replica 0 of 1: \d", ended.out), "what the program does after its loop"
    assert "Traceback" not in ended.text


@pytest.mark.slow
@pytest.mark.thorough
def test_stopping_a_loop_of_its_own_without_servers_ends_with_130(shell: Shell) -> None:
    running = shell.start(
        *("run", "--workers", 2, "--run-dir", "run"), PROGRAMS / "loop.py", "--max-steps", 10**9
    )
    running.until(r"worker:0 \| training")
    stopped = shell.run("stop", "run")
    assert "has ended: interrupted" in stopped.text
    ended = running.ended()
    assert ended.status == 130, ended.text
    assert "interrupted after" in ended.text
    check_saved(shell.directory, 1)
