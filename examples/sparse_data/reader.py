"""Readers of rows: batches from the lines of files, by byte ranges, from any place on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Generic, NamedTuple, Self, TypeVar, final

from torch.utils.data import IterableDataset, get_worker_info

from trireme.errors import ConfigurationError, DataError

from .lines import NEWLINE, Bytes, LineWindow, bad_line

Rows = TypeVar("Rows")
"""The type of a batch."""

Paths = str | Path | Sequence[str | Path]
"""A file or several, which are read one after the other."""


class Parsed(NamedTuple):
    """What a parser has done.

    Attributes:
        place: the start of the first line that it did not parse.
        reason: what is wrong with that line; "" where nothing is.
    """

    place: int
    reason: str = ""


class RowParser(ABC, Generic[Rows]):
    """Parses lines into the rows of a batch.

    Attributes:
        count: the number of rows since the last `take`.
    """

    count: int = 0

    @abstractmethod
    def parse(self, data: Bytes, start: int, stop: int, most: int) -> Parsed:
        """Parses the lines of data[start:stop], which ends with a newline.

        It ends where there are `most` rows since the last `take`, or at a line that is no row.
        """

    @abstractmethod
    def take(self) -> Rows:
        """Returns the rows as a batch of their own, and begins the next one."""


class RowReader(IterableDataset[Rows], ABC):
    """An iterable data set of the batches of rows of some files.

    A shard is a range of bytes of all files; a row belongs to the shard in which its line begins.
    Each shard ends with a batch of what is left. A `DataLoader` with several processes gives each
    process a shard of its own.

    Attributes:
        num_shards: the number of shards that `session.loader` deals.
        batch_size: the most rows in a batch.
    """

    def __init__(self, paths: Paths, batch_size: int, num_shards: int) -> None:
        """Finds the files and their sizes.

        Args:
            paths: the files.
            batch_size: the most rows in a batch.
            num_shards: the number of shards; 1 for a reader whose batches are dealt by position.

        Raises:
            ConfigurationError: a number is below 1, or there is no file.
            DataError: a file cannot be read.
        """
        if batch_size < 1 or num_shards < 1:
            raise ConfigurationError(
                f"batch_size={batch_size}, num_shards={num_shards}: both start at 1"
            )
        given = [paths] if isinstance(paths, str | Path) else list(paths)
        if not given:
            raise ConfigurationError(f"a {type(self).__name__} of no files: give at least one path")
        self.paths = [Path(path) for path in given]
        self.batch_size, self.num_shards = batch_size, num_shards
        self._bounds = [0, *accumulate(_size(path) for path in self.paths)]
        self._range = 0, self._bounds[-1]

    @abstractmethod
    def parser(self) -> RowParser[Rows]:
        """Returns a parser with empty batches."""

    def check_head(self, path: Path) -> int:
        """Checks the beginning of a file; returns the number of bytes before the first row."""
        return 0

    @final
    def shard(self, num_shards: int, index: int) -> Self:
        """Returns a reader of one part of the rows.

        Args:
            num_shards: the number of parts.
            index: which of them; 0 is the first.

        Raises:
            ConfigurationError: there is no such part.
        """
        if not 0 <= index < num_shards:
            raise ConfigurationError(f"shard {index} of {num_shards}: the last is {num_shards - 1}")
        part = object.__new__(type(self))
        part.__dict__.update(vars(self), num_shards=1)
        begin, end = self._range
        part._range = (
            begin + (end - begin) * index // num_shards,
            begin + (end - begin) * (index + 1) // num_shards,
        )
        return part

    @final
    def __iter__(self) -> RowIterator[Rows]:
        """Begins to read; raises DataError where a line is no row."""
        info = get_worker_info()
        part = self if info is None else self.shard(info.num_workers, info.id)
        return RowIterator(part, *part._range)

    @final
    def find(self, place: int) -> tuple[Path, int, int]:
        """Returns the file of a byte, the file's first place, and its end among all files."""
        number = bisect_right(self._bounds, place, hi=len(self.paths)) - 1
        return self.paths[number], self._bounds[number], self._bounds[number + 1]


@final
class RowIterator(Iterator[Rows]):
    """Reads a range of the bytes of a reader's files; made by `iter(reader)`."""

    def __init__(self, reader: RowReader[Rows], begin: int, end: int) -> None:
        self._reader = reader
        self._parser = reader.parser()
        self._begin, self._end = begin, end
        self._at = begin
        self._file_end = begin  # of the open file, among all
        self._path: Path | None = None
        self._window: LineWindow | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Rows:
        most = self._reader.batch_size
        while self._parser.count < most and self._has_lines():
            self._parse(most)
        if not self._parser.count:
            raise StopIteration
        return self._parser.take()

    def state_dict(self) -> dict[str, Any]:
        """Returns the place of the first row that was not returned, among the bytes of all files.

        It depends on the files alone, not on the batch size or the number of shards.
        """
        return {"byte": self._at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on at the place of a state.

        Raises:
            DataError: the place is not in the range that this iterator reads.
        """
        place = state["byte"]
        # A line may reach beyond the end of the range in which it begins.
        if not self._begin <= place <= self._reader.find(max(self._end - 1, 0))[2]:
            raise DataError(
                f"byte {place} is not one of {self._begin} to {self._end}, which are read here: "
                "the state is of another shard, or the files have changed"
            )
        self.close()
        self._at = place

    def close(self) -> None:
        """Closes the open file; the next batch opens it again."""
        if self._window is not None:
            self._window.close()
        self._window = None

    def _has_lines(self) -> bool:
        """Returns whether there is a line in the window, having read or opened what it takes."""
        while self._at < self._end:
            window = self._opened()
            if window.fill():
                return True
            self.close()
            self._at = self._file_end
        return False

    def _opened(self) -> LineWindow:
        if self._window is None:
            self._path, first, self._file_end = self._reader.find(self._at)
            head = self._reader.check_head(self._path)
            begin = max(self._at - first, head)
            end = min(self._end, self._file_end) - first
            self._window = LineWindow(self._path, begin, end)
            self._first = first
        return self._window

    def _parse(self, most: int) -> None:
        window = self._window
        assert window is not None and self._path is not None
        place, reason = self._parser.parse(window.data, window.start, window.stop, most)
        if reason:
            stop = place + int((window.data[place : window.stop] == NEWLINE).argmax())
            line = window.data[place:stop].tobytes()
            raise bad_line(self._path, window.place + place - window.start, reason, line)
        window.start = place
        self._at = self._first + window.place


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
