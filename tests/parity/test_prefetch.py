"""Prefetch: each gradient is older by one update, and that is all that changes."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.harness import Cluster, run_job
from tests.parity.plain import (
    Batch,
    OptimizerFactory,
    Problem,
    Values,
    difference,
    gradients,
    loss_of,
    values_of,
)
from tests.parity.problems import EXACT, adam, sgd, small
from trireme.errors import ConfigurationError
from trireme.job_config import JobConfig
from trireme.ps.messages import Applied, WorkerProgress
from trireme.session.checkpoint import latest
from trireme.session.session import Session
from trireme.strategies import SSP, Async, resolve

SCHEMES = pytest.mark.parametrize("scheme", ["memory", "tcp", "shm"])
BATCH = 4


def train_delayed(problem: Problem, make: OptimizerFactory) -> Values:
    """Plain training, but each gradient is of the values before the last update."""
    model, before = problem.copy(), problem.copy()
    optimizer = make(model.parameters())
    for batch in problem.batches:
        for parameter, gradient in zip(model.parameters(), gradients(before, batch), strict=True):
            parameter.grad = gradient
        before.load_state_dict(model.state_dict())
        optimizer.step()
    return values_of(model)


@pytest.mark.slow(one_in=2)
@SCHEMES
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("make", [sgd(), adam()], ids=["sgd", "adam"])
def test_one_worker_is_plain_training_delayed_by_one_update(
    make: OptimizerFactory, servers: int, scheme: str
) -> None:
    problem, extra = small(), small(steps=1, seed=6).batches[0]

    def session(worker: int) -> Session:
        return Session(problem.copy(), loss_of, make, max_steps=len(problem.batches))

    def program(session: Session) -> tuple[Values, list[object], int]:
        results = [session.step(batch) for batch in [*problem.batches, extra]]
        assert session.should_stop()
        assert [result.global_step for result in results[:3]] == [0, 1, 2]
        with pytest.raises(ConfigurationError, match="after training had ended"):
            session.step(extra)
        return values_of(session.model), [r.verdict for r in results], session.recorder.applied

    cluster = Cluster(1, servers, "async", prefetch=True, scheme=scheme)
    ((values, verdicts, applied),) = run_job(cluster, session, program).values
    # The gradient of one batch too many was never pushed: its step would have been one too many.
    assert difference(values, train_delayed(problem, make)) < EXACT
    assert verdicts == [None, *(Applied(step + 1) for step in range(len(problem.batches)))]
    assert applied == len(problem.batches)


class Rows(nn.Module):
    """One row a worker; its gradient is -1 in the row of the worker that computes it."""

    def __init__(self, workers: int, worker: int) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(workers, 24))
        self.worker = worker

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        return -self.rows[self.worker].sum()


def counted(cluster: Cluster, steps: int, *, leave_after: int | None = None) -> list[Session]:
    """Has every worker count its updates in the values; returns the sessions afterwards."""
    data = TensorDataset(torch.zeros(50, 1), torch.zeros(50))

    def session(worker: int) -> Session:
        return Session(
            Rows(cluster.workers, worker),
            lambda outputs, targets: outputs,
            lambda parameters: torch.optim.SGD(parameters, lr=1.0),
            max_steps=steps,
        )

    def program(session: Session) -> Session:
        for number, batch in enumerate(session.loader(data, BATCH)):
            if number == leave_after:
                session.stop("enough")
                break
            session.step(batch)
        return session

    return run_job(cluster, session, program).values


@pytest.mark.slow(one_in=2)
@pytest.mark.thorough
@SCHEMES
@pytest.mark.parametrize("strategy", ["async", "ssp"])
@pytest.mark.parametrize("servers", [1, 2])
def test_every_acknowledged_update_is_in_the_values_once(
    strategy: str, servers: int, scheme: str, tmp_path: Path
) -> None:
    steps = 150
    cluster = Cluster(*(3, servers, strategy), prefetch=True, scheme=scheme, run_dir=tmp_path)
    sessions = counted(cluster, steps)
    data = latest(tmp_path, lambda path, error: pytest.fail(f"{path}: {error}"))
    assert data is not None
    rows = data.model["rows"][:, 0].tolist()
    table = {
        row.worker: row.applied
        for row in msgspec.convert(data.state["pushes"], list[WorkerProgress])
    }
    assert rows == [table[worker] for worker in range(3)]
    assert rows == [session.recorder.applied for session in sessions]
    # Under a staleness bound on several servers nobody waits at the end: see `Ending`.
    assert sum(rows) == data.step
    if strategy == "async" or servers == 1:
        assert data.step == steps
    taken = sum(stop - start for start, stop in data.state["consumed"]["train"])
    assert taken == data.step * BATCH


def test_an_update_under_way_counts_when_the_program_leaves_its_loop(tmp_path: Path) -> None:
    cluster = Cluster(1, 1, "async", prefetch=True, run_dir=tmp_path)
    (session,) = counted(cluster, 1000, leave_after=7)
    data = latest(tmp_path, lambda path, error: pytest.fail(f"{path}: {error}"))
    assert data is not None
    assert session.recorder.applied == data.step == data.model["rows"][0, 0].item() == 7


def test_the_end_may_be_heard_between_two_steps() -> None:
    """By an evaluation, which waits for the push under way: the next step is not one too many."""
    problem = small()
    last = len(problem.batches)

    def session(worker: int) -> Session:
        return Session(problem.copy(), loss_of, sgd(), max_steps=last)

    def program(session: Session) -> int:
        for batch in [*problem.batches, problem.batches[0]]:
            session.evaluate(TensorDataset(*problem.batches[0]))
            session.step(batch)
        return session.global_step

    (step,) = run_job(Cluster(1, 1, "async", prefetch=True), session, program).values
    assert step == last


def test_checkpoints_and_evaluations_come_between_pushes() -> None:
    problem = small()

    def session(worker: int) -> Session:
        return Session(problem.copy(), loss_of, sgd(), max_steps=len(problem.batches))

    def program(session: Session) -> Values:
        whole = TensorDataset(*problem.batches[0])
        for batch in [*problem.batches, problem.batches[0]]:
            session.step(batch)
            if session.global_step % 5 == 3:
                assert session.evaluate(whole)["loss"] > 0
        return values_of(session.model)

    cluster = Cluster(1, 2, "async", prefetch=True)
    (values,) = run_job(cluster, session, program).values
    assert difference(values, train_delayed(problem, sgd())) < EXACT


def test_a_lone_process_needs_no_prefetch() -> None:
    problem: Problem = small()
    batches: list[Batch] = list(problem.batches)

    def program(session: Session) -> list[object]:
        return [session.step(batch).verdict for batch in batches]

    def session(worker: int) -> Session:
        return Session(problem.copy(), loss_of, sgd(), strategy=Async(prefetch=True))

    (verdicts,) = run_job(Cluster(1, 0), session, program).values
    assert verdicts == [Applied(step + 1) for step in range(len(batches))]


def test_a_program_may_ask_for_it_and_the_launch_may_not_ask_it_of_sync() -> None:
    assert SSP(2, prefetch=True).rule() == SSP(2).rule()
    with pytest.raises(ConfigurationError, match="only async, ssp"):
        resolve("sync", JobConfig().replaced("a test", prefetch=True))
