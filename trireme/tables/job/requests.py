"""Updates and wanted rows of sparse tables: their parts by shard, and the mean of several.

A table is spread over the slots of the job by the hash of its keys, and so over the shards. This
module needs numba: it is imported where a job has tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from trireme.errors import ConfigurationError, FrameError
from trireme.ps.row_memory import aligned
from trireme.ps.row_messages import Data, Place, RowKeys, RowKeysInto, RowUpdates, data_of, raw
from trireme.ps.table_spec import Add, TableSpec, changed
from trireme.ps.tables import Parts as DividedParts
from trireme.ps.tables import Rows, Space
from trireme.tables.job.packed_rows import pack, packs, row_bytes, row_codec, unpack
from trireme.tables.keys import (
    SLOTS,
    Keys,
    all_within,
    put_rows,
    split,
    sum_rows,
    unique,
)


def keys_of(data: Data) -> Keys:
    """Returns the keys of a message, of shape (n,), as a view."""
    return np.frombuffer(data_of(data), dtype="<i8")


def rows_of(data: Data, spec: TableSpec) -> Rows:
    """Returns the rows of a message, of shape (n, width), as a view."""
    dtype = np.dtype(spec.dtype).newbyteorder("<")
    return np.frombuffer(data_of(data), dtype=dtype).reshape(-1, spec.width)


def updates_of(updates: RowUpdates, spec: TableSpec) -> Rows:
    """Returns the rows of updates, unpacked, of shape (n, width): a view where they are whole."""
    if updates.codec == "none":
        return rows_of(updates.rows, spec)
    return unpack(_stored(updates, spec), updates.codec)


def packed_for(updates: RowUpdates, spec: TableSpec, codec: str) -> RowUpdates:
    """Returns updates, packed as a table's are where pushes are packed by a codec."""
    chosen = row_codec(codec, spec)
    if chosen == "none":
        return updates
    rows = np.require(rows_of(updates.rows, spec), np.float32, ["C", "A", "W"])
    return replace(updates, rows=raw(pack(rows, chosen)), codec=chosen)


def _stored(updates: RowUpdates, spec: TableSpec) -> Rows:
    """Returns the rows of updates as they are sent, of shape (n, anything), as a view."""
    if updates.codec == "none":
        return rows_of(updates.rows, spec)
    data = np.frombuffer(data_of(updates.rows), np.uint8)
    return data.reshape(-1, row_bytes(updates.codec, spec))


def new_space(shard: int, nbytes: int) -> memoryview:
    """Returns memory of this process: see `Space`."""
    return memoryview(bytearray(nbytes))


def mismatch(
    specs: Sequence[TableSpec],
    updates: Sequence[RowUpdates | RowKeys],
    slots: tuple[int, int] = (0, SLOTS),
) -> str | None:
    """Returns why updates or keys make no sense at a shard; None where they do."""
    for each in updates:
        if each.table >= len(specs):
            return f"a push names table {each.table}, and there are {len(specs)}"
        spec = specs[each.table]
        data = (each.keys, each.rows) if isinstance(each, RowUpdates) else (each.keys,)
        if any(isinstance(one, Place) for one in data):
            return f"rows of table {spec.name!r} lie in memory that was not lent"
        if size := len(data_of(each.keys)) % 8:
            return f"the keys of table {spec.name!r} end with {size} bytes, and a key has 8"
        keys = keys_of(each.keys)
        if isinstance(each, RowUpdates):
            try:  # at the push, which is refused: later, it would end every server
                changed(spec.optimizer, hyper_of(each) or {})
            except ConfigurationError as error:
                return f"a push of table {spec.name!r}: {error}"
            if not packs(each.codec, spec):
                return f"rows of table {spec.name!r} of {spec.dtype} came in {each.codec}"
            size = keys.size * row_bytes(each.codec, spec)
            if (came := len(data_of(each.rows))) != size:
                return (
                    f"{keys.size} rows of table {spec.name!r} take {size} bytes, and the push has "
                    f"{came}"
                )
        if isinstance(each, RowKeysInto):
            size = keys.size * spec.width * spec.item_size
            if each.out.nbytes != size:
                return (
                    f"{keys.size} rows of table {spec.name!r} take {size} bytes, and the request "
                    f"names {each.out.nbytes} bytes for them"
                )
        if slots != (0, SLOTS) and not all_within(keys, *slots):
            return f"keys of table {spec.name!r} belong to slots of another shard"
    return None


