"""Which keys a table has dropped, and when: what an incremental checkpoint has to delete."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from trireme.tables.keys import Keys, slots_of

Steps = npt.NDArray[np.int64]


class DropLog:
    """Dropped keys with the step at which each was dropped, until they are forgotten.

    Attributes:
        count: how many keys were dropped in this process.
    """

    def __init__(self) -> None:
        self.count = 0
        self._parts: list[tuple[Keys, Steps]] = []

    def __len__(self) -> int:
        """The number of keys that are remembered."""
        return sum(keys.size for keys, _ in self._parts)

    def add(self, keys: Keys, steps: Steps) -> None:
        """Notes that keys were dropped, and counts them; both int64 of shape (n,)."""
        self.count += keys.size
        self.note(keys, steps)

    def note(self, keys: Keys, steps: Steps) -> None:
        """Notes that keys were dropped elsewhere, before they came here."""
        if keys.size:
            self._parts.append((keys.copy(), steps.copy()))

    def after(self, step: int, slots: Sequence[int], most: int) -> Iterator[tuple[Keys, Steps]]:
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

    def _keep(self, wanted: Callable[[Keys, Steps], npt.NDArray[np.bool_]]) -> None:
        parts = [(keys, steps, wanted(keys, steps)) for keys, steps in self._parts]
        self._parts = [(keys[mask], steps[mask]) for keys, steps, mask in parts if mask.any()]
