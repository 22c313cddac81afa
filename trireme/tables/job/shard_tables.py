"""The sparse tables of one shard: the rows of the keys whose slots are the shard's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trireme.errors import OutOfMemory, Rejected
from trireme.ps.joined_table import JoinedTable
from trireme.ps.row_messages import RowKeys, RowKeysInto, RowUpdates, raw
from trireme.ps.shard.values.snapshot_tensors import TABLE, Tensors
from trireme.ps.snapshot_messages import TensorSpec
from trireme.ps.table_spec import TableSpec
from trireme.ps.tables import ShardTables as TablesOfShard
from trireme.tables.block import Block
from trireme.tables.job.requests import hyper_of, keys_of, mismatch, updates_of
from trireme.tables.kernels import prepare
from trireme.tables.keys import SLOTS, slots_of
from trireme.tables.row_optimizers import row_optimizer
from trireme.tables.table import Table

Arrays = Mapping[str, npt.NDArray[Any]]
"""Rows of a table and keys that wait for one: the arrays of a `Block` by name, of `FIELDS`."""

_ROWS = ("keys", "rows", "states", "steps", "touches")
_WAITING = ("waiting_keys", "waiting_steps", "waiting_touches")

FIELDS = (*_ROWS, *_WAITING)
"""The arrays of a table in a snapshot."""

DROPPED = "dropped_keys"
"""A further array where a snapshot has only what has changed: the keys that were dropped. They are
dropped before the rows are set."""

_DROPS = 1 << 16
"""So many dropped keys are remembered, or as many as a table has rows."""

_PIECE_BYTES, _PIECE_SLOTS = 1 << 22, 32
"""A replica is filled slot by slot, in pieces of so many bytes and slots at most, or of one slot:
those who wait for the primary wait for one piece, a few milliseconds."""

_SWEEPS = 8
"""Unused rows are looked for so many times within `drop_after` steps: it takes a pass over all."""


_SHOWN = 100
"""So many tables have a status of their own: a heartbeat has room for a few thousand numbers."""


_LOOKED_AT = 1 << 18
"""The rows of all tables that a status looks at in search of hot keys: a few milliseconds."""


class ShardTables(TablesOfShard):
    """All tables of one shard.

    Args:
        specs: the tables, in the order in which the workers have shown them.
    """

    def __init__(self, specs: Sequence[TableSpec], slots: tuple[int, int] = (0, SLOTS)) -> None:
        self.specs = tuple(specs)
        for spec in specs:
            prepare(spec)  # so that no update waits for a compiler
        self.tables = [Table(spec) for spec in specs]  # one for each
        self.slots = slots  # the slots of the shard
        self.lacks = 0  # how many of the last of these have no rows yet, while a replica is filled
        self._step = 0  # of the last updates
        # the step after which all changes are known, those included that drop keys
        self.changes_after = 0

    @property
    def _present(self) -> tuple[int, int]:
        """The slots whose rows are here: [start, stop)."""
        return self.slots[0], self.slots[1] - self.lacks

    def mismatch(self, updates: Sequence[RowUpdates | RowKeys]) -> str | None:
        """Returns why updates or keys make no sense here; None where they do."""
        return mismatch(self.specs, updates, self.slots)

    def overfull(self, updates: Sequence[RowUpdates]) -> str | None:
        """Returns why a table has no room for the keys of updates; None where it has."""
        for each in updates:
            try:
                self.tables[each.table].check_room(np.array(keys_of(each.keys), np.int64))
            except Rejected as error:
                return str(error)
        return None

    def apply(self, updates: Sequence[RowUpdates], step: int) -> None:
        """Applies updates, which `mismatch` has found to make sense."""
        for each in updates:
            spec, table = self.specs[each.table], self.tables[each.table]
            # A copy, which nobody else writes to. Both are in this machine's byte order.
            keys = np.array(keys_of(each.keys), np.int64)
            rows = np.asarray(updates_of(each, spec), spec.dtype)
            if self.lacks:  # those that have not come yet will come with this update
                here = np.flatnonzero(slots_of(keys) < self._present[1])
                keys, rows = keys[here], rows[here]
            try:
                table.push(keys, rows, step=step, hyper=hyper_of(each))
            except MemoryError as error:
                raise OutOfMemory(
                    f"there is no memory for more rows of the table {spec.name!r}: it has "
                    f"{len(table):,} here, and takes {table.statistics.bytes / 1e6:,.0f} MB. Use "
                    "more servers (--ps) or hosts, drop rows that are not used (drop_after), make "
                    "them for frequent keys only (admit_after), or raise this process's limit"
                ) from error
        for spec, table in zip(self.specs, self.tables, strict=True):
            period = max(1, spec.drop_after // _SWEEPS)
            if spec.drop_after and step // period != self._step // period:
                table.drop_unused(step)
                if table.remembered_drops > max(len(table), _DROPS):
                    self._forget_drops(step)  # nobody has asked for changes for long
        self._step = step

    def _forget_drops(self, until: int) -> None:
        """Forgets which keys were dropped up to a step."""
        for table in self.tables:
            table.forget_drops(until)
        self.changes_after = max(self.changes_after, until)

    def pull(self, wanted: Sequence[RowKeys]) -> tuple[bytes | None, ...]:
        """Returns the rows of keys, one answer for each entry; changes nothing.

        An answer is None where the rows are written to memory at hand: see `RowKeysInto`.
        """
        return tuple(map(self._pull, wanted))

    def _pull(self, wanted: RowKeys) -> bytes | None:
        keys, table = np.array(keys_of(wanted.keys), np.int64), self.tables[wanted.table]
        if not isinstance(wanted, RowKeysInto):
            return raw(table.pull(keys))
        spec = self.specs[wanted.table]
        table.pull(keys, np.frombuffer(wanted.out, spec.dtype).reshape(-1, spec.width))
        return None

    def status(self) -> dict[str, float | str]:
        """Returns what the first tables hold, and what has happened to them in this process.

        A number has a name such as `table/rows/words`; `table/hottest/words` has the keys that are
        updated most often, each with the number of updates, such as `7 (1200), -3 (800)`.
        """
        status: dict[str, float | str] = {}
        shown = list(zip(self.specs, self.tables, strict=True))[:_SHOWN]
        for spec, table in shown:
            for count, value in asdict(table.statistics).items():
                status[f"table/{count}/{spec.name}"] = value
            hot = (
                f"{key} ({touches})" for key, touches in table.hot_keys(_LOOKED_AT // len(shown))
            )
            status[f"table/hottest/{spec.name}"] = ", ".join(hot)
        return status

    def copy(
        self, since: int | None = None, *, shown: bool = True
    ) -> list[tuple[TensorSpec, torch.Tensor]]:
        """Returns copies of rows with their state, as tensors of a snapshot.

        Args:
            since: None for all rows; else the step after which what has changed is wanted, not
                before `changes_after`. Nobody will ask for changes after an earlier step.
            shown: whether anybody sees them; else nothing is copied.
        """
        if since is not None:
            self._forget_drops(since)
        if not shown:
            return []
        return self._tensors(since, range(*self.slots))

    def _tensors(
        self, since: int | None, slots: Iterable[int]
    ) -> list[tuple[TensorSpec, torch.Tensor]]:
        fields = FIELDS if since is None else (DROPPED, *FIELDS)
        return [
            entry
            for spec, table in zip(self.specs, self.tables, strict=True)
            for block in table.export(since, slots=slots)
            if since is not None or block.keys.size or block.waiting_keys.size
            for entry in tensors_of(spec.name, {name: getattr(block, name) for name in fields})
        ]

    def load(self, tensors: Tensors, step: int) -> None:
        """Replaces all rows by those of a snapshot, or of several, whose keys are the shard's."""
        self.tables = [Table(spec) for spec in self.specs]
        self._step = self.changes_after = step
        self._add(tensors, self._present)

    def _add(self, tensors: Tensors, slots: tuple[int, int]) -> None:
        """Adds the rows among tensors that belong to some slots, [start, stop)."""
        places = {spec.name: place for place, spec in enumerate(self.specs)}
        for name, arrays in arrays_in(tensors):
            if name in places:
                spec, table = self.specs[places[name]], self.tables[places[name]]
                state = row_optimizer(spec.optimizer).state(spec.width)
                mine = {k: a for k, a in within(arrays, slots).items() if a.shape[0]}
                table.load(Block.of(table.optimizer, spec.width, state, spec.dtype, mine))

    # Other shards and replicas ------------------------------------------------------------------

    def resume(self, before: Sequence[ShardTables] | None, step: int) -> None:
        """Takes the rows over from shards that have stopped, and are not used any more.

        Tables whose slots all stay in this shard are taken as they are, of several the largest, and
        rows of others are copied. Where some slots go elsewhere, the smaller part is copied.

        Args:
            before: the tables of these shards, which are all of the same specifications; None
                where the rows come piece by piece: see `fill`.
        """
        self._step = step
        self.lacks = self.slots[1] - self.slots[0] if before is None else 0
        parts = sorted((each._part(self.slots) for each in before or ()), key=_rows_in)
        if parts:
            self.tables = parts.pop()
        for part in parts:
            for table, source in zip(self.tables, part, strict=True):
                for block in source.export():
                    table.load(block)
        for spec, table in zip(self.specs, self.tables, strict=True):
            table.optimizer = spec.optimizer  # as at the replicas that are filled
        self._forget_drops(step)

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
        """Moves the rows of some slots, [start, stop), to other tables."""
        moved = [Table(spec) for spec in self.specs]
        for source, target in zip(self.tables, moved, strict=True):
            for block in source.take(range(*slots)):
                target.load(block)
            source.remove(range(*slots))
        return moved

    def piece(self, lacks: int) -> tuple[tuple[int, int], Tensors]:
        """Returns the next rows for a replica: their slots, [start, stop), and tensors.

        Args:
            lacks: how many of the last slots it lacks, at least 1.
        """
        start = end = self.slots[1] - lacks
        sizes = np.sum([table.bytes_by_slot() for table in self.tables], axis=0)
        nbytes = 0
        while end < min(self.slots[1], start + _PIECE_SLOTS):
            nbytes += int(sizes[end])
            if nbytes > _PIECE_BYTES and end > start:
                break
            end += 1
        return (start, end), self._tensors(None, range(start, end))

    def fill(self, slots: tuple[int, int], tensors: Tensors) -> None:
        """Takes the rows of the next slots over."""
        due = self._present[1]
        if not (self.lacks and slots[0] == due < slots[1] <= self.slots[1]):
            raise Rejected(f"rows of the slots {slots} came where those from {due} were due")
        self._add(tensors, slots)
        self.lacks = self.slots[1] - slots[1]
        if not self.lacks:
            self._forget_drops(self._step)  # keys that the primary dropped before are not known


