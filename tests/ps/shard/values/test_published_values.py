"""Published values: what workers have is what the server thinks they have, and nothing is lost."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trireme.errors import FrameError
from trireme.ps.client.subscription import Subscription
from trireme.ps.flat import PartBuffer, as_bytes
from trireme.ps.layout import Layout
from trireme.ps.messages import Applied, ParameterSpec, PullReply, PushReply
from trireme.ps.shard.values.published_values import Publication
from trireme.ps.shard.values.snapshot_tensors import PUBLISHED, ranges
from trireme.wire.codec import BlockInt8

DTYPES = ("float32", "float64", "bfloat16", "float16")


def layout_of(dtype: str = "float32", count: int = 600) -> Layout:
    return Layout.of([ParameterSpec("w", (count,), dtype, 0)], servers=1, slots=1)


class Side:
    """A server's values and their publication, and workers that subscribe to them."""

    def __init__(self, dtype: str = "float32", seed: int = 1, workers: int = 1) -> None:
        self.layout = layout = layout_of(dtype)
        self.generator = torch.Generator().manual_seed(seed)
        self.values = PartBuffer(layout, 0)
        self.change(1.0)
        self.publication = Publication(BlockInt8(), layout, 0, self.values)
        self.publication.begin(0, ())
        self.workers = [PartBuffer(layout, 0) for _ in range(workers)]
        self.subscriptions = [Subscription(BlockInt8(), [each]) for each in self.workers]

    def change(self, size: float) -> None:
        (vector,) = self.values.vectors
        vector += size * torch.randn(vector.shape, generator=self.generator).to(vector.dtype)

    def tell(self, worker: int, since: int) -> int | None:
        """The answer to a worker that has the values of a step; returns since when it was."""
        step, payload = self.publication.since(since)
        message = PushReply(Applied(1), self.publication.step, 0, False, step)
        self.hear(worker, message, payload)
        return step

    def pull(self, worker: int) -> None:
        message = PullReply(self.publication.step, False)
        self.hear(worker, message, self.publication.published.vectors)

    def hear(
        self, worker: int, message: PushReply | PullReply, payload: Sequence[torch.Tensor]
    ) -> None:
        """As it goes over a connection: the bytes go to where the subscription says."""
        data = b"".join(bytes(as_bytes(tensor)) for tensor in payload)
        packed = isinstance(message, PushReply) and message.since is not None
        views: Sequence[memoryview] = self.workers[worker].views
        if packed:
            views = self.subscriptions[worker].place(0, len(data))
        assert sum(view.nbytes for view in views) == len(data)
        rest = memoryview(data)
        for view in views:
            view[:] = rest[: view.nbytes]
            rest = rest[view.nbytes :]
        assert self.subscriptions[worker].take(0, message) == len(data)

    def published(self, worker: int = 0) -> bool:
        """Whether a worker has, to the bit, what the server thinks it has."""
        return torch.equal(self.workers[worker].vectors[0], self.publication.published.vectors[0])

    def missing(self) -> torch.Tensor:
        """By how much the published values are not the true ones."""
        published, values = self.publication.published.vectors[0], self.values.vectors[0]
        return values.double() - published.double()


@pytest.mark.parametrize("dtype", DTYPES)
@given(seed=st.integers(0, 2**32 - 1), sizes=st.lists(st.floats(1e-6, 10), max_size=6))
def test_every_worker_has_the_published_values_to_the_bit(
    dtype: str, seed: int, sizes: list[float]
) -> None:
    side = Side(dtype, seed, workers=2)
    side.pull(0)
    for number, size in enumerate(sizes):
        side.change(size)
        side.publication.publish(8 * (number + 1))
        assert side.tell(0, 8 * number) == 8 * number
        assert side.published()
    side.pull(1)  # one that comes late
    assert side.published(1)


