"""Pushes that leave while backward runs bring the very bits that pushes after it would."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests.harness import Cluster, run_job
from tests.parity.plain import Problem, difference, loss_of
from tests.parity.problems import adam, draw, same_everywhere, seeded, sgd, small, trained
from trireme.ps.client.overlap import Overlap
from trireme.session.session import Session

CHUNK = 128  # bytes: so that a few small layers are many chunks


class Sent:
    """Counts the early pushes that reached servers."""

    def __init__(self) -> None:
        self.frames = 0
        finish = Overlap.finish

        def counted(overlap: Overlap) -> list[int]:
            sent = finish(overlap)
            self.frames += len(sent)
            return sent

        self.patch = mock.patch.object(Overlap, "finish", counted)


@pytest.fixture
def sent() -> Iterator[Sent]:
    counts = Sent()
    with mock.patch("trireme.ps.layout.CHUNK_BYTES", CHUNK), counts.patch:
        yield counts


def deep(dtype: torch.dtype = torch.float32, steps: int = 20) -> Problem:
    generator = torch.Generator().manual_seed(3)
    sizes = [11, 23, 17, 31, 5]
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.Tanh()]
    model = seeded(nn.Sequential(*layers[:-1]), generator)
    return Problem(model.to(dtype), draw(generator, steps, 24, dtype))


def two_groups(parameters: Any) -> torch.optim.Optimizer:
    """Biases lie behind all weights then: far from the order in which backward goes."""
    given = list(parameters)
    return torch.optim.AdamW(
        [
            {"params": [p for p in given if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in given if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=0.01,
    )


CLUSTERS = {
    "async": Cluster(1, 1, "async", scheme="tcp", overlap="on"),
    "async on three servers": Cluster(1, 3, "async", scheme="tcp", overlap="on"),
    "async in memory": Cluster(1, 2, "async", overlap="on"),
    "ssp": Cluster(1, 2, "ssp", staleness=2, scheme="tcp", overlap="on"),
    "sync": Cluster(3, 2, "sync", scheme="tcp", overlap="on"),
}


def without(cluster: Cluster) -> Cluster:
    return Cluster(
        cluster.workers,
        cluster.servers,
        cluster.strategy,
        staleness=cluster.staleness,
        scheme=cluster.scheme,
        overlap="off",
    )


@pytest.mark.parametrize("make", [sgd(), adam(), two_groups], ids=["sgd", "adam", "two groups"])
@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS)
def test_an_overlapped_push_brings_the_same_bits(make: Any, cluster: Cluster, sent: Sent) -> None:
    problem = deep()
    after = same_everywhere(trained(problem, make, without(cluster)))
    assert sent.frames == 0
    early = same_everywhere(trained(problem, make, cluster))
    assert difference(early, after) == 0.0
    assert sent.frames == len(problem.batches) * cluster.workers * cluster.servers


class Mixed(nn.Module):
    """Two dtypes, and a layer that is used always, never, or only now and then."""

    def __init__(self, used: str) -> None:
        super().__init__()
        self.used = used
        self.first = nn.Linear(11, 40)
        self.other = nn.Linear(40, 40)
        self.wide = nn.Linear(40, 30, dtype=torch.float64)
        self.last = nn.Linear(30, 5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs).tanh()
        if self.used == "always" or (self.used == "now and then" and bool(inputs[0, 0] > 0)):
            hidden = self.other(hidden).tanh()
        output: torch.Tensor = self.last(self.wide(hidden.double()).tanh().float())
        return output


MIXED_STEPS = 30


def mixed(used: str) -> Problem:
    generator = torch.Generator().manual_seed(3)
    model = seeded(Mixed(used), generator).float()
    model.wide.double()
    return Problem(model, draw(generator, MIXED_STEPS, 24, torch.float32))


def early_steps(problem: Problem, used: str) -> int:
    """How many steps push early: those before which the same parameters had gradients."""
    before, early, wrong = True, 0, 0  # the first push says that all have gradients
    for inputs, _ in problem.batches:
        now = used == "always" or (used == "now and then" and bool(inputs[0, 0] > 0))
        if wrong < 3:  # the third time that it was wrong is the last
            early, wrong = early + (now == before), wrong + (now != before)
        before = now
    return early


@pytest.mark.parametrize("used", ["always", "never", "now and then"])
def test_what_is_of_another_dtype_or_has_no_gradient_comes_along(used: str, sent: Sent) -> None:
    problem = mixed(used)
    cluster = Cluster(1, 2, "async", scheme="tcp", overlap="on")
    early = same_everywhere(trained(problem, adam(), cluster))
    expected = early_steps(problem, used)
    # One that says something wrong is sent again whole; others are not given up for that.
    least = {"always": MIXED_STEPS, "never": MIXED_STEPS - 1, "now and then": 1}[used]
    assert least <= expected <= MIXED_STEPS - (used != "always")
    assert sent.frames == expected * 2
    after = same_everywhere(trained(problem, adam(), without(cluster)))
    assert difference(early, after) == 0.0
    assert sent.frames == expected * 2


@pytest.mark.parametrize(
    "options",
    [{"l2": 0.01}, {"clip_norm": 0.1}, {"accumulate": 3}],
    ids=["l2", "clipped", "accumulated"],
)
def test_what_changes_gradients_after_backward_keeps_pushes_behind_it(
    options: dict[str, Any], sent: Sent
) -> None:
    cluster = Cluster(1, 2, "async", scheme="tcp", overlap="on")
    early = same_everywhere(trained(deep(), sgd(), cluster, **options))
    after = same_everywhere(trained(deep(), sgd(), without(cluster), **options))
    assert difference(early, after) == 0.0
    assert sent.frames == 0


@pytest.mark.parametrize("skipped", [(7,), (2, 5, 9, 14)], ids=["once", "often"])
def test_an_update_that_is_skipped_does_not_begin(skipped: tuple[int, ...], sent: Sent) -> None:
    problem = deep()
    batches: list[Any] = list(problem.batches)
    for step in skipped:
        inputs, targets = batches[step]
        batches[step] = (inputs * float("nan"), targets)
    problem = Problem(problem.model, batches)
    cluster = Cluster(1, 2, "async", scheme="tcp", overlap="on")
    early = same_everywhere(trained(problem, sgd(), cluster, nan="skip"))
    assert sent.frames == (20 - len(skipped)) * 2  # all others leave early, also the next ones
    after = same_everywhere(trained(problem, sgd(), without(cluster), nan="skip"))
    assert difference(early, after) == 0.0


def test_rounds_that_are_clipped_on_the_server_overlap(sent: Sent) -> None:
    cluster = Cluster(2, 2, "sync", scheme="tcp", overlap="on")
    early = same_everywhere(trained(deep(), sgd(), cluster, clip_norm=0.1))
    after = same_everywhere(trained(deep(), sgd(), without(cluster), clip_norm=0.1))
    assert difference(early, after) == 0.0
    assert sent.frames == 20 * 2 * 2


@pytest.mark.parametrize(
    "cluster",
    [
        Cluster(1, 2, "async", scheme="shm", overlap="on"),
        Cluster(1, 2, "async", scheme="tcp", overlap="on", prefetch=True),
        Cluster(1, 2, "async", scheme="tcp", overlap="auto"),
    ],
    ids=["servers read the worker's memory", "prefetch", "small"],
)
def test_where_it_is_not_possible_or_does_not_pay_it_is_not_done(
    cluster: Cluster, sent: Sent
) -> None:
    problem = small()

    def program(session: Session) -> None:
        for batch in problem.batches[:10]:
            session.step(batch)

    def session(_: int) -> Session:
        return Session(problem.copy(), loss_of, sgd(), max_steps=20)

    assert run_job(cluster, session, program).values == [None]
    assert sent.frames == 0
