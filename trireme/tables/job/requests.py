"""Requests for rows: updates and wanted keys, their bytes in messages, and their parts by shard.

A table is spread over the slots of the job by the hash of its keys, and so over the shards. In a
message a header is followed by the arrays that it names: keys are int64, and rows lie one after
the other in the dtype of the table, all little-endian.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt

from trireme.errors import ConfigurationError, FrameError, Rejected
from trireme.ps.extra import Extra, ExtraParts, ExtraRequest, Space, aligned, bytes_in
from trireme.tables.keys import SLOTS, Counts, Keys, split, sum_rows, unique
from trireme.tables.table_spec import Add, TableSpec
from trireme.wire.message import Index, Limits

Rows = npt.NDArray[Any]  # rows of a table, of its dtype and of shape (n, width)

_MOST_BYTES = Limits().metadata - (1 << 24)
"""How many bytes of rows a message may carry; the rest is for what else it says."""


@dataclass(frozen=True, slots=True)
class RowKeys:
    """Keys of one table whose rows are wanted."""

    table: int  # the position of the table among those that the workers have shown
    keys: Keys


@dataclass(frozen=True, slots=True)
class RowUpdates(RowKeys):
    """Updates of some rows of one table, whose keys are each there once."""

    rows: Rows  # an update for each key
    # the learning rate from now on, where the table goes by the program's; None for its own
    lr: float | None = None


_HEADER = msgspec.msgpack.Decoder(
    tuple[tuple[tuple[Index, float | None], ...], tuple[Index, ...]]  # of updates, of wanted keys
)


def encoded(updates: Sequence[RowUpdates], wanted: Sequence[RowKeys] = ()) -> Extra:
    """Returns updates and wanted keys for a message, whose arrays stay until it is answered."""
    arrays = [array for each in updates for array in (each.keys, each.rows)]
    arrays += [each.keys for each in wanted]
    return (_header(updates, wanted), *map(raw, arrays))


def _header(updates: Sequence[RowUpdates], wanted: Sequence[RowKeys]) -> bytes:
    return msgspec.msgpack.encode(
        ([(each.table, each.lr) for each in updates], [each.table for each in wanted])
    )


def raw(array: npt.NDArray[Any]) -> bytes:
    """Returns the bytes of an array: a view, without a copy where it is contiguous."""
    return cast("bytes", np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def decoded(extra: Extra, specs: Sequence[TableSpec]) -> tuple[list[RowUpdates], list[RowKeys]]:
    """Returns updates and wanted keys from a message, whose bytes they are, or raises Rejected."""
    if not extra:
        return [], []
    header, *arrays = bytes_in(extra)
    try:
        updates, wanted = _HEADER.decode(header)
    except msgspec.DecodeError as error:
        raise Rejected(f"a request for rows is malformed: {error}") from error
    tables = [table for table, _ in updates]
    if len(arrays) != 2 * len(updates) + len(wanted) or len({*tables}) < len(tables):
        raise Rejected("a request for rows names a table twice, or arrays that it has not")
    if any(table >= len(specs) for table in (*tables, *wanted)):
        raise Rejected(f"a request names a table that is not among the {len(specs)} there are")
    following = iter(arrays)
    found = []
    for table, lr in updates:
        spec, keys = specs[table], _keys_in(next(following), specs[table])
        size, rows = keys.size * spec.width * spec.item_size, next(following)
        if len(rows) != size:
            raise Rejected(
                f"{keys.size} rows of table {spec.name!r} take {size} bytes, and the push has "
                f"{len(rows)}"
            )
        found.append(RowUpdates(table, keys, _rows_in(rows, spec), lr))
    return found, [RowKeys(table, _keys_in(next(following), specs[table])) for table in wanted]


def _keys_in(data: bytes, spec: TableSpec) -> Keys:
    if len(data) % 8:
        raise Rejected(f"the keys of table {spec.name!r} take {len(data)} bytes, and a key has 8")
    return np.frombuffer(data, np.int64)


def _rows_in(data: bytes, spec: TableSpec) -> Rows:
    return np.frombuffer(data, spec.dtype).reshape(-1, spec.width)


def slots_of_shard(bounds: Sequence[int], shard: int) -> tuple[int, int]:
    """Returns a shard's slots of tables, [start, stop); `bounds` are in slots of the job."""
    each = SLOTS // bounds[-1]
    return bounds[shard] * each, bounds[shard + 1] * each


class RowRequest(ExtraRequest):
    """Updates, at most one entry for each table, and wanted keys."""

    def __init__(
        self,
        specs: Sequence[TableSpec],
        updates: Sequence[RowUpdates] = (),
        wanted: Sequence[RowKeys] = (),
    ) -> None:
        self.specs, self.updates, self.wanted = specs, updates, wanted

    def divided(self, bounds: Sequence[int]) -> RowParts:
        parts = RowParts(self, bounds)
        for shard in range(len(bounds) - 1):
            if (size := parts.nbytes(shard)) > _MOST_BYTES:
                raise ConfigurationError(
                    f"the rows of one step of a worker take {size >> 20} MiB at one server, and a "
                    f"message has room for {_MOST_BYTES >> 20}: use a smaller batch, or more "
                    "servers"
                )
        return parts


