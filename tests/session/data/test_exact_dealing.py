"""Every kind of data set, in every way to run: each example counts exactly once an epoch."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Subset

import trireme
from tests.data.sources import BATCH, SIZE, Rows, kinds
from tests.harness import Cluster, run_job
from tests.process_groups import ProcessGroup, run_process_group
from trireme.session.session import Session

EPOCHS = 2
Counts = dict[str, list[tuple[int, int, int]]]
"""By kind: (the loop's epoch, the batch's, the example) of each example of an update."""


def make(index: int = 0) -> Session:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    return trireme.Session(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), 0.0))


def counting(session: Session) -> Counts:
    counted: Counts = {}
    for kind, (dataset, arguments) in kinds().items():
        found = counted.setdefault(kind, [])
        for epoch in session.epochs(EPOCHS, name=kind):
            for batch in session.loader(dataset, name=kind, **arguments):
                session.step(batch)
                numbers = batch[0][:, 0].tolist() if batch.spans else []
                assert len(batch) == len(numbers)
                found += [(epoch, batch.epoch, int(number)) for number in numbers]
    return counted


def counting_in_a_process() -> Counts:
    with make() as session:
        return counting(session)


def check(counts: list[Counts]) -> None:
    for kind in kinds():
        found = [each for one in counts for each in one[kind]]
        times = Counter((epoch, number) for _, epoch, number in found)
        assert times == {(e, n): 1 for e in range(EPOCHS) for n in range(SIZE)}, kind
        assert all(loop == epoch for loop, epoch, _ in found), kind


@pytest.mark.slow(one_in=2)
@pytest.mark.thorough
@pytest.mark.parametrize(
    "cluster",
    [
        Cluster(servers=0),
        Cluster(workers=2),
        Cluster(workers=3, servers=2, strategy="sync"),
        Cluster(workers=2, servers=2, strategy="ssp", staleness=1),
        pytest.param(Cluster(workers=2, strategy="averaging", every=3), marks=pytest.mark.thorough),
        pytest.param(Cluster(workers=2, prefetch=True), marks=pytest.mark.thorough),
        pytest.param(Cluster(workers=3, strategy="sync", aggregate=2), marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_each_example_counts_once_an_epoch(cluster: Cluster) -> None:
    counts = run_job(cluster, make, counting).values
    if cluster.aggregate is None:
        check(counts)
        return
    for kind in kinds():  # updates that came late were left out, and their examples dealt again
        found = {(epoch, number) for one in counts for _, epoch, number in one[kind]}
        assert found == {(e, n) for e in range(EPOCHS) for n in range(SIZE)}, kind


@pytest.mark.slow(but=("allreduce",))
@pytest.mark.thorough
@pytest.mark.parametrize(
    "group",
    [
        ProcessGroup(workers=3),
        ProcessGroup(workers=1, mesh="pp=2", inside=2, strategy="pipeline", microbatches=1),
    ],
    ids=lambda group: group.strategy or "allreduce",
)
def test_each_example_counts_once_an_epoch_in_process_groups(group: ProcessGroup) -> None:
    counts: list[Any] = run_process_group(group, counting_in_a_process).values
    if group.strategy == "pipeline":  # both stages have the same examples
        assert counts[0] == counts[1]
        counts = counts[:1]
    check(counts)


def dropping(session: Session) -> Counts:
    counted: Counts = {}
    for kind, (dataset, arguments) in kinds().items():
        if kind == "DataLoader":
            continue
        found = counted.setdefault(kind, [])
        for epoch in session.epochs(EPOCHS, name=kind):
            for batch in session.loader(dataset, name=kind, drop_last=True, **arguments):
                session.step(batch)
                assert len(batch) == BATCH or kind == "shards"
                found += [(epoch, batch.epoch, int(number)) for number in batch[0][:, 0].tolist()]
    return counted


@pytest.mark.parametrize(
    "cluster", [Cluster(servers=0), Cluster(workers=3, strategy="sync")], ids=str
)
def test_the_last_batch_is_left_out(cluster: Cluster) -> None:
    counts = run_job(cluster, make, dropping).values
    together = BATCH * (cluster.workers if cluster.strategy == "sync" else 1)
    for kind in counts[0]:
        found = Counter((e, n) for one in counts for _, e, n in one[kind])
        assert set(found.values()) == {1}, kind
        if kind in ("tensors", "rows", "sampler"):
            for epoch in range(EPOCHS):
                assert sum(e == epoch for e, _ in found) == SIZE // together * together, kind


def chosen(epoch: int, seed: int = 0) -> Subset[Any]:
    """Some examples, which the program chooses anew in each epoch: more and more of them."""
    indices = random.Random(seed * EPOCHS + epoch).sample(range(SIZE), 20 + 10 * epoch)
    return Subset(Rows(SIZE), indices)


def growing(session: Session) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for epoch in session.epochs(EPOCHS + 1):
        dataset = chosen(epoch) if epoch < EPOCHS else Rows(SIZE)
        for batch in session.loader(dataset, BATCH, resized=True):
            session.step(batch)
            numbers = batch[0][:, 0].tolist() if batch.spans else []
            found += [(epoch, int(number)) for number in numbers]
    return found


def growing_in_a_process() -> list[tuple[int, int]]:
    with make() as session:
        return growing(session)


def check_growing(counts: list[list[tuple[int, int]]]) -> None:
    expected = Counter((e, n) for e in range(EPOCHS) for n in chosen(e).indices)
    expected.update((EPOCHS, n) for n in range(SIZE))
    assert Counter(each for one in counts for each in one) == expected


@pytest.mark.parametrize(
    "cluster",
    [
        Cluster(servers=0),
        Cluster(workers=3),
        Cluster(workers=3, servers=2, strategy="sync"),
        pytest.param(Cluster(workers=2, strategy="averaging", every=3), marks=pytest.mark.thorough),
        pytest.param(Cluster(workers=2, prefetch=True), marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_a_program_chooses_other_examples_in_each_epoch(cluster: Cluster) -> None:
    check_growing(run_job(cluster, make, growing).values)


def other_choice() -> str:
    with make() as session:
        try:
            for epoch in session.epochs(EPOCHS):
                dataset = chosen(1, seed=epoch * (1 + session.task.group.rank))
                for batch in session.loader(dataset, BATCH):
                    session.step(batch)
        except trireme.Rejected as error:
            return f"epoch {epoch}: {error}"
    return ""


@pytest.mark.thorough
@pytest.mark.parametrize(
    "group",
    [
        ProcessGroup(workers=2),
        pytest.param(
            ProcessGroup(workers=1, servers=1, mesh="dp=2", inside=2), marks=pytest.mark.thorough
        ),
    ],
    ids=lambda group: group.mesh or "allreduce",
)
def test_processes_that_choose_differently_in_a_later_epoch_are_told(group: ProcessGroup) -> None:
    check_growing(run_process_group(group, growing_in_a_process).values)
    for said in run_process_group(group, other_choice).values:
        assert said.startswith("epoch 1: rank") and "in different orders" in said