def slots_of_shard(bounds: Sequence[int], shard: int) -> tuple[int, int]:
    """Returns the slots of tables that a shard has: [start, stop).

    Args:
        bounds: the slots of the job at which shards begin, and the number of these slots, which
            divides `SLOTS`.
    """
    each = SLOTS // bounds[-1]
    return bounds[shard] * each, bounds[shard + 1] * each


def owners(bounds: Sequence[int]) -> npt.NDArray[np.int64]:
    """Returns the shard of each slot of tables: int64 of shape (SLOTS,); see `slots_of_shard`."""
    shards = range(len(bounds) - 1)
    sizes = [stop - start for start, stop in (slots_of_shard(bounds, shard) for shard in shards)]
    return np.repeat(np.arange(len(sizes), dtype=np.int64), sizes)


class Divided(msgspec.Struct, frozen=True):
    """Keys of one table, divided among shards."""

    places: npt.NDArray[np.int64]  # the places of the keys, grouped by shard: int64 of shape (n,)
    # where each group begins and the last one ends: int64 of shape (shards + 1,)
    ends: npt.NDArray[np.int64]

    @classmethod
    def of(cls, keys: Keys, bounds: Sequence[int]) -> Divided:
        """Divides keys by the bounds of the shards."""
        return cls(*split(np.ascontiguousarray(keys), owners(bounds), len(bounds) - 1))

    def of_shard(self, shard: int) -> npt.NDArray[np.int64]:
        """Returns the places of the keys of a shard, in their order."""
        return self.places[self.ends[shard] : self.ends[shard + 1]]


class Parts(DividedParts):
    """Updates and wanted keys of one request, divided among the shards.

    Args:
        bounds: the bounds of the shards; see `slots_of_shard`.
    """

    def __init__(
        self,
        rows: Sequence[RowUpdates],
        wanted: Sequence[RowKeys],
        specs: Sequence[TableSpec],
        bounds: Sequence[int],
    ) -> None:
        self._rows = rows
        self._wanted = wanted
        self._specs = specs
        self._whole = len(bounds) == 2
        entries: tuple[RowUpdates | RowKeys, ...] = () if self._whole else (*rows, *wanted)
        self._divided = [Divided.of(keys_of(each.keys), bounds) for each in entries]

    @property
    def _entries(self) -> tuple[RowUpdates | RowKeys, ...]:
        return (*self._rows, *self._wanted)

    def nbytes(self, shard: int) -> int:
        """Returns how many bytes a shard's part takes, with the rows that its answer brings."""
        size = 0
        for number, each in enumerate(self._entries):
            spec, count = self._specs[each.table], len(data_of(each.keys)) // 8
            if not self._whole:
                count = self._divided[number].of_shard(shard).size
            codec = each.codec if isinstance(each, RowUpdates) else "none"
            size += count * (8 + row_bytes(codec, spec))
        return size

    def of_shard(
        self, shard: int, space: Space = new_space
    ) -> tuple[tuple[RowUpdates, ...], tuple[RowKeys, ...]]:
        """Returns a shard's part of the updates and of the keys; parts may be empty."""
        if self._whole:
            return tuple(self._rows), tuple(self._wanted)
        chosen = [divided.of_shard(shard) for divided in self._divided]
        sources: list[tuple[npt.NDArray[Any], npt.NDArray[np.int64]]] = []
        for each, places in zip(self._entries, chosen, strict=True):
            sources.append((keys_of(each.keys), places))
            if isinstance(each, RowUpdates):
                sources.append((_stored(each, self._specs[each.table]), places))
        taken = iter(_taken(sources, partial(space, shard)))
        rows = tuple(replace(each, keys=next(taken), rows=next(taken)) for each in self._rows)
        return rows, tuple(replace(each, keys=next(taken)) for each in self._wanted)

    def united(self, answers: Sequence[Sequence[bytes | None]]) -> list[Rows]:
        """Returns the rows of the wanted keys in their order, each a new array of shape (n, width).

        Args:
            answers: what each shard has answered: an entry for each of the wanted keys.
        """
        found = []
        for number, each in enumerate(self._wanted):
            spec, count = self._specs[each.table], len(data_of(each.keys)) // 8
            rows = np.empty((count, spec.width), spec.dtype)
            for shard, answer in enumerate(answers):
                places = None
                if not self._whole:
                    places = self._divided[len(self._rows) + number].of_shard(shard)
                part = _answered(answer, number, spec, count if places is None else places.size)
                if places is None:
                    rows[:] = part
                else:
                    put_rows(part, places, rows)
            found.append(rows)
        return found


