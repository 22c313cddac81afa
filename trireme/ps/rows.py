"""Updates and wanted rows of sparse tables: their parts by shard, and the mean of several.

A table is spread over the slots of the job by the hash of its keys, and so over the shards. This
module needs numba: it is imported where a job has tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from trireme.ps.row_messages import RowKeys, RowUpdates
from trireme.tables.keys import SLOTS, Keys, slots_of, split, sum_rows, unique
from trireme.tables.spec import Add, TableSpec

Rows = npt.NDArray[Any]
"""Rows of a table, of shape (n, width)."""


def keys_of(data: bytes) -> Keys:
    """Returns the keys of a message, of shape (n,), as a view."""
    return np.frombuffer(data, dtype="<i8")


def rows_of(data: bytes, spec: TableSpec) -> Rows:
    """Returns the rows of a message, of shape (n, width), as a view."""
    return np.frombuffer(data, dtype=np.dtype(spec.dtype).newbyteorder("<")).reshape(-1, spec.width)


def misfit(
    specs: Sequence[TableSpec],
    updates: Sequence[RowUpdates | RowKeys],
    slots: tuple[int, int] = (0, SLOTS),
) -> str | None:
    """Returns why updates or keys make no sense at a shard; None where they do.

    Args:
        specs: the tables.
        updates: the updates, or keys.
        slots: the slots of the shard: [start, stop).
    """
    for each in updates:
        if each.table >= len(specs):
            return f"a push names table {each.table}, and there are {len(specs)}"
        spec = specs[each.table]
        if len(each.keys) % 8:
            return f"the keys of table {spec.name!r} take {len(each.keys)} bytes, no multiple of 8"
        keys = keys_of(each.keys)
        if isinstance(each, RowUpdates):
            size = keys.size * spec.width * spec.item_size
            if len(each.rows) != size:
                return (
                    f"{keys.size} rows of table {spec.name!r} take {size} bytes, and the push has "
                    f"{len(each.rows)}"
                )
        if keys.size and slots != (0, SLOTS):
            found = slots_of(np.ascontiguousarray(keys))
            if found.min() < slots[0] or found.max() >= slots[1]:
                return f"keys of table {spec.name!r} belong to slots of another shard"
    return None


def slots_of_shard(bounds: Sequence[int], shard: int) -> tuple[int, int]:
    """Returns the slots of tables that a shard has: [start, stop).

    Args:
        bounds: the slots of the job at which shards begin, and the number of these slots, which
            divides `SLOTS`.
        shard: the shard.
    """
    each = SLOTS // bounds[-1]
    return bounds[shard] * each, bounds[shard + 1] * each


def owners(bounds: Sequence[int]) -> npt.NDArray[np.int64]:
    """Returns the shard of each slot of tables: int64 of shape (SLOTS,); see `slots_of_shard`."""
    shards = range(len(bounds) - 1)
    sizes = [stop - start for start, stop in (slots_of_shard(bounds, shard) for shard in shards)]
    return np.repeat(np.arange(len(sizes), dtype=np.int64), sizes)


class Divided(msgspec.Struct, frozen=True):
    """Keys of one table, divided among shards.

    Attributes:
        places: the places of the keys, grouped by shard: int64 of shape (n,).
        ends: where each group begins and the last one ends: int64 of shape (shards + 1,).
    """

    places: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]

    @classmethod
    def of(cls, keys: Keys, bounds: Sequence[int]) -> Divided:
        """Divides keys by the bounds of the shards."""
        return cls(*split(np.ascontiguousarray(keys), owners(bounds), len(bounds) - 1))

    def of_shard(self, shard: int) -> npt.NDArray[np.int64]:
        """Returns the places of the keys of a shard, in their order."""
        return self.places[self.ends[shard] : self.ends[shard + 1]]


_Entry = TypeVar("_Entry", RowUpdates, RowKeys)


def parts_of(each: _Entry, specs: Sequence[TableSpec], bounds: Sequence[int]) -> list[_Entry]:
    """Returns the parts of updates or keys that each shard gets; parts may be empty."""
    shards = len(bounds) - 1
    if shards == 1:
        return [each]
    keys = keys_of(each.keys)
    divided = Divided.of(keys, bounds)
    parts = []
    for shard in range(shards):
        places = divided.of_shard(shard)
        changed = {"keys": keys[places].tobytes()}
        if isinstance(each, RowUpdates):
            changed["rows"] = rows_of(each.rows, specs[each.table])[places].tobytes()
        parts.append(msgspec.structs.replace(each, **changed))
    return parts


def united(
    wanted: RowKeys, answers: Sequence[bytes], specs: Sequence[TableSpec], bounds: Sequence[int]
) -> Rows:
    """Returns the rows of keys in their order, of shape (n, width), from the answers of all shards.

    Raises:
        ValueError: an answer is of another size.
    """
    spec, keys = specs[wanted.table], keys_of(wanted.keys)
    divided = Divided.of(keys, bounds)
    rows = np.empty((keys.size, spec.width), spec.dtype)
    for shard, answer in enumerate(answers):
        rows[divided.of_shard(shard)] = rows_of(answer, spec)
    return rows


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
        specs: the tables.
        scale: a factor for means.
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
        rows = rows_of(update.rows, spec)
        parts.append(rows if equal or sums else rows * np.dtype(spec.dtype).type(weight))
    keys, inverse = unique(np.concatenate([keys_of(update.keys) for _, update in updates]))
    rows = sum_rows(np.ascontiguousarray(np.concatenate(parts)), inverse, keys.size)
    if not sums:
        rows /= divisor
        if scale != 1.0:
            rows *= scale
    return RowUpdates(updates[0][1].table, keys.tobytes(), rows.tobytes(), updates[0][1].lr)


def square(updates: Sequence[RowUpdates], specs: Sequence[TableSpec]) -> float:
    """Returns the sum of the squares of all elements of updates that are means, in float64."""
    total = 0.0
    for each in updates:
        spec = specs[each.table]
        if not isinstance(spec.optimizer, Add):
            total += float(np.square(rows_of(each.rows, spec), dtype=np.float64).sum())
    return total


def hyper_of(update: RowUpdates) -> Mapping[str, float] | None:
    """Returns the hyper-parameters that an update brings; None for none."""
    return None if update.lr is None else {"lr": update.lr}
