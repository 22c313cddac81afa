"""The lines of a file from any place on, and of any range of its bytes."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from trireme.errors import DataError

Bytes = npt.NDArray[np.uint8]

NEWLINE = 10
_BLOCK = 1 << 22
_EXCERPT = 60
_PACKED = (b"\x1f\x8b", b"BZh", b"PK\x03\x04", b"\x28\xb5\x2f\xfd")  # gzip, bzip2, zip, zstd


class LineWindow:
    """Some whole lines of a range of a file, which moves forward.

    A line belongs to the range in which its first byte is.

    Attributes:
        data: the bytes in memory, uint8.
        start: where in `data` the lines begin that were not consumed.
        stop: where they end. The last byte before is a newline, also where the file ends without.

    Raises:
        DataError: the file cannot be read, or is packed.
    """

    def __init__(self, path: Path, begin: int, end: int, block: int = _BLOCK) -> None:
        """Opens a file; `fill` reads.

        Args:
            path: the file.
            begin: the place of the first line: the line's first byte is there or later.
            end: lines begin before this place.
            block: the number of bytes to read at once.
        """
        self.data: Bytes = np.empty(2 * block, np.uint8)
        self.start = self.stop = 0
        self._path, self._end, self._block = path, end, block
        self._filled = 0  # the bytes in `data`, whole lines or not
        self._ended = False
        self._file = self._open(begin)

    @property
    def place(self) -> int:
        """The place in the file of the first line that was not consumed."""
        return self._base + self.start

    def fill(self) -> bool:
        """Reads on until there is a line; returns False at the end of the range."""
        while self.start == self.stop:
            if self._ended or self.place >= self._end:
                return False
            self._make_room()
            self._read()
        return True

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _open(self, begin: int) -> BinaryIO:
        """Opens the file at the first line that begins at `begin` or later."""
        try:
            file = self._path.open("rb", buffering=0)
            magic = file.read(4)
            file.seek(max(begin - 1, 0))
            self._base = begin
            if begin:
                self._base = begin - 1 + _to_next_line(file)
                file.seek(self._base)
        except OSError as error:
            raise _unreadable(self._path, error) from error
        if magic.startswith(_PACKED):
            file.close()
            raise DataError(f"{self._path} is packed: unpack it, for it is read by byte ranges")
        return file

    def _make_room(self) -> None:
        """Moves the bytes that were not consumed to the front; makes `data` larger for a line."""
        left = self._filled - self.start
        if left + self._block > len(self.data):
            larger: Bytes = np.empty(2 * len(self.data), np.uint8)
            larger[:left] = self.data[self.start : self._filled]
            self.data = larger
        else:
            self.data[:left] = self.data[self.start : self._filled].copy()
        self._base += self.start
        self.start, self.stop, self._filled = 0, 0, left

    def _read(self) -> None:
        """Reads a block; `stop` comes after the last whole line of the range."""
        try:
            room = self.data.data[self._filled : self._filled + self._block - 1]
            count = self._file.readinto(room)  # type: ignore[attr-defined]
        except OSError as error:
            raise _unreadable(self._path, error) from error
        searched = self._filled
        self._filled += count
        if not count:
            self._ended = True
            if self._filled and self.data[self._filled - 1] != NEWLINE:
                self.data[self._filled] = NEWLINE
                self._filled += 1
        beyond = max(self._end - 1 - self._base, 0)
        if beyond < self._filled:  # the line with the range's last byte is the last one
            found = np.flatnonzero(self.data[beyond : self._filled] == NEWLINE)[:1]
            self.stop = beyond + int(found[0]) + 1 if len(found) else 0
        if not self.stop:
            self.stop = _after_last_newline(self.data, searched, self._filled)


def _after_last_newline(data: Bytes, start: int, stop: int) -> int:
    """Returns the place after the last newline of data[start:stop]; 0 where there is none."""
    found = data[start:stop].tobytes().rfind(b"\n")
    return start + found + 1 if found >= 0 else 0


def _to_next_line(file: BinaryIO) -> int:
    """Returns how far it is from the file's place to the next line, or to its end."""
    passed = 0
    while block := file.read(1 << 16):
        found = block.find(b"\n")
        if found >= 0:
            return passed + found + 1
        passed += len(block)
    return passed


def bad_line(path: Path, place: int, reason: str, line: bytes) -> DataError:
    """Returns the error about a line that cannot be parsed.

    Args:
        path: the file.
        place: the place of the line's first byte.
        reason: what is wrong with it.
        line: the line's bytes.
    """
    number = 1 + _newlines_before(path, place)
    text = line.rstrip(b"\r\n").decode("utf-8", "backslashreplace")
    if len(text) > _EXCERPT:
        text = f"{text[:_EXCERPT]}..."
    return DataError(f"{path}, line {number}: {reason}: {text!r}. Correct or remove the line.")


def _newlines_before(path: Path, place: int) -> int:
    """Counts lines, once something is wrong: shards do not know the numbers of their lines."""
    count = 0
    with path.open("rb") as file:
        while place > 0 and (block := file.read(min(place, _BLOCK))):
            count += block.count(b"\n")
            place -= len(block)
    return count


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path} cannot be read: {error.strerror or error}")
