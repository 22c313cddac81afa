"""Passes are counted by example, and what is left out is left out, under every strategy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from threading import Event
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.harness import Cluster, run_job
from tests.process_groups import ProcessGroup, run_process_group
from trireme.session.session import Session

SIZE = 42
"""In the last round of two workers, of an epoch or of two passes, one of them has nothing."""
BATCH = 4
EPOCHS = 2
RATE = 1e-5

CLUSTERS = [
    Cluster(servers=0),
    Cluster(workers=2),
    Cluster(workers=2, servers=2, prefetch=True),
    Cluster(workers=2, servers=2, strategy="sync"),
    Cluster(workers=3, strategy="sync", aggregate=2),
    Cluster(workers=2, strategy="ssp", staleness=1),
    Cluster(workers=2, strategy="averaging", every=3),
]


def numbers(size: int = SIZE) -> TensorDataset:
    return TensorDataset(torch.arange(float(size)).unsqueeze(1), torch.zeros(size, 1))


def make(index: int = 0) -> Session:
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    return Session(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), RATE))


class Gan(nn.Module):
    """A generator and a discriminator."""

    def __init__(self) -> None:
        super().__init__()
        self.g, self.d = nn.Linear(1, 1), nn.Linear(1, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.d(self.g(inputs))
        return out


def make_gan(index: int = 0) -> Session:
    torch.manual_seed(0)
    build = lambda params: torch.optim.SGD(params, RATE)  # noqa: E731
    return Session(Gan(), nn.functional.mse_loss, {"g": build, "d": build})


def examples(batch: Any) -> list[int]:
    return [int(number) for number in batch[0][:, 0].tolist()] if batch.spans else []


def two_steps(session: Session) -> dict[str, list[int]]:
    found: list[int] = []
    for batch in session.loader(numbers(), BATCH, epochs=EPOCHS):
        session.step(batch)
        session.step(batch)
        found += examples(batch)
    return {"train": found}


def two_optimizers(session: Session) -> dict[str, list[int]]:
    found: list[int] = []
    for batch in session.loader(numbers(), BATCH, epochs=EPOCHS):
        session.step(batch, optimizer="d")
        session.step(batch, optimizer="g", loss=lambda outputs, targets: -outputs.mean())
        found += examples(batch)
    return {"train": found}


def two_loaders(session: Session) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {"train": [], "second": []}
    for name in found:
        for batch in session.loader(numbers(), BATCH, name=name, epochs=EPOCHS):
            session.step(batch)
            found[name] += examples(batch)
        assert session.should_stop()
    return found


def side_by_side(session: Session) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {"train": [], "second": []}
    first = session.loader(numbers(), BATCH, epochs=EPOCHS)
    for one, two in zip(first, session.loader(numbers(1000), BATCH, name="second"), strict=False):
        session.step(((one[0] + two[0][: len(one[0])]), one[1]))
        found["train"] += examples(one)
    del found["second"]
    return found


def both_in_turn(session: Session) -> dict[str, list[int]]:
    """A worker may be dealt most of one data set, and another most of the other.

    The second has as many batches: a worker that has none while another still holds some ends.
    """
    found: dict[str, list[int]] = {"train": [], "second": []}
    loaders = {
        name: iter(session.loader(numbers(), BATCH, name=name, epochs=EPOCHS)) for name in found
    }
    while True:
        for name, loader in loaders.items():
            batch = next(loader, None)
            if batch is None:
                del found["second"]
                return found
            session.step(batch)
            found[name] += examples(batch)


def both_at_once(session: Session) -> dict[str, list[int]]:
    """As `both_in_turn`, with a batch in hand while the worker asks for the other."""
    found: dict[str, list[int]] = {"train": [], "second": []}
    loaders = [session.loader(numbers(), BATCH, name=name, epochs=EPOCHS) for name in found]
    for batches in zip(*loaders, strict=False):
        for name, batch in zip(found, batches, strict=True):
            session.step(batch)
            found[name] += examples(batch)
    return found


PROGRAMS = [two_steps, two_optimizers, two_loaders, side_by_side, both_in_turn, both_at_once]


def check(counts: list[dict[str, list[int]]], cluster: Cluster) -> None:
    for name in counts[0]:
        times = Counter(number for one in counts for number in one[name])
        if cluster.aggregate is None:  # else late updates are left out, and dealt again
            assert times == dict.fromkeys(range(SIZE), EPOCHS), name
        assert set(times) == set(range(SIZE))


@pytest.mark.slow(one_in=2)
@pytest.mark.thorough
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("cluster", CLUSTERS, ids=str)
def test_each_example_is_in_each_pass(
    cluster: Cluster, program: Callable[[Session], dict[str, list[int]]]
) -> None:
    made = make_gan if program is two_optimizers else make
    check(run_job(cluster, made, program).values, cluster)


def skipping(session: Session) -> dict[str, list[int]]:
    """Leaves out batches, the same of each worker, in both kinds of passes."""
    found: dict[str, list[int]] = {"train": [], "second": []}
    for number, batch in enumerate(session.loader(numbers(), of_all(session), epochs=EPOCHS)):
        if number % 3 != 2:
            session.step(batch)
            found["train"] += examples(batch)
    for _ in session.epochs(EPOCHS, name="second"):
        loader = session.loader(numbers(), of_all(session), name="second")
        for number, batch in enumerate(loader):
            if number % 3 != 2:
                session.step(batch)
                found["second"] += examples(batch)
    return found


def of_all(session: Session) -> int:
    """Returns a worker's part of a batch of 8."""
    return 2 * BATCH // session.batches_per_step