def _taken(
    sources: Sequence[tuple[npt.NDArray[Any], npt.NDArray[np.int64]]],
    space: Callable[[int], memoryview],
) -> list[bytes]:
    """Returns the entries at some places of arrays, which are laid one after the other."""
    sizes = [places.size * (array.nbytes // max(1, len(array))) for array, places in sources]
    memory, offset, taken = space(sum(map(aligned, sizes))), 0, []
    for (array, places), size in zip(sources, sizes, strict=True):
        target = np.frombuffer(memory[offset : offset + size], array.dtype)
        target = target.reshape(places.size, *array.shape[1:])
        np.take(array, places, axis=0, out=target, mode="clip")  # without checks, as fast as can be
        taken.append(raw(target))
        offset += aligned(size)
    return taken


def _answered(answer: Sequence[bytes | None], number: int, spec: TableSpec, count: int) -> Rows:
    """Returns the rows that a shard has answered with, of shape (count, width)."""
    data = answer[number] if number < len(answer) else None
    size = count * spec.width * spec.item_size
    if data is None or len(data) != size:
        came = "none" if data is None else f"{len(data)} bytes"
        raise FrameError(
            f"a parameter server answered with {came} where {count} rows of table {spec.name!r} "
            f"take {size}"
        )
    return rows_of(data, spec)


def mean_of(
    updates: Sequence[tuple[float, Sequence[RowUpdates]]],
    specs: Sequence[TableSpec],
    scale: float = 1.0,
) -> tuple[RowUpdates, ...]:
    """Returns the weighted mean of several workers' updates, in which a missing row counts as 0.

    Updates of a table whose optimizer is `Add` are summed instead: they are no means. Equal weights
    are added as they are and divided by their number, as `total_of` does.

    Args:
        updates: by worker, in the order in which they are added: the weight, above 0, and the
            updates.
    """
    if len(updates) == 1 and scale == 1.0:
        return tuple(updates[0][1])
    weights = [weight for weight, _ in updates]
    equal = len(set(weights)) == 1
    divisor = float(len(weights)) if equal else sum(weights)
    by_table: dict[int, list[tuple[float, RowUpdates]]] = {}
    for weight, each in updates:
        for update in each:
            by_table.setdefault(update.table, []).append((weight, update))
    return tuple(
        _mean(found, specs[table], divisor, scale, equal=equal)
        for table, found in sorted(by_table.items())
    )


def _mean(
    updates: Sequence[tuple[float, RowUpdates]],
    spec: TableSpec,
    divisor: float,
    scale: float,
    *,
    equal: bool,
) -> RowUpdates:
    sums = isinstance(spec.optimizer, Add)
    parts = []
    for weight, update in updates:
        rows = updates_of(update, spec)
        parts.append(rows if equal or sums else rows * np.dtype(spec.dtype).type(weight))
    keys, inverse = unique(np.concatenate([keys_of(update.keys) for _, update in updates]))
    rows = sum_rows(np.ascontiguousarray(np.concatenate(parts)), inverse, keys.size)
    if not sums:
        rows /= divisor
        if scale != 1.0:
            rows *= scale
    return RowUpdates(updates[0][1].table, raw(keys), raw(rows), updates[0][1].lr)


def square(updates: Sequence[RowUpdates], specs: Sequence[TableSpec]) -> float:
    """Returns the sum of the squares of all elements of updates that are means, in float64."""
    total = 0.0
    for each in updates:
        spec = specs[each.table]
        if not isinstance(spec.optimizer, Add):
            total += float(np.square(updates_of(each, spec), dtype=np.float64).sum())
    return total


def hyper_of(update: RowUpdates) -> Mapping[str, float] | None:
    """Returns the hyper-parameters that an update brings; None for none."""
    return None if update.lr is None else {"lr": update.lr}