@given(seed=st.integers(0, 2**32 - 1), sizes=st.lists(st.floats(1e-6, 10), min_size=1, max_size=8))
def test_nothing_is_lost_but_late(seed: int, sizes: list[float]) -> None:
    """What is missing is half a step of its block at most, and goes with the next changes."""
    side = Side(seed=seed)
    for number, size in enumerate(sizes):
        side.change(size)
        before = side.missing()
        side.publication.publish(number + 1)
        for start in range(0, 600, 256):
            block = before[start : start + 256].abs().max()
            left = side.missing()[start : start + 256].abs().max()
            assert left <= 0.5001 * block / 127 + 1e-5
    for number in range(4):
        side.publication.publish(100 + number)
    assert side.missing().abs().max() <= 1e-5, "published again and again it is all there"


def test_what_never_changes_is_published_exactly() -> None:
    side = Side()
    (vector,) = side.values.vectors
    frozen = vector[300:].clone()
    for step in range(1, 10):
        vector[:300] += torch.randn(300, generator=side.generator)
        side.publication.publish(step)
    assert torch.equal(side.publication.published.vectors[0][300:], frozen)


def test_who_missed_a_change_is_sent_all() -> None:
    side = Side(workers=2)
    side.pull(0)
    side.pull(1)
    for step in (1, 2):
        side.change(1.0)
        side.publication.publish(step)
        assert side.tell(0, step - 1) == step - 1
    assert side.tell(1, 0) is None
    assert side.published(1)
    assert side.tell(0, 2) is None, "who has the newest, and asks again"
    assert side.published(0)


def test_an_answer_is_the_same_when_it_is_given_again_and_later_ones_do_not_change_it() -> None:
    side = Side()
    side.change(1.0)
    side.publication.publish(1)
    first, kept = side.publication.since(0)[1], side.publication.since(0)[1]
    copies = [tensor.clone() for tensor in first]
    side.change(1.0)
    side.publication.publish(2)
    assert all(map(torch.equal, kept, copies))
    assert side.publication.since(1)[1] is not first


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_published_whole(bad: float) -> None:
    side = Side()
    side.pull(0)
    side.values.vectors[0][7] = bad
    side.publication.publish(1)
    assert side.tell(0, 0) is None
    torch.testing.assert_close(
        side.workers[0].vectors[0], side.values.vectors[0], rtol=0, atol=0, equal_nan=True
    )


def test_it_goes_on_from_a_snapshot_as_if_nothing_had_been() -> None:
    side = Side()
    side.change(1.0)
    side.publication.publish(1)
    parts = side.layout.parts(0)
    live = ranges(PUBLISHED, parts, side.publication.published)
    saved = [(spec, tensor.clone()) for spec, tensor in live]
    other = Side()
    other.values.vectors[0].copy_(side.values.vectors[0])
    other.publication.begin(1, saved)
    assert bool(side.missing().any())
    assert torch.equal(other.missing(), side.missing())
    other.pull(0)
    for each in (side, other):
        each.values.vectors[0].add_(0.25)
        each.publication.publish(2)
    assert torch.equal(other.missing(), side.missing())
    assert other.tell(0, 1) == 1
    assert other.published()
    other.publication.begin(2, ())  # from a checkpoint of a job that did not pack
    assert not other.missing().any()


def test_a_change_of_other_values_than_those_at_hand_is_refused() -> None:
    side = Side()
    side.change(1.0)
    side.publication.publish(1)
    with pytest.raises(FrameError, match="since step 0, and the values at hand are of step None"):
        side.tell(0, 0)


@pytest.mark.parametrize("length", [0, 1 << 20])
def test_a_change_that_cannot_be_one_is_refused(length: int) -> None:
    with pytest.raises(FrameError, match=f"ps:0 sent {length} bytes of packed values"):
        Side().subscriptions[0].place(0, length)


def test_a_change_that_makes_no_sense_is_refused() -> None:
    side = Side()
    side.pull(0)
    message = PushReply(Applied(1), 1, 0, False, 0)
    with pytest.raises(FrameError, match="what ps:0 sent of its values: the deflated bytes"):
        side.hear(0, message, [torch.ones(40, dtype=torch.uint8)])