def whole(session: Session) -> dict[str, list[int]]:
    """Makes two steps of each batch, and then each optimizer's of another data set."""
    found: dict[str, list[int]] = {"train": [], "second": []}
    for name in found:
        for batch in session.loader(numbers(), of_all(session), name=name, epochs=EPOCHS):
            session.step(batch, optimizer="d")
            session.step(batch, optimizer="g", loss=lambda outputs, targets: -outputs.mean())
            found[name] += examples(batch)
    return found


def ran_to_its_end(program: Callable[[Session], dict[str, list[int]]], made: Any = make) -> Any:
    """Returns what a program has found, the loss that it comes to, and the step."""
    with made() as session:
        found = program(session)
        values = session.evaluate(numbers())
    return found, values["loss"], session.global_step


ALIKE = [whole, skipping]


@pytest.mark.slow(one_in=2)
@pytest.mark.parametrize("program", ALIKE, ids=lambda each: each.__name__)
@pytest.mark.parametrize(
    "spread",
    [
        Cluster(workers=2, servers=2, strategy="sync"),
        ProcessGroup(workers=2),
        ProcessGroup(workers=2, strategy="fsdp"),
        ProcessGroup(workers=1, servers=1, mesh="dp=2", inside=2, strategy="async"),
    ],
    ids=lambda each: f"{each.workers}x{each.servers}-{each.strategy}",
)
def test_synchronous_workers_do_as_one_process(
    spread: Cluster | ProcessGroup, program: Callable[[Session], dict[str, list[int]]]
) -> None:
    made = make_gan if program is whole else make
    (one,) = run_job(Cluster(servers=0), made, lambda session: finished(session, program)).values
    if isinstance(spread, Cluster):
        several = run_job(spread, made, lambda session: finished(session, program)).values
    else:
        several = run_process_group(spread, ran_to_its_end, program, made).values
    for name, found in one[0].items():
        assert sorted(n for each in several for n in each[0][name]) == sorted(found), name
    for _, loss, step in several:
        assert loss == pytest.approx(one[1], rel=1e-6) and step == one[2]


def finished(session: Session, program: Callable[[Session], dict[str, list[int]]]) -> Any:
    """As `ran_to_its_end`, in a session that is entered."""
    found = program(session)
    session.job.end()
    return found, session.evaluate(numbers())["loss"], session.global_step


