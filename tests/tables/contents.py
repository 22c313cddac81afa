"""What a table holds, in a form that two tables can be compared in: by key, to the bit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trireme.tables.block import Block
from trireme.tables.table import Table
from trireme.tables.table_spec import Optimizer

Contents = tuple[Optimizer | None, dict[int, Any], dict[int, Any]]


def contents_of(blocks: Iterable[Block]) -> Contents:
    optimizer = None
    rows: dict[int, Any] = {}
    waiting: dict[int, Any] = {}
    for block in blocks:
        optimizer = block.optimizer
        for place, key in enumerate(block.keys.tolist()):
            assert key not in rows
            rows[key] = (
                block.rows[place].tobytes(),
                block.states[place].tobytes(),
                int(block.steps[place]),
                int(block.touches[place]),
            )
        for key, *counts in zip(
            *(each.tolist() for each in (block.waiting_keys, block.waiting_steps)),
            block.waiting_touches.tolist(),
            strict=True,
        ):
            assert key not in waiting
            waiting[key] = tuple(counts)
    assert not rows.keys() & waiting.keys()
    return optimizer, rows, waiting


def contents(table: Table) -> Contents:
    return contents_of(table.export())
