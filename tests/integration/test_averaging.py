"""Workers of real processes that train by themselves: killed and stopped between exchanges."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.faults import Proxy
from tests.harness import Cluster, newer_view, run_job
from tests.integration.shell import PROGRAMS, ROOT, Shell
from trireme.ps.messages import Stale, WorkerProgress
from trireme.session.checkpoint import CheckpointData, latest
from trireme.session.result import StepResult
from trireme.session.session import Session

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

BATCH, EVERY = 4, 8


def saved(shell: Shell) -> CheckpointData:
    data = latest(shell.directory / "run", lambda path, error: pytest.fail(f"{path}: {error}"))
    assert data is not None
    return data


def rows_of(data: CheckpointData) -> list[float]:
    """What each worker's steps have added up to, as its row counts them."""
    rows = data.model["rows"]
    assert torch.equal(rows, rows[:, :1].expand_as(rows))
    return rows[:, 0].tolist()


def consumed(data: CheckpointData) -> int:
    """How many examples are in the values."""
    return sum(stop - start for start, stop in data.state["consumed"]["train"])


def count(shell: Shell, steps: int, *words: object) -> CheckpointData:
    """Runs two workers of the counting program to the end."""
    ended = shell.run(
        *("run", "--ps", 1, "--workers", 2, "--strategy", "averaging", "--every", EVERY),
        *("--run-dir", "run"),
        *(words[: words.index("|")] if "|" in words else words),
        *(PROGRAMS / "counting.py", "--out", "out", "--max-steps", steps, "--batch-size", BATCH),
        *(words[words.index("|") + 1 :] if "|" in words else ()),
    )
    assert ended.status == 0, ended.text
    return saved(shell)


@pytest.mark.thorough
def test_a_worker_killed_in_its_period_is_started_again_and_each_step_counts_once(
    shell: Shell,
) -> None:
    """Worker 1 dies with half a period in hand; started again, with a delta under way."""
    steps, faults = 120, ("1:13:before:kill", "1:8:in flight:kill")
    data = count(
        shell,
        steps,
        *("--staleness", 2, "--max-restarts", 2),
        *("|", "--wait-for", 12),
        *(word for fault in faults for word in ("--fault", fault)),
    )
    # One by one, half of each delta is added: what the two have added up to is half of all steps.
    assert sum(rows_of(data)) * 2 == data.step
    assert steps <= data.step < steps + EVERY
    assert consumed(data) == data.step * BATCH
    assert rows_of(data)[1] >= EVERY / 2, "what it had exchanged before it died is kept"


@pytest.mark.slow
@pytest.mark.thorough
def test_the_others_go_on_and_take_over_the_examples_of_an_unfinished_period(shell: Shell) -> None:
    steps = 30
    data = count(shell, steps, "|", "--fault", f"1:{EVERY + 5}:before:kill")
    # Rounds: halves while there were two. Of its second period nobody has anything.
    assert rows_of(data) == [steps - EVERY / 2, EVERY / 2]
    assert data.step == steps
    assert data.state["consumed"]["train"] == [[0, (steps + EVERY) * BATCH]]


@pytest.mark.slow(but=("1",))
@pytest.mark.thorough
@pytest.mark.parametrize("servers", [1, 2])
def test_nothing_counts_twice_in_int8_when_a_worker_dies_and_comes_back(
    shell: Shell, servers: int
) -> None:
    """In its second period."""
    steps = 240
    data = count(
        shell,
        steps,
        *("--ps", servers, "--compress", "int8", "--max-restarts", 1),
        *("|", "--wait-for", 12 + EVERY, "--fault", "1:13:before:kill"),
    )
    assert data.step == steps
    rows = rows_of(data)
    # Each round adds the mean of its members' steps: of one of them alone, or half of both.
    assert sum(rows) == pytest.approx(steps, rel=0.02)
    pushes = msgspec.convert(data.state["pushes"], list[WorkerProgress])
    table = {row.worker: row.applied for row in pushes}
    assert table[0] == steps // EVERY
    assert table[1] == table[0], "what it had begun and not pushed it has made again"
    assert rows[1] == pytest.approx(table[1] * EVERY / 2, rel=0.02)
    assert consumed(data) == (table[0] + table[1]) * EVERY * BATCH


