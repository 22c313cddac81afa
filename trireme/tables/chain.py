"""Tables of a checkpoint that are stored as a whole and changes: merges them, block by block.

A part is what one save has written of a table: all of it, or what had changed since the save
before, with the keys that were dropped. Each array is in the order of its keys, so that parts are
merged by reading them from front to back, in little memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from trireme.errors import CheckpointError

ROWS = ("keys", "rows", "states", "steps", "touches")
"""The arrays of keys with rows."""

WAITING = ("waiting_keys", "waiting_steps", "waiting_touches")
"""The arrays of keys that wait for a row."""

FIELDS = (*ROWS, *WAITING)
"""The arrays of a table in a snapshot and in a checkpoint."""

DROPPED = "dropped_keys"
"""A further array where there are changes only: keys that are dropped before rows are set."""

_CHUNK = 1 << 16

Array = npt.NDArray[Any]
Keys = npt.NDArray[np.int64]


class Part:
    """One part of a table."""

    def __init__(self, lengths: Mapping[str, int], read: Callable[[str, int, int], Array]) -> None:
        self.lengths, self.read = lengths, read


def merge(
    parts: Sequence[Part], names: Sequence[str], chunk: int = _CHUNK
) -> Iterator[list[Array]]:
    """Yields the entries of a table, in the order of keys, block by block.

    An entry of a later part takes the place of an earlier one. A key that a later part has dropped,
    or has among the other kind of entries, has none of the earlier parts.
    """
    gone = [DROPPED, WAITING[0] if names[0] == ROWS[0] else ROWS[0]]
    own = [_Keys(part, names[0], chunk) for part in parts]
    others = [[_Keys(part, name, chunk) for name in gone] for part in parts]
    every = [*own, *(keys for several in others for keys in several)]
    while any(keys.left for keys in own):
        bound = min(keys.last for keys in every if keys.left)
        found: list[_Found] = []
        for part, mine, several in zip(parts, own, others, strict=True):
            first, keys = mine.take(bound)
            replaced = np.concatenate([keys, *(other.take(bound)[1] for other in several)])
            for earlier in found if replaced.size else ():
                np.logical_and(earlier.kept, ~np.isin(earlier.keys, replaced), out=earlier.kept)
            found.append(_Found(part, first, keys, np.ones(keys.size, np.bool_)))
        found = [each for each in found if each.kept.any()]
        if found:
            order = np.argsort(np.concatenate([each.keys[each.kept] for each in found]))
            yield [np.concatenate([each.read(name) for each in found])[order] for name in names]


class _Found(NamedTuple):
    """Entries of a part that follow each other, and which of them are in the table."""

    part: Part
    first: int
    keys: Keys
    kept: npt.NDArray[np.bool_]

    def read(self, name: str) -> Array:
        """Returns what an array has of the entries that are kept."""
        return self.part.read(name, self.first, self.first + self.keys.size)[self.kept]


class _Keys:
    """The keys of an array of a part, from front to back.

    Attributes:
        left: whether there are more.
        last: the last of those that were read, if there are more.
    """

    def __init__(self, part: Part, name: str, chunk: int) -> None:
        self._part, self._name, self._chunk = part, name, chunk
        self._length = part.lengths.get(name, 0)
        self._start = 0  # of `_keys` in the array
        self._keys: Keys = np.empty(0, np.int64)
        self._fill()

    @property
    def left(self) -> bool:
        return self._keys.size > 0

    @property
    def last(self) -> int:
        return int(self._keys[-1])

    def take(self, bound: int) -> tuple[int, Keys]:
        """Returns the next keys up to a bound, and the place of the first in the array.

        The bound is not above `last`.
        """
        first = self._start
        count = int(np.searchsorted(self._keys, bound, side="right"))
        taken, self._keys = self._keys[:count], self._keys[count:]
        self._start += count
        if not self._keys.size:
            self._fill(after=bound if count else None)
        return first, taken

    def _fill(self, after: int | None = None) -> None:
        if self._start >= self._length:
            return
        stop = min(self._start + self._chunk, self._length)
        keys = np.ascontiguousarray(self._part.read(self._name, self._start, stop), np.int64)
        if (np.diff(keys) <= 0).any() or (after is not None and keys[0] <= after):
            raise CheckpointError(f"{self._name!r} of a table are not in order")
        self._keys = keys


def merged(
    parts: Sequence[Mapping[str, torch.Tensor]],
) -> dict[str, torch.Tensor]:
    """Returns the tables that a whole and changes are."""
    names = dict.fromkeys(key.rpartition("/")[0] for part in parts for key in part)
    found: dict[str, torch.Tensor] = {}
    for name in names:
        several = [part_of(part, name) for part in parts]
        for group in (ROWS, WAITING):
            blocks = list(merge(several, group))
            for place, field in enumerate(group):
                pieces = [block[place] for block in blocks]
                empty = next(part[f"{name}/{field}"] for part in parts if f"{name}/{field}" in part)
                joined = np.concatenate(pieces) if pieces else empty.numpy()[:0]
                found[f"{name}/{field}"] = torch.from_numpy(joined)
    return found


def part_of(tensors: Mapping[str, torch.Tensor], table: str) -> Part:
    """Returns what some tensors by "TABLE/ARRAY" have of a table."""
    fields = (*ROWS, *WAITING, DROPPED)
    arrays = {f: tensors[f"{table}/{f}"].numpy() for f in fields if f"{table}/{f}" in tensors}
    lengths = {field: len(array) for field, array in arrays.items()}
    check_lengths(table, lengths)
    return Part(lengths, lambda field, start, stop: arrays[field][start:stop])


def check_lengths(table: str, lengths: Mapping[str, int]) -> None:
    """Checks that a part has all arrays of a table or none, and of like lengths."""
    for group in (ROWS, WAITING):
        several = {lengths.get(field, -1) for field in group}
        if lengths and (len(several) > 1 or -1 in several):
            raise CheckpointError(
                f"the arrays {', '.join(group)} of the table {table!r} do not belong together"
            )
