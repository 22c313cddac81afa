"""The modes themselves: what is exact, bit by bit; and where workers race, what they agreed to.

Where it depends on the race which updates count (asynchronous modes, backup workers), a plain
process replays what the verdicts say happened: the same gradients, from the same values, in the
same order. It must end at the same values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from tests.harness import Cluster, run_job
from tests.parity.plain import (
    Batch,
    Problem,
    Values,
    difference,
    gradients,
    loss_of,
    train,
    train_in_parts,
    values_of,
)
from tests.parity.problems import EXACT, adam, same_everywhere, sgd, small, trained
from trireme.ps.messages import Applied, Stale
from trireme.session.session import Session

MAKERS = pytest.mark.parametrize("make", [sgd(), adam()], ids=["sgd", "adam"])


def float32() -> Problem:
    return small(dtype=torch.float32, steps=40)


# Bit by bit --------------------------------------------------------------------------------------


@MAKERS
def test_two_servers_compute_the_bits_that_one_does(make) -> None:
    problem = float32()
    one = same_everywhere(trained(problem, make, Cluster(2, 1, "sync")))
    for servers in (2, 3):
        several = same_everywhere(trained(problem, make, Cluster(2, servers, "sync")))
        assert difference(one, several) == 0.0


@pytest.mark.thorough
@MAKERS
def test_a_deterministic_run_is_bit_equal_to_its_repeat(make) -> None:
    problem, cluster = float32(), Cluster(3, 2, "sync")
    first, second = (
        same_everywhere(trained(problem, make, cluster, deterministic=True)) for _ in range(2)
    )
    assert difference(first, second) == 0.0


def test_a_round_adds_the_very_gradients_in_the_order_of_the_workers() -> None:
    problem = float32()
    values = same_everywhere(trained(problem, sgd(), Cluster(3, 1, "sync")))
    rounds = zip(*problem.shares(3), strict=True)
    assert difference(values, train_in_parts(problem, sgd(), rounds)) == 0.0


def test_every_transport_carries_the_same_bits() -> None:
    problem = float32()
    memory, tcp, shm = (
        same_everywhere(trained(problem, adam(), Cluster(2, 2, "sync", scheme=scheme)))
        for scheme in ("memory", "tcp", "shm")
    )
    assert difference(memory, tcp) == difference(memory, shm) == 0.0


# Modes that are one process by another name ----------------------------------------------------


@pytest.mark.slow(one_in=2)
@MAKERS
@pytest.mark.parametrize(
    "cluster",
    [
        Cluster(1, 2, "async"),
        Cluster(1, 1, "ssp", staleness=1),
        Cluster(1, 2, "ssp", staleness=4),
        Cluster(1, 1, "sync"),
        Cluster(3, 2, "sync"),
        Cluster(2, 1, "sync", aggregate=2),
        Cluster(2, 2, "sync", aggregate=2),
    ],
    ids=str,
)
def test_equals_one_process(make, cluster: Cluster) -> None:
    problem = small()
    values = same_everywhere(trained(problem, make, cluster))
    assert difference(values, train(problem, make).values) < EXACT


# Modes in which workers race -------------------------------------------------------------------


@dataclass(frozen=True)
class Push:
    """One update: of what, computed from the values of which step, and what became of it."""

    worker: int
    batch: Batch
    pulled: int
    verdict: Applied | Stale


def pushes_of(problem: Problem, cluster: Cluster, steps: int) -> tuple[list[Push], Values]:
    """Trains until the global step is `steps`, each worker over and over its own batches.

    Returns:
        Every push that was made, and the values of the last step.
    """
    shares = problem.shares(cluster.workers)

    def make(worker: int) -> Session:
        return Session(problem.copy(), loss_of, sgd(lr=0.02), max_steps=steps)

    def program(session: Session) -> tuple[list[Push], Values]:
        worker, pushes = session.task.index, []
        while not session.should_stop():
            batch = shares[worker][len(pushes) % len(shares[worker])]
            pulled = session.global_step
            verdict = session.step(batch).verdict
            assert isinstance(verdict, (Applied, Stale))
            pushes.append(Push(worker, batch, pulled, verdict))
        return pushes, values_of(session.model)

    ran = run_job(cluster, make, program).values
    pushes = [push for made, _ in ran for push in made]
    applied = {push.verdict.step for push in pushes if isinstance(push.verdict, Applied)}
    assert applied == set(range(1, steps + 1)), "each step is somebody's"
    # Whoever made the last step got its values with the answer.
    last = next(values for made, values in ran if Applied(steps) in [p.verdict for p in made])
    return pushes, last


def replay(problem: Problem, rounds: Sequence[Sequence[Push]]) -> Values:
    """Makes the same updates in one process, each from the values that its worker had."""
    model = problem.copy()
    optimizer = sgd(lr=0.02)(model.parameters())
    history = [values_of(model)]
    other = problem.copy()
    for pushes in rounds:
        parts = []
        for push in pushes:
            other.load_state_dict(history[push.pulled])
            parts.append(gradients(other, push.batch))
        for parameter, *terms in zip(model.parameters(), *parts, strict=True):
            parameter.grad = sum(terms[1:], terms[0]) / len(terms)
        optimizer.step()
        history.append(values_of(model))
    return history[-1]


def rounds_of(pushes: Sequence[Push], steps: int) -> list[list[Push]]:
    """Which applied pushes made each step, in the order of the workers."""
    rounds: list[list[Push]] = [[] for _ in range(steps)]
    for push in sorted(pushes, key=lambda push: push.worker):
        if isinstance(push.verdict, Applied):
            rounds[push.verdict.step - 1].append(push)
    return rounds


def furthest_ahead(applied: Sequence[Push], workers: int) -> int:
    """How many updates a worker was ahead of the slowest at most, its last one included."""
    counts, furthest = [0] * workers, 0
    for push in applied:
        counts[push.worker] += 1
        furthest = max(furthest, max(counts) - min(counts))
    return furthest


@pytest.mark.parametrize(
    "cluster",
    [Cluster(3, 1, "async"), Cluster(3, 1, "ssp", staleness=1), Cluster(2, 1, "ssp", staleness=3)],
    ids=str,
)
def test_asynchronous_updates_are_applied_one_by_one_as_the_verdicts_say(cluster: Cluster) -> None:
    problem, steps = small(batch=24), 60
    pushes, values = pushes_of(problem, cluster, steps)
    rounds = rounds_of(pushes, steps)
    assert [len(round) for round in rounds] == [1] * steps
    assert len(pushes) == steps, "none is stale"
    applied = [push for round in rounds for push in round]
    assert any(push.pulled < step for step, push in enumerate(applied)), "nobody raced"
    assert furthest_ahead(applied, cluster.workers) <= (cluster.staleness or steps) + 1
    assert difference(values, replay(problem, rounds)) < EXACT


@pytest.mark.parametrize("servers", [1, 2])
def test_backup_workers_make_rounds_of_the_fastest(servers: int) -> None:
    problem, steps = small(batch=24), 40
    cluster = Cluster(3, servers, "sync", aggregate=2)
    pushes, values = pushes_of(problem, cluster, steps)
    rounds = rounds_of(pushes, steps)
    assert [len(round) for round in rounds] == [2] * steps
    assert all(push.pulled == step for step, round in enumerate(rounds) for push in round)
    stale = [push for push in pushes if isinstance(push.verdict, Stale)]
    assert stale, "three workers and rounds of two"
    assert all(push.verdict.step > push.pulled for push in stale)
    assert difference(values, replay(problem, rounds)) < EXACT
