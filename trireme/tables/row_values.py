"""The rows in records: reading them, and writing new and restored ones."""

from __future__ import annotations

from typing import Any

import numpy as np

from trireme.tables.addresses import array_at
from trireme.tables.compiled import compiled
from trireme.tables.initializers import fill_row
from trireme.tables.row_index import search
from trireme.tables.row_storage import HEADER_BYTES, mark_of, write_mark

_HEADER = np.uint64(HEADER_BYTES)
_ZERO = np.uint64(0)
_GROUP = 256  # keys that are searched for together


@compiled
def search_and_gather(keys: Any, at: Any, found: Any, rows: Any, first_values: Any) -> Any:
    """Does `search` and `gather` for a few keys at a time, while their records are near."""
    missing = 0
    for first in range(0, keys.size, _GROUP):
        part = slice(first, min(first + _GROUP, keys.size))
        missing += search(keys[part], at, found[part])
        gather(found[part], keys[part], rows[part], first_values)
    return missing


@compiled
def gather(addresses: Any, keys: Any, rows: Any, first_values: Any) -> None:
    """Copies the rows at addresses to (n, width); where the address is 0 the key's first values.

    With a larger width it copies the states behind the rows too: no address is 0 then.
    """
    width = rows.shape[1]
    for each in range(addresses.size):
        address = addresses[each]
        if address == _ZERO:
            fill_row(rows[each], width, keys[each], first_values)
        else:
            row = array_at(address + _HEADER, width, rows.dtype)
            for column in range(width):
                rows[each, column] = row[column]


@compiled
def begin(
    addresses: Any, keys: Any, places: Any, width: Any, initial: Any, first_values: Any
) -> None:
    """Writes first values and first state, `initial`, of the records at some places of a batch."""
    for place in places:
        row = array_at(addresses[place] + _HEADER, width + initial.size, initial.dtype)
        fill_row(row, width, keys[place], first_values)
        for element in range(initial.size):
            row[width + element] = initial[element]


@compiled
def write_records(addresses: Any, records: Any) -> None:
    """Copies rows with their states, of shape (n, width + state), into records."""
    for each in range(addresses.size):
        row = array_at(addresses[each] + _HEADER, records.shape[1], records.dtype)
        for element in range(records.shape[1]):
            row[element] = records[each, element]


@compiled
def write_marks(addresses: Any, steps: Any, touches: Any) -> None:
    """Writes last steps and touches (int64, of shape (n,)) into records."""
    for each in range(addresses.size):
        write_mark(addresses[each], mark_of(steps[each], touches[each]))
