"""`SignedRows`: each element of a row goes `lr` against the sign of its gradient."""

from __future__ import annotations

from typing import Any

from trireme.tables.compiled import compiled
from trireme.tables.row_optimizers import RowOptimizer, row_at


@compiled
def _kernel(addresses: Any, updates: Any, step: Any, numbers: Any) -> None:
    width = updates.shape[1]
    for each in range(addresses.size):
        row = row_at(addresses, each, step, width, updates)
        for column in range(width):
            if updates[each, column] > 0:
                row[column] -= numbers[0]
            elif updates[each, column] < 0:
                row[column] += numbers[0]


SIGNED_ROWS = RowOptimizer(
    kernel=_kernel, row_states=0, states=0, numbers=lambda it, width, step: (it.numbers["lr"],)
)