def said(
    program: Callable[[Session], Any],
) -> Callable[[Session], tuple[list[int], list[str], int]]:
    """Returns a program that also returns what its session warns of, and the last step."""

    def saying(session: Session) -> tuple[list[int], list[str], int]:
        warned: list[str] = []
        with mock.patch.object(session.worker.progress, "warn", warned.append):
            found = program(session)
            session.job.end()
        return found, [line for line in warned if "left out" in line], session.global_step

    return saying


@pytest.mark.slow(one_in=3)
@pytest.mark.thorough
@pytest.mark.parametrize("passes", ["loader", "session"])
@pytest.mark.parametrize("skips", ["each third", "the last", "one worker"])
@pytest.mark.parametrize("cluster", CLUSTERS, ids=str)
def test_what_is_left_out_is_left_out_and_no_step(
    cluster: Cluster, skips: str, passes: str
) -> None:
    def program(session: Session) -> list[int]:
        found: list[int] = []
        number = 0
        for _ in session.epochs(EPOCHS) if passes == "session" else (0,):
            for batch in session.loader(numbers(), BATCH, epochs=EPOCHS):
                number += 1
                if (
                    (skips == "each third" and number % 3 == 0)
                    or (skips == "the last" and examples(batch) and batch.spans[-1][1] % SIZE == 0)
                    or (skips == "one worker" and session.task.index == 0 and number > 2)
                ):
                    continue
                session.step(batch)
                found += examples(batch)
        return found

    results = run_job(cluster, make, said(program)).values
    found = Counter(number for one, _, _ in results for number in one)
    left_out = EPOCHS * SIZE - sum(found.values())
    assert all(len(lines) <= 1 for _, lines, _ in results)
    if cluster.aggregate is None:
        assert (left_out > 0) == any(lines for _, lines, _ in results)
        # Asynchronous, the quicker worker may be dealt all.
        assert left_out > 0 or skips == "one worker"
    most = EPOCHS * math.ceil(SIZE / BATCH)  # of steps, if each batch makes one
    if cluster.aggregate is None:
        assert max(found.values()) <= EPOCHS
        assert max(step for _, _, step in results) <= most


@pytest.mark.slow(one_in=2)
@pytest.mark.parametrize("passes", ["loader", "session"])
@pytest.mark.parametrize("cluster", CLUSTERS[1:], ids=str)
def test_the_others_go_on_where_one_worker_leaves_its_loop(cluster: Cluster, passes: str) -> None:
    left = Event()

    def program(session: Session) -> list[int]:
        found: list[int] = []
        if session.task.index != 1:
            assert left.wait(30)  # else it may not be dealt any
        for _ in session.epochs(1) if passes == "session" else (0,):
            for batch in session.loader(numbers(), BATCH, epochs=1):
                if session.task.index == 1:
                    left.set()
                    break
                session.step(batch)
                found += examples(batch)
        return found

    results = run_job(cluster, make, said(program)).values
    found = Counter(number for one, _, _ in results for number in one)
    assert set(found) == set(range(SIZE))
    if cluster.aggregate is None:
        assert max(found.values()) == 1
        assert max(step for _, _, step in results) <= math.ceil(SIZE / BATCH)


def test_a_loop_that_takes_one_batch_at_a_time_has_each_example_once() -> None:
    found: list[int] = []
    with make() as session:
        for _ in range(2 * SIZE // BATCH):
            batch = next(iter(session.loader(numbers(), BATCH)))
            if batch.spans[0][0] != 8:
                session.step(batch)
                found += examples(batch)
    times = Counter(found)
    assert sum(times.values()) == 2 * SIZE - 2 * BATCH  # it was handed out twice, and left out
    assert set(times) == set(range(SIZE)) and max(times.values()) == 2


def test_batches_are_stepped_in_any_order() -> None:
    with make() as session:
        batches = list(session.loader(numbers(), BATCH, epochs=1))
        found = [number for batch in batches for number in examples(batch)]
        results = [session.step(batch) for batch in reversed(batches)]
        assert sorted(found) == list(range(SIZE)) and len(results) == math.ceil(SIZE / BATCH)
        assert not session._feed._handed.left_out()
