"""All kernels of tables, compiled ahead of their first use."""

from __future__ import annotations

import numpy as np
import torch
from msgspec.structs import replace

from trireme.tables.bags import gather, sum_bags
from trireme.tables.keys import SLOTS, put_rows, slots_of, split, sum_rows, unique
from trireme.tables.row_optimizers import ROW_OPTIMIZERS
from trireme.tables.table import Table
from trireme.tables.table_spec import FLOATS, ITEM_SIZES, Add, TableSpec


def prepare(spec: TableSpec | None = None) -> None:
    """Compiles the kernels of a table, or of all tables, or loads them from the cache.

    Each is called once, for a table of one column. On a core of 2025 those of one table take
    7 seconds to compile and half a second to load; all of them 15 seconds and 1 second.
    """
    if spec is not None:
        _use(spec)
        return
    for dtype in ITEM_SIZES:
        for optimizer in ROW_OPTIMIZERS if dtype in FLOATS else (Add,):
            _use(TableSpec("all", 1, Add() if optimizer is Add else optimizer(0.1), dtype))


def _use(spec: TableSpec) -> None:
    table = Table(replace(spec, width=1, admit_after=1, drop_after=1))
    keys, inverse = unique(np.arange(2))
    rows = table.pull(keys)
    for _ in range(2):  # the second time their records are known
        table.push(keys, rows, step=1)
        rows = table.pull(keys)
    for block in list(table.export()):
        table.load(block)
    table.drop_unused(2)
    list(table.export())  # what was dropped
    slots_of(split(keys, np.zeros(SLOTS, np.int64), 1)[0])
    put_rows(rows, inverse, sum_rows(rows, inverse, 2))
    if spec.dtype in FLOATS:
        leaf, places = torch.from_numpy(rows).requires_grad_(), torch.from_numpy(inverse)
        with torch.enable_grad():
            for output in (gather(leaf, places), sum_bags(leaf, places, places)):
                output.sum().backward()  # type: ignore[no-untyped-call]
