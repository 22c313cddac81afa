"""The sparse tables of one shard: the rows of the keys whose slots are the shard's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from trireme.errors import ConfigurationError, OutOfMemory, Rejected
from trireme.ps.extension import EXTRA, HeldExtension, Tensors
from trireme.ps.extra import Extra
from trireme.ps.snapshot_messages import TensorSpec
from trireme.tables.job.chain import FIELDS, ROWS, WAITING
from trireme.tables.job.requests import decoded, encoded, mean_of, raw, slots_of_shard
from trireme.tables.keys import SLOTS, slots_of
from trireme.tables.table import Table, prepare
from trireme.tables.table_spec import Add, TableSpec, changed

Arrays = Mapping[str, npt.NDArray[Any]]
"""Rows of a table and keys that wait for one: the arrays of a `Block` by name, of `FIELDS`."""

_SPEC = msgspec.json.Decoder(TableSpec)  # made at import: threads that make one at once crash

_PIECE_BYTES, _PIECE_SLOTS = 1 << 22, 32
"""A replica is filled slot by slot, in pieces of so many bytes and slots at most, or of one slot:
those who wait for the primary wait for one piece, a few milliseconds."""

_SWEEPS = 8
"""Unused rows are looked for so many times within `drop_after` steps: it takes a pass over all."""

_SHOWN = 100  # so many tables have numbers in a status: a heartbeat has room for a few thousand


class ShardTables(HeldExtension):
    """All tables of one shard, in the order in which the workers have shown them."""

    def __init__(self, specs: Sequence[TableSpec], slots: tuple[int, int] = (0, SLOTS)) -> None:
        self.specs = tuple(specs)
        for spec in specs:
            prepare(spec)  # so that no update waits for a compiler
        self.tables = [Table(spec) for spec in specs]
        self.slots = slots
        self.lacks = 0
        self._step = 0  # of the last updates

    @property
    def _present(self) -> tuple[int, int]:
        return self.slots[0], self.slots[1] - self.lacks

    def mismatch(self, extra: Extra) -> str | None:
        try:
            updates, wanted = decoded(extra, self.specs)
            for each in updates:  # later, it would end every server
                if each.lr is not None:
                    changed(self.specs[each.table].optimizer, {"lr": each.lr})
        except (Rejected, ConfigurationError) as error:
            return str(error)
        if self.slots != (0, SLOTS):
            start, stop = self.slots
            for entry in (*updates, *wanted):
                at = slots_of(entry.keys)
                if not ((at >= start) & (at < stop)).all():
                    name = self.specs[entry.table].name
                    return f"keys of table {name!r} belong to slots of another shard"
        return None

    def overfull(self, extra: Extra) -> str | None:
        try:
            for each in decoded(extra, self.specs)[0]:
                self.tables[each.table].check_room(each.keys)
        except Rejected as error:
            return str(error)
        return None

    def mean(self, updates: Sequence[tuple[float, Extra]], scale: float = 1.0) -> Extra:
        if len(updates) == 1 and scale == 1.0:
            return updates[0][1]
        several = [(weight, decoded(extra, self.specs)[0]) for weight, extra in updates]
        return encoded(mean_of(several, self.specs, scale))

    def square(self, extra: Extra) -> float:
        return sum(
            float(np.square(each.rows, dtype=np.float64).sum())
            for each in decoded(extra, self.specs)[0]
            if not isinstance(self.specs[each.table].optimizer, Add)  # no gradients
        )

    def apply(self, extra: Extra, step: int) -> None:
        for each in decoded(extra, self.specs)[0]:
            table, rows = self.tables[each.table], each.rows
            keys = each.keys.copy()  # nobody else writes to it
            if self.lacks:  # those that have not come yet will come with this update
                here = np.flatnonzero(slots_of(keys) < self._present[1])
                keys, rows = keys[here], rows[here]
            hyper = None if each.lr is None else {"lr": each.lr}
            try:
                table.push(keys, rows, step=step, hyper=hyper)
            except MemoryError as error:
                raise OutOfMemory(
                    f"there is no memory for more rows of the table {table.spec.name!r}: it has "
                    f"{len(table):,} here, and takes {table.statistics.bytes / 1e6:,.0f} MB. Use "
                    "more servers (--ps) or hosts, drop rows that are not used (drop_after), make "
                    "them for frequent keys only (admit_after), or raise this process's limit"
                ) from error
        for table in self.tables:
            drop_after = table.spec.drop_after
            period = max(1, drop_after // _SWEEPS)
            if drop_after and step // period != self._step // period:
                table.drop_unused(step)
        self._step = step

    def pull(self, extra: Extra) -> Extra:
        wanted = decoded(extra, self.specs)[1]
        return tuple(raw(self.tables[each.table].pull(each.keys)) for each in wanted)

    def status(self) -> dict[str, float | str]:
        return {
            f"table/{name}/{table.spec.name}": value
            for table in self.tables[:_SHOWN]
            for name, value in table.statistics._asdict().items()
        }

    def copy(self) -> Tensors:
        return self._tensors(range(*self.slots))

    def _tensors(self, slots: Iterable[int]) -> Tensors:
        return [
            entry
            for table in self.tables
            for block in table.export(slots=slots)
            for entry in tensors_of(table.spec.name, block.arrays)
        ]

    def load(self, tensors: Tensors, step: int) -> None:
        self.tables = [Table(spec) for spec in self.specs]
        self._step = step
        self._add(tensors, self._present)

    def _add(self, tensors: Tensors, slots: tuple[int, int]) -> None:
        """Adds the rows among tensors that belong to some slots, [start, stop)."""
        tables = {table.spec.name: table for table in self.tables}
        for name, arrays in arrays_in(tensors):
            if (table := tables.get(name)) is not None:
                mine = {k: a for k, a in within(arrays, slots).items() if a.shape[0]}
                table.load(table.block(**mine))

    # Other shards and replicas ------------------------------------------------------------------

    def resume(self, before: Sequence[ShardTables] | None, step: int) -> None:
        """Takes the rows over from shards that have stopped, and are not used any more.

        Tables whose slots all stay in this shard are taken as they are, of several the largest, and
        rows of others are copied. Where some slots go elsewhere, the smaller part is copied.
        """
        self._step = step
        self.lacks = self.slots[1] - self.slots[0] if before is None else 0
        parts = [each._part(self.slots) for each in before or ()]
        parts.sort(key=lambda tables: sum(map(len, tables)))
        if parts:
            self.tables = parts.pop()
        for part in parts:
            for table, source in zip(self.tables, part, strict=True):
                for block in source.export():
                    table.load(block)
        for table in self.tables:
            table.optimizer = table.spec.optimizer  # as at the replicas that are filled

    def _part(self, slots: tuple[int, int]) -> list[Table]:
        """Gives up what it has of some slots, [start, stop); returns tables with their rows."""
        (first, last), rest = self.slots, self.slots
        start, stop = max(slots[0], first), min(slots[1], last)
        if start == first:
            rest = stop, last
        elif stop == last:
            rest = first, start
        if rest[1] - rest[0] < stop - start:
            given, self.tables = self.tables, self._moved(rest)
        else:
            given = self._moved((start, stop))
        self.slots = rest
        return given

    def _moved(self, slots: tuple[int, int]) -> list[Table]:
        moved = [Table(spec) for spec in self.specs]
        for source, target in zip(self.tables, moved, strict=True):
            for block in source.export(slots=range(*slots)):
                target.load(block)
            source.remove(range(*slots))
        return moved

    def piece(self, lacks: int) -> tuple[tuple[int, int], Tensors]:
        start = end = self.slots[1] - lacks
        sizes = np.sum([table.bytes_by_slot() for table in self.tables], axis=0)
        nbytes = 0
        while end < min(self.slots[1], start + _PIECE_SLOTS):
            nbytes += int(sizes[end])
            if nbytes > _PIECE_BYTES and end > start:
                break
            end += 1
        return (start, end), self._tensors(range(start, end))

    def fill(self, slots: tuple[int, int], tensors: Tensors) -> None:
        due = self._present[1]
        if not (self.lacks and slots[0] == due < slots[1] <= self.slots[1]):
            raise Rejected(f"rows of the slots {slots} came where those from {due} were due")
        self._add(tensors, slots)
        self.lacks = self.slots[1] - slots[1]


def shard_tables(parts: Sequence[str], bounds: Sequence[int], shard: int) -> ShardTables:
    """Returns the empty tables of a shard; see `ExtensionType.held`."""
    specs = [_SPEC.decode(part) for part in parts]
    return ShardTables(specs, slots_of_shard(bounds, shard))


def within(arrays: Arrays, slots: tuple[int, int]) -> dict[str, npt.NDArray[Any]]:
    """Returns what belongs to slots, [start, stop)."""
    if slots == (0, SLOTS):
        return dict(arrays)
    found: dict[str, npt.NDArray[Any]] = {}
    for names in (ROWS, WAITING):
        at = slots_of(np.ascontiguousarray(arrays[names[0]]))
        mine = (at >= slots[0]) & (at < slots[1])
        found |= {name: np.ascontiguousarray(arrays[name][mine]) for name in names}
    return found


def tensors_of(name: str, arrays: Arrays) -> Tensors:
    """Returns the arrays of a table, of `FIELDS`, as flat tensors of a snapshot."""
    entries = []
    for field in FIELDS:
        tensor = torch.from_numpy(np.ascontiguousarray(arrays[field]).reshape(-1))
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append((TensorSpec(EXTRA + field, dtype, name, 0, tensor.numel()), tensor))
    return entries


def arrays_in(tensors: Tensors) -> Iterator[tuple[str, Arrays]]:
    """Yields the arrays among the tensors of a snapshot, block by block, with the table's name."""
    flat: dict[str, Any] = {}
    for spec, tensor in tensors:
        if not spec.key.startswith(EXTRA):
            continue
        flat[spec.key.removeprefix(EXTRA)] = tensor.numpy()
        if len(flat) == len(FIELDS):
            count = flat["keys"].size
            for field in ("rows", "states"):
                flat[field] = flat[field].reshape(count, flat[field].size // max(count, 1))
            yield spec.vector, flat
            flat = {}
