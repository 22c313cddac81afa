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

ROWS = ("keys", "rows", "states", "steps", "touches")  # the arrays of keys with rows

WAITING = ("waiting_keys", "waiting_steps", "waiting_touches")
"""The arrays of keys that wait for a row."""

FIELDS = (*ROWS, *WAITING)  # the arrays of a table in a snapshot and in a checkpoint

DROPPED = "dropped_keys"
"""A further array where there are changes only: keys that are dropped before rows are set."""


def merged(parts: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Returns the tables that a whole and changes are, by "TABLE/ARRAY", in the order of keys.

    What a later part has of a key, dropped or not, takes the place of all that earlier ones have.

    Raises:
        CheckpointError: a part has some arrays of a table and lacks others.
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
            joined = Blocks(pieces, group[0])
            found |= {f"{name}/{field}": joined.read(field) for field in group}
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


class Blocks:
    """Arrays of a table in several blocks, which are joined in the order of one of them."""

    def __init__(self, blocks: Sequence[Mapping[str, npt.NDArray[Any]]], order: str) -> None:
        self._blocks = [block for block in blocks if block[order].size] or blocks[:1]
        self._order = order
        self._rank: npt.NDArray[np.int64] | None = None  # the place of each entry of the blocks

    def shape(self, field: str) -> torch.Tensor:
        """Returns a meta tensor of the dtype and shape of a joined array."""
        first = torch.from_numpy(np.empty(0, self._blocks[0][field].dtype))
        size = sum(len(block[field]) for block in self._blocks)
        return first.new_empty((size, *self._blocks[0][field].shape[1:]), device="meta")

    def read(self, field: str) -> torch.Tensor:
        """Returns a joined array."""
        if self._rank is None:
            keys = np.concatenate([block[self._order] for block in self._blocks])
            self._rank = np.empty(keys.size, np.int64)
            self._rank[np.argsort(keys, kind="stable")] = np.arange(keys.size)
        source, first = self._blocks[0][field], 0
        found = np.empty((self._rank.size, *source.shape[1:]), source.dtype)
        for block in self._blocks:
            found[self._rank[first : first + len(block[field])]] = block[field]
            first += len(block[field])
        return torch.from_numpy(found)
