"""The loader: the right examples in the right order, whichever way they come."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from trireme.data.batch import Batch, Span
from trireme.data.loader import Loader, transform_parts
from trireme.data.loading import Loading
from trireme.data.order import Order

SIZE = 23
SEED = 5
DATASET = TensorDataset(torch.arange(SIZE) * 10, torch.arange(SIZE))


class Examples(Dataset[tuple[int, int]]):
    """The same examples, one by one."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index * 10, index


class Spans:
    """Deals `count` spans of 4 positions; notes how many it was asked for, and by which thread."""

    def __init__(self, count: int, start: int = 0) -> None:
        self.left = [(start + 4 * i, start + 4 * i + 4) for i in range(count)]
        self.asked: list[int] = []
        self.threads: set[int] = set()

    def __call__(self, count: int) -> Sequence[Span]:
        self.asked.append(count)
        self.threads.add(threading.get_ident())
        given, self.left = self.left[:count], self.left[count:]
        return given


def identity(batch: Any, generator: torch.Generator) -> Any:
    return batch


def noisy(batch: Any, generator: torch.Generator) -> Any:
    inputs, targets = batch
    return inputs + torch.rand(len(targets), generator=generator), targets


WAYS: dict[str, dict[str, Any]] = {
    "in memory": {"dataset": DATASET},
    "transformed in a thread": {"dataset": DATASET, "transform": identity},
    "one by one": {"dataset": Examples()},
    "one by one, transformed": {"dataset": Examples(), "transform": identity},
    "by processes": {"dataset": Examples(), "loading": Loading(num_workers=2)},
}


def make(source: Callable[[int], Sequence[Span]], dataset: Any = DATASET, **options: Any) -> Loader:
    return Loader(dataset, Order(SIZE, SEED), source, **{"batch_size": 4, "ahead": 3} | options)


def spans_of(batches: Sequence[Batch]) -> list[Span]:
    return [span for batch in batches for span in batch.spans]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> dict[str, Any]:
    return WAYS[request.param]


def test_batches_follow_the_order(way: dict[str, Any]) -> None:
    source = Spans(13)  # more than two epochs
    batches = list(make(source, **way))
    assert spans_of(batches) == [(start, start + 4) for start in range(0, 52, 4)]
    for batch in batches:
        inputs, targets = batch
        assert targets.tolist() == Order(SIZE, SEED).indices(*batch.spans[0]).tolist()
        assert inputs.tolist() == (targets * 10).tolist()
        assert targets.dtype == torch.int64
        assert len(batch) == 4
    assert set(source.asked) == {3}
    assert source.threads == {threading.get_ident()}


def test_more_spans_are_asked_for_where_they_do_not_last() -> None:
    times = iter([0.0, 0.05, 0.1, 0.3, 0.35, 0.4])
    asked: list[int] = []

    def source(count: int) -> list[Span]:
        start = 4 * sum(asked)
        asked.append(count)
        return [(start + 4 * i, start + 4 * i + 4) for i in range(count)]

    size = 640  # a sixteenth of an epoch is ten batches
    order = Order(size, SEED)
    dataset = TensorDataset(torch.arange(size))
    loader = Loader(dataset, order, source, batch_size=4, ahead=2, now=lambda: next(times))
    batches = list(islice(loader, sum((2, 4, 8, 8, 10, 10))))
    assert asked == [2, 4, 8, 8, 10, 10]  # those of the third time have lasted
    assert spans_of(batches) == [(start, start + 4) for start in range(0, 4 * len(batches), 4)]


def test_nothing_more_is_asked_after_the_end(way: dict[str, Any]) -> None:
    source = Spans(6)
    assert len(list(make(source, **way))) == 6
    assert len(source.asked) == 3  # 3, 3, and none


def test_a_new_iteration_goes_on_with_what_was_not_handed_out(way: dict[str, Any]) -> None:
    loader = make(Spans(8), **way)
    first = []
    for batch in loader:
        first.append(batch)
        if len(first) == 4:
            break
    gc.collect()
    assert set(loader.unused) <= {(16, 20), (20, 24), (24, 28), (28, 32)}
    assert spans_of([*first, *loader]) == [(start, start + 4) for start in range(0, 32, 4)]
    assert loader.unused == ()


def test_unused_spans_can_be_given_back(way: dict[str, Any]) -> None:
    source = Spans(6)
    loader = make(source, **way)
    iteration = iter(loader)
    next(iteration)
    unused = loader.unused
    assert unused[:2] == ((4, 8), (8, 12))
    assert loader.discard() == unused
    assert loader.unused == ()
    assert next(iteration, None) is None, "a discarded span was handed out"
    rest = [(start, start + 4) for start in range(4, 24, 4)]
    assert [*unused, *spans_of(list(loader))] == rest


def test_a_second_iteration_ends_the_first(way: dict[str, Any]) -> None:
    loader = make(Spans(6), **way)
    first = iter(loader)
    batches = [next(first)]
    second = iter(loader)
    batches.append(next(second))
    assert next(first, None) is None
    batches += second
    assert spans_of(batches) == [(start, start + 4) for start in range(0, 24, 4)]


def test_what_is_transformed_depends_on_seed_and_position_alone() -> None:
    def drawn(start: int, count: int, **options: Any) -> dict[Span, list[float]]:
        loader = make(Spans(count, start), **options)
        return {batch.spans[0]: batch[0].tolist() for batch in loader}

    whole = drawn(0, 8, transform=noisy)
    resumed = drawn(16, 4, transform=noisy)
    one_by_one = drawn(0, 8, dataset=Examples(), transform=noisy)
    assert resumed == {span: whole[span] for span in resumed}
    assert one_by_one == whole
    noise = torch.tensor(list(whole.values())).frac()
    assert noise.unique().numel() == noise.numel(), "two batches drew the same numbers"


