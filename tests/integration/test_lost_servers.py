"""Servers are killed, come and go: each acknowledged update is in the values, once.

The program is `programs/counting.py`: the values count the updates of each worker.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time

import pytest
import torch

from tests.conftest import python_path
from tests.faults.processes import Tasks
from tests.integration.shell import PROGRAMS, Ended, Running, Shell
from tests.integration.test_counting import consumed, notes, saved, table, updates
from trireme.cli.command import COMMANDS
from trireme.session.checkpoint import latest, list_checkpoints

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

BATCH = 4
PAUSE = 0.01


def counting(
    shell: Shell, steps: int, *words: object, pause: float = PAUSE, program: tuple[object, ...] = ()
) -> Running:
    """Starts the counting program, which makes no pauses any more once it is released."""
    named = (PROGRAMS / "counting.py", "--out", "out", "--max-steps", steps, *program)
    paces = ("--batch-size", BATCH, "--pause", pause, "--pause-until", "released")
    return shell.start("run", *words, "--run-dir", "run", *named, *paces)


def release(shell: Shell) -> None:
    """Lets the counting program run to its end as fast as it can."""
    (shell.directory / "released").touch()


def until(shell: Shell, attempts: int) -> None:
    """Waits until worker 0 has attempted so many updates."""
    path, deadline = shell.directory / "out" / "notes-0", time.monotonic() + 120
    while not path.exists() or path.read_bytes().count(b"attempted") < attempts:
        assert time.monotonic() < deadline, f"worker 0 did not attempt {attempts} updates"
        time.sleep(0.01)


def step_of(shell: Shell, task: str) -> int:
    """Returns the global step that a task has reported."""
    told = json.loads(shell.run("status", "--json", "run").out)["tasks"]
    return next(int(t["status"].get("global_step", 0)) for t in told if t["name"] == task)


def counts(shell: Shell, ended: Ended, steps: int, workers: int = 2) -> None:
    """Every update that a worker knows to be applied is in the values, and nothing else is."""
    assert ended.status == 0, ended.text
    data, known = saved(shell, steps), [notes(shell, worker) for worker in range(workers)]
    rows = updates(data)
    assert rows == [table(data)[worker] for worker in range(workers)]
    assert rows == [one["applied"] for one in known] == [one["attempted"] for one in known]
    assert sum(rows) == steps
    assert sum(stop - start for start, stop in consumed(data)) == steps * BATCH


@pytest.mark.slow(but=("0-shared memory",))
@pytest.mark.thorough(but=("0-shared memory",))
@pytest.mark.parametrize("transport", [(), ("--transport", "tcp")], ids=["shared memory", "tcp"])
@pytest.mark.parametrize("server", [0, 1])
def test_a_killed_server_costs_no_update(
    shell: Shell, server: int, transport: tuple[str, ...]
) -> None:
    """Server 0 deals the examples and decides when the job ends."""
    steps = 400
    words = ("--ps", 2, "--replicas", 2, "--workers", 2, "--strategy", "async", *transport)
    running = counting(shell, steps, *words)
    until(shell, 30)
    assert Tasks(shell.directory / "run").kill(f"ps:{server}")
    counts(shell, running.ended(), steps)
    if "status" not in COMMANDS:
        return
    status = json.loads(shell.run("status", "--json", "run").out)
    told = {task["name"]: task["status"] for task in status["tasks"]}
    other = told[f"ps:{1 - server}"]
    assert (other["took_over"], other["share"]) == (f"shard {server} from ps:{server}", 1)
    assert other["log_entries"] > 0


@pytest.mark.slow
@pytest.mark.thorough
def test_servers_are_killed_one_after_the_other_as_they_are_filled_again(shell: Shell) -> None:
    steps = 1500
    words = ("--ps", 3, "--replicas", 2, "--workers", 2, "--strategy", "async")
    running = counting(shell, steps, *words, "--max-restarts", 5)
    tasks = Tasks(shell.directory / "run")
    for turn, attempts in enumerate((40, 300, 520)):
        until(shell, attempts)
        assert tasks.kill(f"ps:{turn}")
    ended = running.ended()
    counts(shell, ended, steps)
    assert len(re.findall(r"ps:\d was killed by SIGKILL; started again", ended.err)) == 3


@pytest.mark.thorough
def test_synchronous_rounds_go_on_as_if_no_server_had_died(shell: Shell) -> None:
    steps = 200
    words = ("--ps", 2, "--replicas", 2, "--workers", 2, "--strategy", "sync")
    running = counting(shell, steps, *words)
    until(shell, 30)
    assert Tasks(shell.directory / "run").kill("ps:0")
    ended = running.ended()
    assert ended.status == 0, ended.text
    data, known = saved(shell, steps), [notes(shell, worker) for worker in range(2)]
    assert updates(data) == [steps / 2, steps / 2]
    assert [one["applied"] for one in known] == [one["attempted"] for one in known] == [steps] * 2
    assert consumed(data) == [[0, 2 * steps * BATCH]]


@pytest.mark.slow(but=("steps",))
@pytest.mark.thorough
@pytest.mark.parametrize("end", [(), ("--epochs", 1.6)], ids=["steps", "epochs"])
def test_where_all_copies_are_lost_the_job_goes_back_to_its_newest_checkpoint(
    shell: Shell, end: tuple[object, ...]
) -> None:
    """There is none yet: the workers are started again, and begin at step 0."""
    steps = 400  # 1.6 epochs of 1,000 examples
    words = ("--ps", 2, "--replicas", 2, "--workers", 2, "--strategy", "async")
    running = counting(shell, steps, *words, "--max-restarts", 2, program=end)
    until(shell, 30)
    tasks = Tasks(shell.directory / "run")
    for server in range(2):
        assert tasks.send(f"ps:{server}", 9)
    ended = running.ended()
    assert ended.status == 0, ended.text
    assert "were lost before the first checkpoint" in ended.text
    data = saved(shell, steps)
    assert sum(updates(data)) == sum(table(data).values()) == steps
    if end:
        assert consumed(data) == [[0, steps * BATCH]]


@pytest.mark.thorough
@pytest.mark.parametrize("loop", ["session", "own"])
def test_a_schedule_and_what_a_loop_keeps_go_back_with_the_job(shell: Shell, loop: str) -> None:
    words = ("--ps", 2, "--replicas", 2, "--workers", 2, "--strategy", "sync")
    program = (PROGRAMS / "rates.py", "--steps", 120, "--every", 40)
    running = shell.start(
        *("run", *words, "--max-restarts", 2, "--run-dir", "run", *program),
        *(["--own-loop"] if loop == "own" else []),
    )
    run, deadline = shell.directory / "run", time.monotonic() + 120
    while not list_checkpoints(run) or step_of(shell, "worker:0") < 62:
        assert time.monotonic() < deadline, "there is no checkpoint"
    for server in range(2):
        assert Tasks(run).send(f"ps:{server}", 9)
    release(shell)
    ended = running.ended()
    assert ended.status == 0, ended.text
    assert re.search(r"the job goes back from step \d+ to step 40", ended.text), ended.text
    assert saved(shell, 120).model["count"].tolist() == [30 * 1 + 30 * 2 + 60 * 4]
    if loop == "own":
        assert ended.text.count("made 120") == 2
        assert "only that goes back with the job which optimizer.keep has" in ended.text


@pytest.mark.slow
@pytest.mark.parametrize("grows_at", [10, 110])
def test_a_job_that_has_added_parameters_goes_back_to_a_checkpoint_that_has_them(
    shell: Shell, grows_at: int
) -> None:
    """The job fails where the checkpoint is of a time before: started again it adds them again."""
    steps, every = 400, 100
    words = ("--ps", 2, "--replicas", 2, "--workers", 2, "--strategy", "async", "--max-restarts", 2)
    growing = ("--every-steps", every, "--grows-at", grows_at)
    running = counting(shell, steps, *words, program=growing, pause=0.05)
    run, deadline = shell.directory / "run", time.monotonic() + 120
    while not list_checkpoints(run) or step_of(shell, "worker:0") < grows_at + 10:
        assert time.monotonic() < deadline, "there is no checkpoint"
    for server in range(2):
        assert Tasks(run).send(f"ps:{server}", 9)
    release(shell)
    ended = running.ended()
    if grows_at < every:
        assert "all copies of a part of the parameters were lost: the job goes" in ended.text
    else:
        assert ended.status == 1, ended.text
        assert "is of a time before the optimizer was given late" in ended.text
        assert "run the same command again" in ended.text
        ended = counting(shell, steps, *words, program=growing, pause=0).ended()
    assert ended.status == 0, ended.text
    data = saved(shell, steps)
    assert sum(updates(data)) == steps
    assert 0 < data.model["late"].sum() / 40 <= steps - grows_at


@pytest.mark.slow
@pytest.mark.thorough
def test_a_worker_that_had_ended_training_is_started_again_where_the_job_goes_back(
    shell: Shell,
) -> None:
    """Nobody else makes the steps again: the other worker is stopped until it has ended."""
    steps = 400
    words = ("--ps", 2, "--replicas", 2, "--workers", 2, "--strategy", "ssp")
    bound = ("--staleness", 1000)
    saving = ("--every-steps", 100)
    restarts = ("--max-restarts", 2)
    running = counting(shell, steps, *words, *bound, *restarts, pause=0.05, program=saving)
    until(shell, 30)
    tasks = Tasks(shell.directory / "run")
    assert tasks.send("worker:1", signal.SIGSTOP)
    release(shell)
    deadline = time.monotonic() + 60
    while step_of(shell, "worker:0") < steps - 1:  # worker 1 computes the last update
        assert time.monotonic() < deadline, "worker 0 did not make its last update"
    for server in range(2):
        assert tasks.send(f"ps:{server}", signal.SIGKILL)
    # Worker 1 has not made the last steps again when worker 0 is gone. With several servers nobody
    # waits there under a staleness bound: an update that is lost with its worker is not made again.
    (shell.directory / "released").unlink()
    assert tasks.send("worker:1", signal.SIGCONT)
    ended = running.ended()
    assert ended.status == 0, ended.text
    assert "worker:0 had ended its training, and must be started again" in ended.text
    data = latest(shell.directory / "run", lambda path, error: pytest.fail(f"{path}"))
    assert data is not None and data.step == steps


@pytest.mark.thorough
def test_a_job_grows_and_shrinks_while_it_trains(shell: Shell) -> None:
    steps = 3000
    words = ("--ps", 2, "--workers", 2, "--strategy", "async")
    running = counting(shell, steps, *words, pause=0.05)
    until(shell, 30)
    grown = shell.run("scale", "--ps", 3, "run")
    assert grown.status == 0, grown.text
    assert "the job has 3 servers and 2 workers" in grown.text
    shrunk = shell.run("scale", "--ps", 1, "run")
    assert shrunk.status == 0, shrunk.text
    assert running.process.poll() is None, "the job had ended before it was made smaller"
    release(shell)
    ended = running.ended()
    assert "ps:2 has left: the job was made smaller" in ended.text
    counts(shell, ended, steps)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_synchronous_job_that_grows_is_bit_equal_to_one_of_that_size(shell: Shell) -> None:
    """With Adam, an average of the values, a schedule, and dropout: also after it has shrunk."""
    steps = 600
    program = (PROGRAMS / "train.py", "--out", "out", "--max-steps", steps)
    words = ("--workers", 2, "--strategy", "sync", "--run-dir")
    ended = shell.run("run", "--ps", 3, *words, "large", *program)
    assert ended.status == 0, ended.text
    paces = ("--pause", 0.05, "--pause-until", "released")
    running = shell.start("run", "--ps", 2, *words, "run", *program, *paces)
    for servers in (3, 2, 3):
        _until_it_trains(shell)
        scaled = shell.run("scale", "--ps", servers, "run")
        assert scaled.status == 0, scaled.text
    assert running.process.poll() is None, "the job had ended before it had three servers"
    release(shell)
    ended = running.ended()
    assert ended.status == 0, ended.text
    grown, large = (
        latest(shell.directory / run, lambda path, error: pytest.fail(f"{path}: {error}"))
        for run in ("run", "large")
    )
    assert grown is not None and large is not None and grown.step == large.step == steps
    assert grown.model.keys() == large.model.keys()
    for name, tensor in large.model.items():
        assert torch.equal(grown.model[name], tensor), name
    assert grown.optimizer.keys() == large.optimizer.keys()
    for name, tensor in large.optimizer.items():
        assert torch.equal(grown.optimizer[name], tensor), name


def _until_it_trains(shell: Shell) -> None:
    """Waits until `trireme status` tells of a live job whose workers have made steps."""
    deadline = time.monotonic() + 120
    while True:
        status = shell.run("status", "run").text
        if re.search(r"worker:1 .*live.* step [1-9]", status):
            return
        assert time.monotonic() < deadline, status
        time.sleep(0.2)


STOPS = '''
import os
import signal
from pathlib import Path

from trireme.shm.memory import Lending

copy, copies = Lending.carry, 0


def carry(self, payload):
    """Stops this process before its 40th copy into the memory of a worker."""
    global copies
    copies += self._borrowed
    if copies == 40 and not Path("stopped").exists():
        Path("stopped").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    return copy(self, payload)


Lending.carry = carry
'''
"""Runs as a Python process starts."""


@pytest.mark.thorough
def test_a_server_that_stopped_while_it_answered_writes_into_no_model_when_it_wakes(
    shell: Shell,
) -> None:
    (shell.directory / "sitecustomize.py").write_text(STOPS)
    words = ("run", "--ps", 3, "--replicas", 2, "--workers", 2, "--strategy", "sync")
    named = (PROGRAMS / "counting.py", "--out", "out", "--max-steps", 90, "--batch-size", BATCH)
    running = shell.start(
        *(*words, "--heartbeat-timeout", 2, "--run-dir", "run", *named, "--pause", 0.05),
        environ={"PYTHONPATH": f"{shell.directory}:{python_path(())}"},
    )
    running.until_there(shell.directory / "stopped")
    stopped = int((shell.directory / "stopped").read_text())
    attempts = (shell.directory / "out" / "notes-0").read_bytes().count(b"attempted")
    until(shell, attempts + 3)  # with a backup in its place
    os.kill(stopped, signal.SIGCONT)
    ended = running.ended()
    assert ended.status == 0, ended.text
    assert updates(saved(shell, 90)) == [90 * (1 / 2)] * 2
