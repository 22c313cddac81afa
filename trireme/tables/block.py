"""Blocks: how a table's contents leave it, for checkpoints, replicas and migration."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trireme.errors import Rejected
from trireme.tables.keys import Counts, Keys, plain
from trireme.tables.table_spec import MOST_STEPS, MOST_TOUCHES, Optimizer, optimizer_name


def _none() -> Counts:
    return np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A part of a table: rows, and keys that wait for a row.

    Each array belongs to nobody else. What has no entries is of length 0.
    """

    rows: npt.NDArray[Any]  # of the dtype of the table and of shape (n, width)
    states: npt.NDArray[Any]  # of the optimizer, of the same dtype and of shape (n, state)
    optimizer: Optimizer  # with its hyper-parameters at the time
    keys: Keys = field(default_factory=_none)  # keys with rows
    steps: Counts = field(default_factory=_none)  # the step of each row's last update
    touches: Counts = field(default_factory=_none)  # how often each was touched, up to 2**24 - 1
    waiting_keys: Keys = field(default_factory=_none)  # touched too seldom to have rows
    waiting_steps: Counts = field(default_factory=_none)
    waiting_touches: Counts = field(default_factory=_none)

    @property
    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays by name: `FIELDS` of `trireme.tables.job.chain`."""
        names = (each.name for each in fields(self) if each.name != "optimizer")
        return {name: getattr(self, name) for name in names}

    def check(self, like: Block) -> None:
        """Raises Rejected unless the block has the optimizer, dtypes and shapes of another one."""
        before, now = optimizer_name(self.optimizer), optimizer_name(like.optimizer)
        if before != now:
            raise Rejected(f"a block is of a table whose optimizer is {before}; this one has {now}")
        for name, array in self.arrays.items():
            keys = self.waiting_keys if name.startswith("waiting") else self.keys
            same = getattr(like, name)
            shape = (keys.size, *same.shape[1:])
            if array.shape != shape or array.dtype != same.dtype:
                raise Rejected(
                    f"{name} of a block is of {array.dtype} and of shape {array.shape}; it should "
                    f"be of {same.dtype} and of shape {shape}"
                )
            most = {"steps": MOST_STEPS, "touches": MOST_TOUCHES}.get(name.split("_")[-1])
            if most is not None and array.size and not 0 <= array.min() <= array.max() <= most:
                raise Rejected(f"{name} of a block has numbers below 0 or above {most}")

    def plain(self) -> Block:
        """Returns the block with its arrays as kernels take them; see `plain`."""
        arrays: dict[str, Any] = {name: plain(array) for name, array in self.arrays.items()}
        return replace(self, **arrays)