@pytest.mark.slow
@pytest.mark.thorough
def test_a_job_that_is_stopped_in_a_period_exchanges_it_saves_and_goes_on(shell: Shell) -> None:
    steps, stopped = 60, 21
    words = (
        *("run", "--ps", 1, "--workers", 2, "--strategy", "averaging", "--run-dir", "run"),
        *(PROGRAMS / "train.py", "--out", "out", "--max-steps", steps),
    )
    # The other one is told in the same period, or it would end that before.
    faults = (f"0:{stopped}:before:stop job", f"1:{stopped}:before:hear of stop")
    ended = shell.run(*words, "--fault", faults[0], "--fault", faults[1])
    assert ended.status == 130, ended.text
    at = saved(shell).step
    assert stopped <= at < 32, "the period was not finished for that"
    local = saved(shell).local
    assert {f"{worker}/0.weight/exp_avg" for worker in range(2)} <= local.keys()

    ended = shell.run(*words)
    assert ended.status == 0, ended.text
    assert f"worker:0 | restoring step {at}\n" in ended.out
    assert "fresh state" not in ended.text
    data = saved(shell)
    assert data.step == steps
    # Who heard of it earlier had made fewer steps of that period; of all others each made all.
    made = [float(data.local[f"{worker}/0.weight/step"]) for worker in range(2)]
    assert max(made) == steps
    assert min(made) > steps - 16
    # Exchanges are on the grid again after the one that was before its time.
    for worker in range(2):
        report = json.loads((shell.directory / f"out/worker-{worker}.json").read_text())
        assert report["applied"] == [step for step in (32, 48, 60) if step > at]


@pytest.mark.slow
@pytest.mark.thorough
def test_a_run_says_how_many_bytes_it_took(shell: Shell) -> None:
    program = (PROGRAMS / "spread.py", "--out", "out/values", "--max-steps", 64)
    found = {}
    for words in (("sync",), ("averaging",), ("diloco", "--every", 32, "--compress", "int8")):
        ended = shell.run("run", "--ps", 1, "--workers", 2, "--strategy", *words, *program)
        assert ended.status == 0, ended.text
        lines = re.findall(r"^worker:\d \| bytes: ([\d,]+) pushed, ([\d,]+) p", ended.out, re.M)
        assert len(lines) == 2
        assert "int8" in words or len(set(lines)) == 1, "what is deflated is as long as it gets"
        counts = [[int(number.replace(",", "")) for number in line] for line in lines]
        found[words[0]] = [max(each) for each in zip(*counts, strict=True)]
    size = found["sync"][0] // 64  # of the model
    assert found["sync"] == [64 * size, 65 * size], "and the first pull"
    assert found["averaging"] == [4 * size, 5 * size]
    assert found["diloco"][0] < 2 * size / 3.5
    assert found["diloco"][1] == 3 * size, "values come back whole"


@pytest.mark.slow
def test_int8_pushes_take_a_four_hundredth_of_the_bytes_of_sync(
    shell: Shell, mnist_dir: Path
) -> None:
    """Of MNIST's classic program, of which `sync` takes the whole model both ways at each step.

    Values come back whole, once in a hundred steps.
    """
    steps, size = 4000, 318_144
    ended = shell.run(
        *("run", "--ps", 2, "--workers", 2, "--strategy", "diloco", "--compress", "int8"),
        *(ROOT / "examples" / "mnist_replica.py", "--data_dir", mnist_dir),
        *("--max_steps", steps, "--learning_rate", 0.003),
    )
    assert ended.status == 0, ended.text
    accuracy = re.search(r"test accuracy: (0\.\d+)", ended.out)
    assert accuracy is not None and float(accuracy[1]) > 0.96
    lines = re.findall(r"^worker:\d \| bytes: ([\d,]+) pushed, ([\d,]+) p", ended.out, re.M)
    assert len(lines) == 2
    for line in lines:
        pushed, pulled = (int(number.replace(",", "")) for number in line)
        assert pushed <= steps * size / 400
        assert pulled <= (steps / 100 + 1) * size, "and the first pull"


@pytest.mark.slow
def test_workers_of_several_processes_train_by_themselves_too(shell: Shell) -> None:
    found = []
    for mesh in ((), ("--mesh", "pp=2")):
        ended = shell.run(
            *("run", "--ps", 1, "--workers", 2, "--strategy", "diloco", "--every", 10, *mesh),
            *(PROGRAMS / "spread.py", "--out", "out/values", "--max-steps", 25),
        )
        assert ended.status == 0, ended.text
        found.append(load_file(shell.directory / "out" / "values"))
    whole, parts = found
    assert whole.keys() == parts.keys()
    assert max(float((whole[name] - parts[name]).abs().max()) for name in whole) < 1e-5


