"""What the core calls in a job with sparse tables. It needs numba."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from trireme.ps.joined_table import JoinedTable
from trireme.ps.row_messages import Data, RowKeys, RowUpdates
from trireme.ps.shard.values.snapshot_tensors import Tensors
from trireme.ps.snapshot_messages import TensorSpec
from trireme.ps.table_spec import TableSpec
from trireme.ps.tables import Rows, TableSupport
from trireme.tables.job.requests import (
    Parts,
    mean_of,
    packed_for,
    rows_of,
    slots_of_shard,
    square,
)
from trireme.tables.job.shard_tables import ShardTables, tables_in, tensors_for
from trireme.tables.keys import SLOTS
from trireme.tables.row_optimizers import row_optimizer


class Support(TableSupport):
    """Tables of this package."""

    def shard(
        self, specs: Sequence[TableSpec], bounds: Sequence[int] | None, shard: int
    ) -> ShardTables:
        return ShardTables(specs, _slots(bounds, shard))

    def parts(
        self,
        rows: Sequence[RowUpdates],
        wanted: Sequence[RowKeys],
        specs: Sequence[TableSpec],
        bounds: Sequence[int],
    ) -> Parts:
        return Parts(rows, wanted, specs, bounds)

    def packed(self, updates: RowUpdates, spec: TableSpec, codec: str) -> RowUpdates:
        return packed_for(updates, spec, codec)

    def mean(
        self,
        updates: Sequence[tuple[float, Sequence[RowUpdates]]],
        specs: Sequence[TableSpec],
        scale: float = 1.0,
    ) -> tuple[RowUpdates, ...]:
        return mean_of(updates, specs, scale)

    def square(self, updates: Sequence[RowUpdates], specs: Sequence[TableSpec]) -> float:
        return square(updates, specs)

    def rows(self, data: Data, spec: TableSpec) -> Rows:
        return rows_of(data, spec)

    def joined(self, parts: Sequence[Tensors]) -> dict[str, JoinedTable]:
        return tables_in(parts)

    def tensors(
        self,
        tables: Mapping[str, Mapping[str, torch.Tensor]],
        bounds: Sequence[int] | None,
        shard: int,
    ) -> list[tuple[TensorSpec, torch.Tensor]]:
        return tensors_for(tables, _slots(bounds, shard))

    def state_width(self, spec: TableSpec) -> int:
        return row_optimizer(spec.optimizer).state(spec.width)


def _slots(bounds: Sequence[int] | None, shard: int) -> tuple[int, int]:
    return (0, SLOTS) if bounds is None else slots_of_shard(bounds, shard)
