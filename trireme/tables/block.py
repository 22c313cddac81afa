"""Blocks: how a table's contents leave it, for checkpoints, replicas and migration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trireme.errors import Rejected
from trireme.tables.keys import Counts, Keys, plain, slots_of
from trireme.tables.table_spec import MOST_STEPS, MOST_TOUCHES, Optimizer, optimizer_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A part of a table: rows, keys that wait for a row, and keys that were dropped.

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
    dropped_keys: Keys
    dropped_steps: Counts  # the step at which each was dropped

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
        return sum(array.nbytes for array in self._arrays().values())

    def check(self, optimizer: Optimizer, width: int, state: int, dtype: str) -> None:
        """Raises Rejected where the block is not of such a table, or its arrays do not match."""
        before, now = optimizer_name(self.optimizer), optimizer_name(optimizer)
        if before != now:
            raise Rejected(f"a block is of a table whose optimizer is {before}; this one has {now}")
        sizes = {"waiting": self.waiting_keys.size, "dropped": self.dropped_keys.size}
        for name, array in self._arrays().items():
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
        arrays: dict[str, Any] = {name: plain(array) for name, array in self._arrays().items()}
        return replace(self, **arrays)

    def _arrays(self) -> dict[str, npt.NDArray[Any]]:
        names = (each.name for each in fields(self) if each.name != "optimizer")
        return {name: getattr(self, name) for name in names}


class DropLog:
    """Dropped keys with the step at which each was dropped, until they are forgotten.

    Attributes:
        count: how many keys were dropped in this process.
    """

    def __init__(self) -> None:
        self.count = 0
        self._parts: list[tuple[Keys, Counts]] = []

    def __len__(self) -> int:
        """The number of keys that are remembered."""
        return sum(keys.size for keys, _ in self._parts)

    def add(self, keys: Keys, steps: Counts) -> None:
        """Notes that keys were dropped, and counts them; both int64 of shape (n,)."""
        self.count += keys.size
        self.note(keys, steps)

    def note(self, keys: Keys, steps: Counts) -> None:
        """Notes that keys were dropped elsewhere, before they came here."""
        if keys.size:
            self._parts.append((keys.copy(), steps.copy()))

    def after(self, step: int, slots: Sequence[int], most: int) -> Iterator[tuple[Keys, Counts]]:
        """Yields the keys of some slots that were dropped after a step, `most` at a time."""
        for keys, steps in self._parts:
            chosen = np.flatnonzero((steps > step) & np.isin(slots_of(keys), slots))
            for first in range(0, chosen.size, most):
                part = chosen[first : first + most]
                yield keys[part], steps[part]

    def forget(self, until: int) -> None:
        """Forgets the keys that were dropped at steps up to `until`."""
        self._keep(lambda keys, steps: steps > until)

    def remove(self, slots: Sequence[int]) -> None:
        """Forgets the keys of some slots."""
        self._keep(lambda keys, steps: ~np.isin(slots_of(keys), slots))

    def _keep(self, wanted: Callable[[Keys, Counts], npt.NDArray[np.bool_]]) -> None:
        parts = [(keys, steps, wanted(keys, steps)) for keys, steps in self._parts]
        self._parts = [(keys[mask], steps[mask]) for keys, steps, mask in parts if mask.any()]