def _rows_in(tables: Sequence[Table]) -> int:
    return sum(map(len, tables))


def within(arrays: Arrays, slots: tuple[int, int]) -> dict[str, npt.NDArray[Any]]:
    """Returns what belongs to slots, [start, stop)."""
    if slots == (0, SLOTS):
        return dict(arrays)
    found: dict[str, npt.NDArray[Any]] = {}
    for names in (_ROWS, _WAITING):
        at = slots_of(np.ascontiguousarray(arrays[names[0]]))
        found |= _chosen(arrays, names, (at >= slots[0]) & (at < slots[1]))
    return found


def _chosen(arrays: Arrays, names: Sequence[str], which: Any) -> dict[str, npt.NDArray[Any]]:
    """Returns some entries of arrays; `which` is a mask or an array of places."""
    return {name: np.ascontiguousarray(arrays[name][which]) for name in names}


def tensors_of(name: str, arrays: Arrays) -> list[tuple[TensorSpec, torch.Tensor]]:
    """Returns arrays of a table as flat tensors of a snapshot.

    Args:
        arrays: the arrays: `FIELDS`, and `DROPPED` before them or not.
    """
    entries = []
    for field in (DROPPED, *FIELDS) if DROPPED in arrays else FIELDS:
        tensor = torch.from_numpy(np.ascontiguousarray(arrays[field]).reshape(-1))
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append((TensorSpec(TABLE + field, dtype, name, 0, tensor.numel()), tensor))
    return entries


