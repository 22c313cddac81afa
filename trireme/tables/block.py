"""Blocks: how a table's contents leave it, for checkpoints, replicas and migration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trireme.errors import Rejected
from trireme.tables.keys import Counts, Keys, plain
from trireme.tables.table_spec import MOST_STEPS, MOST_TOUCHES, Optimizer, optimizer_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A part of a table: rows, and keys that wait for a row.

    Each array belongs to nobody else. What has no entries is of length 0.
    """

    rows: npt.NDArray[Any]  # of the dtype of the table and of shape (n, width)
    states: npt.NDArray[Any]  # of the optimizer, of the same dtype and of shape (n, state)
    optimizer: Optimizer  # with its hyper-parameters at the time
    keys: Keys  # keys with rows
    steps: Counts  # the step of each row's last update
    touches: Counts  # how often each was touched, up to 2**24 - 1
    waiting_keys: Keys  # keys that were touched too seldom to have rows
    waiting_steps: Counts
    waiting_touches: Counts

    @classmethod
    def of(
        cls,
        optimizer: Optimizer,
        width: int,
        state: int,
        dtype: str,
        arrays: Mapping[str, npt.NDArray[Any]],
    ) -> Block:
        """Returns a block of some arrays; the others are empty."""
        empty: dict[str, Any] = {each.name: np.empty(0, np.int64) for each in fields(cls)}
        empty |= {"rows": np.empty((0, width), dtype), "states": np.empty((0, state), dtype)}
        return cls(**{**empty, **arrays, "optimizer": optimizer})

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    def check(self, optimizer: Optimizer, width: int, state: int, dtype: str) -> None:
        """Raises Rejected where the block is not of such a table, or its arrays do not match."""
        before, now = optimizer_name(self.optimizer), optimizer_name(optimizer)
        if before != now:
            raise Rejected(f"a block is of a table whose optimizer is {before}; this one has {now}")
        sizes = {"waiting": self.waiting_keys.size}
        for name, array in self.arrays.items():
            size = sizes.get(name.split("_")[0], self.keys.size)
            shape, kind = (size,), "int64"
            if name in ("rows", "states"):
                shape, kind = (size, width if name == "rows" else state), dtype  # type: ignore[assignment]
            if array.shape != shape or array.dtype != kind:
                raise Rejected(
                    f"{name} of a block is of {array.dtype} and of shape {array.shape}; it should "
                    f"be of {kind} and of shape {shape}"
                )
            most = {"steps": MOST_STEPS, "touches": MOST_TOUCHES}.get(name.split("_")[-1])
            if most is not None and array.size and not 0 <= array.min() <= array.max() <= most:
                raise Rejected(f"{name} of a block has numbers below 0 or above {most}")

    def plain(self) -> Block:
        """Returns the block with its arrays as kernels take them; see `plain`."""
        arrays: dict[str, Any] = {name: plain(array) for name, array in self.arrays.items()}
        return replace(self, **arrays)

    @property
    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays by name: `FIELDS` of `trireme.tables.job.chain`."""
        names = (each.name for each in fields(self) if each.name != "optimizer")
        return {name: getattr(self, name) for name in names}
