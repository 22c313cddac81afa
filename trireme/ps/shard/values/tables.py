"""The sparse tables of one shard: the rows of the keys whose slots are the shard's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from trireme.ps.row_messages import RowKeys, RowUpdates
from trireme.ps.rows import hyper_of, keys_of, misfit, rows_of
from trireme.ps.shard.values.snapshot_tensors import TABLE, Tensors
from trireme.ps.snapshot_messages import TensorSpec
from trireme.tables.keys import SLOTS, slots_of
from trireme.tables.spec import TableSpec
from trireme.tables.table import Block, Table

_FIELDS: tuple[str, ...] = Block._fields


class ShardTables:
    """All tables of one shard.

    Args:
        specs: the tables, in the order in which the workers have shown them.
        slots: the slots of the shard: [start, stop).

    Attributes:
        specs: the same.
        tables: one for each.
    """

    def __init__(self, specs: Sequence[TableSpec], slots: tuple[int, int] = (0, SLOTS)) -> None:
        self.specs = tuple(specs)
        self.tables = [Table(spec) for spec in specs]
        self._slots = slots

    def misfit(self, updates: Sequence[RowUpdates | RowKeys]) -> str | None:
        """Returns why updates or keys make no sense here; None where they do."""
        return misfit(self.specs, updates, self._slots)

    def apply(self, updates: Sequence[RowUpdates], step: int) -> None:
        """Applies updates, which `misfit` has found to make sense.

        Args:
            updates: at most one for each table.
            step: the global step that they make.
        """
        for each in updates:
            spec, table = self.specs[each.table], self.tables[each.table]
            # Copies are aligned, and in this machine's byte order.
            keys = np.array(keys_of(each.keys), np.int64)
            rows = np.array(rows_of(each.rows, spec), spec.dtype)
            table.push(keys, rows, step=step, hyper=hyper_of(each))
        for spec, table in zip(self.specs, self.tables, strict=True):
            if spec.drop_after:
                table.drop_unused(step)

    def pull(self, wanted: Sequence[RowKeys]) -> tuple[bytes, ...]:
        """Returns the rows of keys, one answer for each entry; changes nothing."""
        return tuple(
            self.tables[each.table].pull(np.array(keys_of(each.keys), np.int64)).tobytes()
            for each in wanted
        )

    def copy(self) -> list[tuple[TensorSpec, torch.Tensor]]:
        """Returns copies of all rows with their state, as tensors of a snapshot."""
        return [
            entry
            for spec, table in zip(self.specs, self.tables, strict=True)
            for block in table.export()
            for entry in tensors_of(spec.name, block)
        ]

    def load(self, tensors: Tensors) -> None:
        """Replaces all rows by those of a snapshot, or of several, whose keys are the shard's."""
        self.tables = [Table(spec) for spec in self.specs]
        places = {spec.name: place for place, spec in enumerate(self.specs)}
        for name, block in blocks_of(tensors):
            if name in places:
                self.tables[places[name]].load(self._own(block))

    def _own(self, block: Block) -> Block:
        if self._slots == (0, SLOTS) or not block.keys.size:
            return block
        slots = slots_of(block.keys)
        return chosen(block, (slots >= self._slots[0]) & (slots < self._slots[1]))


def chosen(block: Block, which: Any) -> Block:
    """Returns some rows of a block; `which` is a mask or an array of places."""
    return Block(*(np.ascontiguousarray(each[which]) for each in block))


def tensors_of(name: str, block: Block) -> list[tuple[TensorSpec, torch.Tensor]]:
    """Returns the arrays of a block as flat tensors of a snapshot.

    Args:
        name: the table's.
        block: the rows.
    """
    entries = []
    for field, array in zip(_FIELDS, block, strict=True):
        tensor = torch.from_numpy(np.ascontiguousarray(array).reshape(-1))
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append((TensorSpec(TABLE + field, dtype, name, 0, tensor.numel()), tensor))
    return entries


def blocks_of(tensors: Tensors) -> Iterator[tuple[str, Block]]:
    """Yields the blocks among the tensors of a snapshot, each with the name of its table."""
    fields: dict[str, Any] = {}
    for spec, tensor in tensors:
        if spec.key.startswith(TABLE):
            fields[spec.key.removeprefix(TABLE)] = tensor.numpy()
            if len(fields) == len(_FIELDS):
                yield spec.vector, _shaped(fields)
                fields = {}


def _shaped(fields: Mapping[str, Any]) -> Block:
    """Returns a block of flat arrays, of which some have several columns."""
    count = fields["keys"].size
    columns = {field: fields[field].size // max(count, 1) for field in ("rows", "states")}
    return Block(
        **{
            field: array.reshape(count, columns[field]) if field in columns else array
            for field, array in fields.items()
        }
    )


def tables_in(parts: Sequence[Tensors]) -> dict[str, dict[str, torch.Tensor]]:
    """Returns the rows of each table in the snapshots of all shards, in the order of their keys.

    See `ModelState.tables`.
    """
    blocks: dict[str, list[Block]] = {}
    for tensors in parts:
        for name, block in blocks_of(tensors):
            blocks.setdefault(name, []).append(block)
    found = {}
    for name, several in blocks.items():
        whole = Block(*map(np.concatenate, zip(*several, strict=True)))
        order = np.argsort(whole.keys, kind="stable")
        arrays = zip(_FIELDS, chosen(whole, order), strict=True)
        found[name] = {field: torch.from_numpy(array) for field, array in arrays}
    return found


def tensors_for(
    tables: Mapping[str, Mapping[str, torch.Tensor]], slots: tuple[int, int] = (0, SLOTS)
) -> list[tuple[TensorSpec, torch.Tensor]]:
    """Returns the rows of tables whose slots are a shard's, [start, stop), as tensors to load."""
    entries = []
    for name, fields in tables.items():
        block = Block(**{field: fields[field].numpy() for field in _FIELDS})
        found = slots_of(np.ascontiguousarray(block.keys))
        entries += tensors_of(name, chosen(block, (found >= slots[0]) & (found < slots[1])))
    return entries
