"""The rows in records: reading them, and writing new and restored ones."""

from __future__ import annotations

from typing import Any

import numpy as np

from trireme.compiled import compile_for, compiled
from trireme.tables.addresses import array_at
from trireme.tables.initializers import fill_row, types_of_first_values
from trireme.tables.row_index import TYPES_OF_PLACES, search
from trireme.tables.row_storage import (
    HEADER_BYTES,
    mark_of,
    read_key,
    read_mark,
    step_of,
    touches_of,
    write_mark,
)

_HEADER = np.uint64(HEADER_BYTES)
_ZERO = np.uint64(0)
_GROUP = 256  # keys that are searched for together


@compiled
def search_and_gather(
    keys: Any, indices: Any, capacities: Any, blocks: Any, shift: Any, record_bytes: Any,
    secret: Any, found: Any, rows: Any, kind: Any, constant: Any, numbers: Any, seed: Any,
) -> Any:  # fmt: skip
    """Searches for keys and copies their rows, a few at a time, while they are near.

    Args:
        keys: int64 of shape (n,).
        indices: see `trireme.tables.row_index.search`, as for those that follow.
        capacities: see there.
        blocks: see there.
        shift: see there.
        record_bytes: see there.
        secret: see there.
        found: see there.
        rows: see `gather`, as for those that follow.
        kind: see there.
        constant: see there.
        numbers: see there.
        seed: see there.

    Returns:
        How many keys have no record.
    """
    missing = 0
    for first in range(0, keys.size, _GROUP):
        part = slice(first, min(first + _GROUP, keys.size))
        missing += search(
            keys[part], indices, capacities, blocks, shift, record_bytes, secret, found[part]
        )
        gather(found[part], keys[part], rows[part], kind, constant, numbers, seed)
    return missing


@compiled
def gather(
    addresses: Any, keys: Any, rows: Any, kind: Any, constant: Any, numbers: Any, seed: Any
) -> None:
    """Copies the rows at addresses; where the address is 0 the key's first values.

    Args:
        addresses: the addresses of the records, uint64 of shape (n,).
        keys: their keys, int64 of shape (n,).
        rows: is written; of shape (n, width).
        kind: see `trireme.tables.initializers.FirstValues`, as for those that follow.
        constant: of the dtype of the row and of shape (1,).
        numbers: float64 of shape (2,).
        seed: uint64.
    """
    width = rows.shape[1]
    for each in range(addresses.size):
        address = addresses[each]
        if address == _ZERO:
            fill_row(rows[each], width, keys[each], kind, constant, numbers, seed)
        else:
            row = array_at(address + _HEADER, width, rows.dtype)
            for column in range(width):
                rows[each, column] = row[column]


@compiled
def begin(
    addresses: Any, keys: Any, places: Any, width: Any, state: Any, initial: Any, kind: Any,
    constant: Any, numbers: Any, seed: Any,
) -> None:  # fmt: skip
    """Writes the first values and the first state of new records.

    Args:
        addresses: the addresses of records, uint64 of shape (n,).
        keys: their keys, int64 of shape (n,).
        places: which of them are new, int64 of shape (m,).
        width: the number of columns.
        state: the elements of the optimizer's state of a row.
        initial: their value, of the dtype of the rows and of shape (1,).
        kind: see `trireme.tables.initializers.FirstValues`, as for those that follow.
        constant: of the dtype of the row and of shape (1,).
        numbers: float64 of shape (2,).
        seed: uint64.
    """
    for place in places:
        row = array_at(addresses[place] + _HEADER, width + state, constant.dtype)
        fill_row(row, width, keys[place], kind, constant, numbers, seed)
        for element in range(width, width + state):
            row[element] = initial[0]


@compiled
def read_records(addresses: Any, rows: Any, states: Any) -> None:
    """Copies rows and states out of records: shapes (n, width) and (n, state)."""
    width, state = rows.shape[1], states.shape[1]
    for each in range(addresses.size):
        row = array_at(addresses[each] + _HEADER, width + state, rows.dtype)
        for column in range(width):
            rows[each, column] = row[column]
        for element in range(state):
            states[each, element] = row[width + element]


@compiled
def write_records(addresses: Any, rows: Any, states: Any) -> None:
    """Copies rows and states into records: shapes (n, width) and (n, state)."""
    width, state = rows.shape[1], states.shape[1]
    for each in range(addresses.size):
        row = array_at(addresses[each] + _HEADER, width + state, rows.dtype)
        for column in range(width):
            row[column] = rows[each, column]
        for element in range(state):
            row[width + element] = states[each, element]


@compiled
def read_headers(addresses: Any, keys: Any, steps: Any, touches: Any) -> None:
    """Copies keys, last steps and touches out of records: int64, of shape (n,) each."""
    for each in range(addresses.size):
        mark = read_mark(addresses[each])
        keys[each] = read_key(addresses[each])
        steps[each] = step_of(mark)
        touches[each] = touches_of(mark)


@compiled
def write_marks(addresses: Any, steps: Any, touches: Any) -> None:
    """Writes last steps and touches (int64, of shape (n,)) into records."""
    for each in range(addresses.size):
        write_mark(addresses[each], mark_of(steps[each], touches[each]))


def prepare(dtype: str) -> None:
    """Compiles what this module needs for rows of a dtype, or loads it from the cache."""
    batch, first = "uint64[::1], int64[::1]", types_of_first_values(dtype)
    compile_for(
        search_and_gather,
        f"(int64[::1], {TYPES_OF_PLACES}, uint64[::1], {dtype}[:, ::1], {first})",
    )
    compile_for(gather, f"({batch}, {dtype}[:, ::1], {first})")
    compile_for(begin, f"({batch}, int64[::1], int64, int64, {dtype}[::1], {first})")
    compile_for(read_records, f"(uint64[::1], {dtype}[:, ::1], {dtype}[:, ::1])")
    compile_for(write_records, f"(uint64[::1], {dtype}[:, ::1], {dtype}[:, ::1])")
    compile_for(read_headers, f"({batch}, int64[::1], int64[::1])")
    compile_for(write_marks, f"({batch}, int64[::1])")