class Rows(nn.Module):
    """One row a worker; its gradient is -1 in the row of the worker that computes it."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(2, 24))

    def forward(self, worker: torch.Tensor) -> torch.Tensor:
        return -self.rows[int(worker)].sum()


def test_a_worker_taken_for_lost_gives_its_period_up_comes_back_and_nothing_counts_twice() -> None:
    """The coordinator hears nothing of it for too long, while its servers do."""
    steps, every = 120, 4
    held, evicted = threading.Event(), threading.Event()
    proxies: dict[int, Proxy] = {}

    def through(worker: int, address: str) -> str:
        proxies[worker] = Proxy(address)
        return proxies[worker].address

    policy = {"heartbeat_interval": 0.1, "heartbeat_timeout": 3.0}
    cluster = Cluster(
        *(2, 1, "averaging"),
        every=every,
        staleness=1000,
        scheme="tcp",
        policy=policy,
        coordinator_seen_at=through,
    )

    def make(worker: int) -> Session:
        return Session(
            Rows(),
            lambda outputs, _: outputs,
            lambda parameters: torch.optim.SGD(parameters, lr=1.0),
            max_steps=steps,
        )

    def count(session: Session) -> tuple[int, int, list[float]]:
        """Trains to the end; returns the steps applied and stale, and what was learned."""
        stale = 0
        while not session.should_stop():
            result = one(session)
            stale += result.steps if isinstance(result.verdict, Stale) else 0
        session.job.end()
        values = session.worker.backend.snapshot(state=False).values["rows"]
        return session.recorder.applied, stale, values[:, 0].tolist()

    def one(session: Session) -> StepResult:
        worker = torch.tensor([session.task.index])
        return session.step((worker, worker))

    def lost(session: Session) -> tuple[int, int, list[float]]:
        for _ in range(every + 2):
            one(session)
        proxies[1].hold()
        held.set()
        assert evicted.wait(20)
        return count(session)  # half a period more, and that is fenced off until it is back

    def checker(session: Session) -> tuple[int, int, list[float]]:
        worker = session.worker
        assert held.wait(20)
        without = newer_view(worker, 1)
        assert [entry.index for entry in without.workers] == [0]
        evicted.set()
        while not worker.backend.status()[0].counters.get("fenced"):
            pass  # until its push has come, and was refused
        proxies[1].flow()
        again = newer_view(worker, without.number)
        assert [(entry.index, entry.incarnation) for entry in again.workers] == [(0, 1), (1, 2)]
        return count(session)

    (first, none, rows), (second, stale, same) = run_job(
        cluster, make, lambda session: checker(session) if session.is_chief else lost(session)
    ).values
    for proxy in proxies.values():
        proxy.close()
    assert none == 0
    assert stale == every, "of what was fenced off, and of nothing else"
    assert rows == same == [first / 2, second / 2]
    assert steps <= first + second < steps + every


LEAVING = """
import os, signal, time, torch, trireme
from torch.utils.data import TensorDataset

model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
data = TensorDataset(torch.ones(31, 1), torch.zeros(31, 1))
with trireme.Session(model, torch.nn.MSELoss(), optimizer) as session:
    for epoch in session.epochs(60):
        for batch in session.loader(data, batch_size=1):
            session.step(batch)
            time.sleep(0.02)
        if epoch == 1 and not session.is_chief:
            os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.slow
def test_a_worker_leaves_at_the_end_of_an_epoch_that_is_shorter_than_a_period(shell: Shell) -> None:
    (shell.directory / "leaving.py").write_text(LEAVING)
    job = ("run", "--ps", 1, "--workers", 2, "--strategy", "averaging", "--every", 16)
    ended = shell.run(*job, "--run-dir", "run", "leaving.py")
    assert ended.status == 0, ended.text
    counts = re.findall(r"worker:(\d) \| (\d+) local steps: (\d+) applied", ended.text)
    made = {int(worker): int(steps) for worker, steps, applied in counts if steps == applied}
    assert made.keys() == {0, 1}, ended.text
    assert made[1] % 15 == 0 and made[1] < 60 * 15 / 2 and made[0] + made[1] == 60 * 31
