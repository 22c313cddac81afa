"""Data sets that are read from the beginning: iterable and streaming ones.

A stream has parts, which are read one after the other: the shards of a data set that has some, or
the whole of it. Each part of each epoch has a fixed range of positions, of which only the first
ones have examples: how many is found where the part ends. So a position means the same example for
every worker, under any number of workers, and in a job that is resumed.

A data set has shards if it has a number `num_shards` above 1 and a method
`shard(num_shards=n, index=i)`, as the streaming ones of Hugging Face's `datasets`.
`set_epoch(epoch)` is called before an epoch is read.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from trireme.data.draws import DrawingInit, drawing, draws_of, seed_process
from trireme.data.ledger import MOST_POSITIONS
from trireme.data.loading import Loading
from trireme.data.seeds import derive, permutation
from trireme.data.streams import check_one_reader
from trireme.errors import ConfigurationError, DataError

_MOST_CURSORS = 3
_MOST_SKIPPED = 1024  # examples that are in memory at a time


def shards_of(dataset: object) -> int:
    """Returns the number of shards of a data set; 1 where it has none."""
    count = getattr(dataset, "num_shards", 1)
    sharded = isinstance(count, int) and callable(getattr(dataset, "shard", None))
    return count if sharded and not isinstance(count, bool) and count > 1 else 1


class Stream:
    """Reads the examples of a stream by position."""

    def __init__(
        self,
        dataset: Iterable[Any],
        shards: int,
        *,
        loading: Loading,
        seed: int = 0,
        shuffle: bool = False,
    ) -> None:
        check_one_reader(dataset, loading.num_workers)
        if shuffle and shards == 1:
            raise ConfigurationError(
                f"shuffle=True with a {type(dataset).__name__} without shards: a stream has the "
                "order in which it is read. Shuffle in the data set itself, with a seed and a "
                "buffer"
            )
        self.size = MOST_POSITIONS - shards
        self.shards = shards
        self._dataset = dataset
        self._loading = loading
        self._seed, self._shuffle = seed, shuffle
        self._cursors: list[_Cursor] = []  # the one used last comes last
        self._window: tuple[int, list[Any]] = (0, [])
        self._ends: dict[int, int] = {}

    def epoch(self, position: int) -> int:
        return position // self.size // self.shards

    def take(self, start: int, stop: int) -> tuple[list[Any], int | None]:
        """Returns the examples of some positions of a part, and where the part ends."""
        first, kept = self._window
        if kept and first <= start < first + len(kept):
            found = kept[start - first : stop - first]
        else:
            found = []
        part, reached = start // self.size, start + len(found)
        limit = min(stop, self._ends.get(part, stop))
        if reached < limit:
            cursor = self._cursor_at(part, reached - part * self.size)
            more = cursor.read(limit - reached)
            found, reached = found + more, reached + len(more)
            if reached < limit:  # the part may even end before `start`
                self._end(part, part * self.size + cursor.index)
        return found, None if reached >= stop else self._ends[part]

    def draws_of(self, part: int) -> int:
        """Returns the seed of what is drawn in a part; `derive` it by the number of an example."""
        return derive(draws_of(self._seed), part)

    def look_ahead(self, start: int, count: int) -> int | None:
        """Reads positions ahead; returns where the part ends, if that is before all are read."""
        first, kept = self._window
        start = max(start, 0)
        if not first <= start <= first + len(kept):
            first, kept = start, []
        stop = min(start + count, (start // self.size + 1) * self.size)
        examples, end = self.take(start, stop)
        self._window = start, examples
        return end

    def close(self) -> None:
        for cursor in self._cursors:
            cursor.close()
        self._cursors.clear()

    def _end(self, part: int, reached: int) -> None:
        self._ends[part] = reached
        begins = part // self.shards * self.shards
        if all(self._ends.get(each) == each * self.size for each in range(begins, part + 1)) and (
            part == begins + self.shards - 1
        ):
            raise DataError(
                f"the {type(self._dataset).__name__} has no examples: nothing can be trained on"
            )

    # -- cursors --------------------------------------------------------------------------------

    def _cursor_at(self, part: int, index: int) -> _Cursor:
        near = [c for c in self._cursors if c.part == part and c.index <= index]
        best = max(near, key=lambda cursor: cursor.index, default=None)
        if best is not None:
            self._cursors.remove(best)
        else:
            while len(self._cursors) >= _MOST_CURSORS:
                self._cursors.pop(0).close()
            best = _Cursor(self, part, self._part(part), self._loading)
        self._cursors.append(best)
        best.skip(index - best.index)
        return best

    def _part(self, part: int) -> Any:
        epoch, number = divmod(part, self.shards)
        dataset: Any = self._dataset
        set_epoch = getattr(dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        if self.shards == 1:
            # One that keeps its place in itself would go on where another cursor is.
            return _apart(dataset) if hasattr(dataset, "load_state_dict") else dataset
        if self._shuffle:
            number = int(permutation(self.shards, derive(self._seed, epoch))[number])
        return dataset.shard(num_shards=self.shards, index=number)


class _Cursor:
    """Reads a part of a stream, example by example."""

    def __init__(self, stream: Stream, part: int, dataset: Any, loading: Loading) -> None:
        self.part = part
        self.index = 0
        self._stream = stream
        self._dataset = dataset
        self._loading = loading
        self._iterator: Iterator[Any] | None = None

    def read(self, count: int) -> list[Any]:
        """Returns the next examples; fewer where the part ends.

        What is drawn for each of them follows from its position.
        """
        found: list[Any] = []
        if self._loading.num_workers:  # that process seeds
            found = list(islice(self._opened(), count))
            self.index += len(found)
            return found
        seed = self._stream.draws_of(self.part)
        with drawing() as draw:
            while len(found) < count:
                draw(derive(seed, self.index))
                try:
                    found.append(next(self._opened()))
                except StopIteration:
                    break
                self.index += 1
        return found

    def skip(self, count: int) -> None:
        while count > 0 and (read := len(self.read(min(count, _MOST_SKIPPED)))):
            count -= read

    def close(self) -> None:
        if self._iterator is not None and hasattr(self._iterator, "close"):
            self._iterator.close()
        self._iterator = None

    def _opened(self) -> Iterator[Any]:
        if self._iterator is None:
            source = self._dataset
            if self._loading.num_workers:
                named = {**self._loading.arguments, "collate_fn": _same, "pin_memory": False}
                named["worker_init_fn"] = DrawingInit(named["worker_init_fn"])
                drawn = DrawingStream(source, self._stream.draws_of(self.part))
                source = DataLoader(drawn, batch_size=None, **named)
            self._iterator = iter(source)
        return self._iterator


class DrawingStream(IterableDataset[Any]):
    """A stream that a process of its own reads, with random numbers seeded before each example."""

    def __init__(self, dataset: Iterable[Any], seed: int) -> None:
        self.dataset = dataset
        self._seed = seed

    def __iter__(self) -> Iterator[Any]:
        seed_process(derive(self._seed, 0))
        for number, example in enumerate(self.dataset, 1):
            yield example
            seed_process(derive(self._seed, number))


def _apart(dataset: Any) -> Any:
    """Returns a shallow copy; `copy.copy` of Hugging Face's data sets shares all attributes."""
    if not hasattr(dataset, "__dict__"):
        return copy.copy(dataset)
    clone = object.__new__(type(dataset))
    clone.__dict__.update(vars(dataset))
    return clone


def _same(example: Any) -> Any:
    return example