def arrays_in(tensors: Tensors) -> Iterator[tuple[str, Arrays]]:
    """Yields the arrays among the tensors of a snapshot, block by block, with the table's name."""
    flat: dict[str, Any] = {}
    for spec, tensor in tensors:
        if not spec.key.startswith(TABLE):
            continue
        flat[spec.key.removeprefix(TABLE)] = tensor.numpy()
        if len(flat) == len(FIELDS) + (DROPPED in flat):
            count = flat["keys"].size
            for field in ("rows", "states"):
                flat[field] = flat[field].reshape(count, flat[field].size // max(count, 1))
            yield spec.vector, flat
            flat = {}


def tables_in(parts: Sequence[Tensors]) -> dict[str, JoinedTable]:
    """Returns each table in the snapshots of all shards, in the order of its keys.

    See `ModelState.tables`. The tensors must stay as they are.
    """
    several: dict[str, list[Arrays]] = {}
    for tensors in parts:
        for name, arrays in arrays_in(tensors):
            several.setdefault(name, []).append(arrays)
    orders = {field: names[0] for names in (_ROWS, _WAITING) for field in names}
    found = {}
    for name, blocks in several.items():
        more = {}
        if DROPPED in blocks[0]:
            dropped = np.unique(np.concatenate([block[DROPPED] for block in blocks]))
            more[DROPPED] = torch.from_numpy(dropped)
        found[name] = JoinedTable(blocks, orders, more)
    return found


def tensors_for(
    tables: Mapping[str, Mapping[str, torch.Tensor]], slots: tuple[int, int] = (0, SLOTS)
) -> list[tuple[TensorSpec, torch.Tensor]]:
    """Returns what tables have in the slots of a shard, [start, stop), as tensors to load."""
    return [
        entry
        for name, fields in tables.items()
        for entry in tensors_of(
            name, within({field: fields[field].numpy() for field in FIELDS}, slots)
        )
    ]
