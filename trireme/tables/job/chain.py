"""Tables of a checkpoint that are stored as a whole and changes: merges them.

A part is what one save has written of a table: all of it, or what had changed since the save
before, with the keys that were dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trireme.errors import CheckpointError

ROWS = ("keys", "rows", "states", "steps", "touches")
"""The arrays of keys with rows."""

WAITING = ("waiting_keys", "waiting_steps", "waiting_touches")
"""The arrays of keys that wait for a row."""

FIELDS = (*ROWS, *WAITING)
"""The arrays of a table in a snapshot and in a checkpoint."""

DROPPED = "dropped_keys"
"""A further array where there are changes only: keys that are dropped before rows are set."""


def merged(parts: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Returns the tables that a whole and changes are, by "TABLE/ARRAY", in the order of keys.

    What a later part has of a key, dropped or not, takes the place of all that earlier ones have.
    """
    found: dict[str, torch.Tensor] = {}
    for name in dict.fromkeys(key.rpartition("/")[0] for part in parts for key in part):
        several = [arrays for part in parts if (arrays := _arrays_of(part, name))]
        for group in (ROWS, WAITING):
            pieces, replaced = [], np.empty(0, np.int64)
            for arrays in reversed(several):
                kept = ~np.isin(arrays[group[0]], replaced)
                pieces.append({field: arrays[field][kept] for field in group})
                gone = [arrays[each] for each in (ROWS[0], WAITING[0], DROPPED) if each in arrays]
                replaced = np.concatenate([replaced, *gone])
            pieces = [piece for piece in pieces if piece[group[0]].size] or pieces[-1:]
            order = np.argsort(np.concatenate([piece[group[0]] for piece in pieces]))
            for field in group:
                joined = np.concatenate([piece[field] for piece in pieces])[order]
                found[f"{name}/{field}"] = torch.from_numpy(joined)
    return found


def _arrays_of(part: Mapping[str, torch.Tensor], table: str) -> dict[str, npt.NDArray[Any]]:
    """Returns the arrays that a part has of a table, all of them or none."""
    keys = {field: f"{table}/{field}" for field in (*FIELDS, DROPPED)}
    arrays = {field: part[key].numpy() for field, key in keys.items() if key in part}
    for group in (ROWS, WAITING):
        lengths = {len(arrays[field]) if field in arrays else -1 for field in group}
        if arrays and (len(lengths) > 1 or -1 in lengths):
            raise CheckpointError(
                f"the arrays {', '.join(group)} of the table {table!r} do not belong together"
            )
    return arrays