class RowParts(ExtraParts):
    """The parts of a request, by shard."""

    def __init__(self, request: RowRequest, bounds: Sequence[int]) -> None:
        self._request = request
        shards = len(bounds) - 1
        slots = [slots_of_shard(bounds, shard) for shard in range(shards)]
        sizes = [stop - start for start, stop in slots]
        owners = np.repeat(np.arange(shards, dtype=np.int64), sizes)
        # For each entry the places of its keys, grouped by shard, and where the groups begin; none
        # where there is one shard.
        entries = () if shards == 1 else (*request.updates, *request.wanted)
        self._divided = [split(np.ascontiguousarray(e.keys), owners, shards) for e in entries]

    def _places(self, shard: int) -> list[Counts] | None:
        if not self._divided and (self._request.updates or self._request.wanted):
            return None
        return [places[ends[shard] : ends[shard + 1]] for places, ends in self._divided]

    def nbytes(self, shard: int) -> int:
        """Returns how many bytes a shard's part takes, with the rows that its answer brings."""
        request, places = self._request, self._places(shard)
        size = 0
        for number, each in enumerate((*request.updates, *request.wanted)):
            spec = request.specs[each.table]
            count = each.keys.size if places is None else places[number].size
            size += count * (8 + spec.width * spec.item_size)
        return size

    def of_shard(self, shard: int, space: Space | None = None) -> Extra:
        request, chosen = self._request, self._places(shard)
        if chosen is None:
            return encoded(request.updates, request.wanted)
        sources: list[tuple[npt.NDArray[Any], Counts]] = []
        for each, places in zip((*request.updates, *request.wanted), chosen, strict=True):
            sources.append((each.keys, places))
            if isinstance(each, RowUpdates):
                sources.append((each.rows, places))
        sizes = [places.size * (array.nbytes // max(1, len(array))) for array, places in sources]
        nbytes, offset = sum(map(aligned, sizes)), 0
        memory = memoryview(bytearray(nbytes)) if space is None else space(shard, nbytes)
        taken = []
        for (array, places), size in zip(sources, sizes, strict=True):
            target = np.frombuffer(memory[offset : offset + size], array.dtype)
            target = target.reshape(places.size, *array.shape[1:])
            np.take(array, places, axis=0, out=target, mode="clip")  # without checks, for speed
            taken.append(raw(target))
            offset += aligned(size)
        return (_header(request.updates, request.wanted), *taken)

    def united(self, answers: Sequence[Extra]) -> list[Rows]:
        """Returns the rows of the wanted keys in their order, each a new array."""
        request, several = self._request, [bytes_in(answer) for answer in answers]
        first, found = len(request.updates), []
        for number, each in enumerate(request.wanted):
            spec = request.specs[each.table]
            rows = np.empty((each.keys.size, spec.width), spec.dtype)
            for shard, answer in enumerate(several):
                chosen = self._places(shard)
                places = None if chosen is None else chosen[first + number]
                count = each.keys.size if places is None else places.size
                data = answer[number] if number < len(answer) else b""
                if len(data) != (size := count * spec.width * spec.item_size):
                    raise FrameError(
                        f"a parameter server answered with {len(data)} bytes where {count} rows of "
                        f"table {spec.name!r} take {size}"
                    )
                rows[slice(None) if places is None else places] = _rows_in(data, spec)
            found.append(rows)
        return found


def mean_of(
    updates: Sequence[tuple[float, Sequence[RowUpdates]]],
    specs: Sequence[TableSpec],
    scale: float = 1.0,
) -> list[RowUpdates]:
    """Returns the weighted mean of workers' updates, in their order; a missing row counts as 0.

    Updates of a table whose optimizer is `Add` are summed instead: they are no means. Equal weights
    are added as they are and divided by their number, as `total_of` does.
    """
    weights = [weight for weight, _ in updates]
    equal = len(set(weights)) == 1
    divisor = float(len(weights)) if equal else sum(weights)
    by_table: dict[int, list[tuple[float, RowUpdates]]] = {}
    for weight, several in updates:
        for each in several:
            by_table.setdefault(each.table, []).append((weight, each))
    found = []
    for table, parts in sorted(by_table.items()):
        sums = isinstance(specs[table].optimizer, Add)
        kind = np.dtype(specs[table].dtype).type
        weighted = [u.rows if equal or sums else u.rows * kind(weight) for weight, u in parts]
        keys, inverse = unique(np.concatenate([each.keys for _, each in parts]))
        rows = sum_rows(np.concatenate(weighted), inverse, keys.size)
        if not sums:
            rows /= divisor
            if scale != 1.0:
                rows *= scale
        found.append(RowUpdates(table, keys, rows, parts[0][1].lr))
    return found