@pytest.mark.parametrize("dataset", [DATASET, Examples()])
def test_batches_that_are_joined_are_transformed_each_for_itself(dataset: Dataset[Any]) -> None:
    order = Order(SIZE, SEED)
    spans = iter([[(0, 10)], [(10, 20)], [(20, 23)]])
    joined = Loader(
        dataset,
        order,
        lambda count: next(spans, []),
        batch_size=10,
        transform=partial(transform_parts, noisy, 4),
    )
    alone = Loader(dataset, order, Spans(5), batch_size=4, transform=noisy)
    one, *_ = joined
    parts = [batch[0] for batch in alone]
    assert torch.equal(one[0], torch.cat([*parts[:2], one[0][8:]]))
    assert one[0][8:].floor().equal(parts[2].floor()[:2])
    assert torch.equal(one[1], torch.arange(SIZE)[order.indices(0, 10)])


def test_torchs_global_generator_is_left_alone(way: dict[str, Any]) -> None:
    before = torch.get_rng_state()
    list(make(Spans(3), **way))
    assert torch.equal(torch.get_rng_state(), before)


def test_batches_are_copies() -> None:
    (batch,) = make(Spans(1))
    batch[0].zero_()
    assert torch.equal(DATASET.tensors[0], torch.arange(SIZE) * 10)


def test_subsets_of_subsets() -> None:
    inner = Subset(DATASET, range(22, -1, -1))
    outer = Subset(inner, [20, 0, 5, 7])
    loader = Loader(outer, Order(4, SEED, shuffle=False), Spans(1), batch_size=4)
    (batch,) = loader
    assert batch[1].tolist() == [outer[i][1].item() for i in range(4)] == [2, 22, 17, 15]


def test_a_subclass_that_makes_its_items_otherwise() -> None:
    class Negated(TensorDataset):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
            return tuple(-field for field in super().__getitem__(index))

    (batch,) = make(Spans(1), dataset=Negated(*DATASET.tensors))
    assert batch[1].tolist() == (-Order(SIZE, SEED).indices(0, 4)).tolist()


def test_items_of_other_kinds() -> None:
    class Mappings(Dataset[dict[str, int]]):
        def __len__(self) -> int:
            return SIZE

        def __getitem__(self, index: int) -> dict[str, int]:
            return {"x": index}

    class Single(Dataset[int]):
        def __len__(self) -> int:
            return SIZE

        def __getitem__(self, index: int) -> int:
            return index

    wanted = Order(SIZE, SEED).indices(0, 4).tolist()
    (batch,) = make(Spans(1), dataset=Mappings())
    assert batch["x"].tolist() == wanted
    (fields,) = batch
    assert list(fields) == ["x"]
    (batch,) = make(Spans(1), dataset=Single())
    (numbers,) = batch
    assert numbers.tolist() == wanted


def failing(batch: Any, generator: torch.Generator) -> Any:
    if 10 in batch[1]:
        raise RuntimeError("cannot transform 10")
    return batch


def test_an_exception_of_the_transform_reaches_the_caller() -> None:
    loader = make(Spans(12), transform=failing)
    handed_out = []
    with pytest.raises(RuntimeError, match="cannot transform 10"):
        handed_out.extend(loader)
    # `extend` keeps what it got: all before the batch with example 10, which is to be done again.
    failed = len(handed_out)
    assert 10 in Order(SIZE, SEED).indices(4 * failed, 4 * failed + 4)
    assert loader.unused[0] == (4 * failed, 4 * failed + 4)


def test_an_exception_of_the_source_reaches_the_caller(way: dict[str, Any]) -> None:
    def source(count: int) -> Sequence[Span]:
        raise ConnectionError("the server is gone")

    with pytest.raises(ConnectionError, match="the server is gone"):
        next(iter(make(source, **way)))


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "trireme-loader" in thread.name]


def test_the_thread_ends_with_the_iteration() -> None:
    iteration = iter(make(Spans(9), transform=identity))
    next(iteration)
    assert loader_threads()
    list(iteration)
    assert not loader_threads()


def test_the_thread_ends_when_nobody_holds_the_iteration() -> None:
    for _ in make(Spans(9), transform=identity):
        assert loader_threads()
        break
    gc.collect()
    assert not loader_threads()


def test_transforms_run_while_the_caller_computes() -> None:
    made = threading.Semaphore(0)

    def transform(batch: Any, generator: torch.Generator) -> Any:
        made.release()
        return batch

    next(iteration := iter(make(Spans(9), transform=transform)))
    # The first, and at least one more without anybody asking for it.
    assert made.acquire(timeout=30)
    assert made.acquire(timeout=30)
    assert spans_of(list(iteration)) == [(start, start + 4) for start in range(4, 36, 4)]


def test_spans_that_make_no_sense_are_refused(way: dict[str, Any]) -> None:
    for span in ((0, 5), (4, 3)):
        with pytest.raises(ValueError, match=rf"gave the span \({span[0]}, {span[1]}\) for .* 4"):
            list(make(lambda count, span=span: [span], **way))


def test_what_cannot_be_is_refused() -> None:
    for wrong in ({"batch_size": 0}, {"ahead": 0}):
        with pytest.raises(ValueError, match="start at 1"):
            make(Spans(1), **wrong)
    with pytest.raises(ValueError, match="has 23 examples and the order 22"):
        Loader(DATASET, Order(22), Spans(1), batch_size=4)


def test_a_batch_prints_itself() -> None:
    assert repr(Batch((), ((4, 8), (10, 12)))) == "Batch(6 examples at (4, 8), (10, 12))"
