"""A simulated coordinator: makes views, and tells everybody a little later."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from tests.simulation.loop import Loop
from trireme.cluster.view import ServerEntry, View, WorkerEntry

__all__ = ["Coordinator"]


class Coordinator:
    """Who takes part. Everybody hears of a view at a time of their own, within `delay` seconds.

    Attributes:
        view: the newest.
        incarnations: the last start of each worker, whether or not it is in the view.
    """

    def __init__(self, loop: Loop, rng: random.Random, servers: int, delay: float) -> None:
        self.view = View(0, tuple(ServerEntry(i, 1, "") for i in range(servers)), ())
        self.incarnations: dict[int, int] = {}
        self._loop = loop
        self._rng = rng
        self._delay = delay
        self._listeners: list[Callable[[View], None]] = []

    def subscribe(self, hear: Callable[[View], None]) -> None:
        """Has a function told every later view, in whatever order they arrive."""
        self._listeners.append(hear)

    def form(self, workers: int) -> None:
        """Issues the first view."""
        self.incarnations = dict.fromkeys(range(workers), 1)
        self._issue(self.incarnations)

    def join(self, worker: int) -> int:
        """A process comes as this worker; returns its incarnation."""
        incarnation = self.incarnations[worker] + 1
        self.incarnations[worker] = incarnation
        self._issue({**self._members, worker: incarnation})
        return incarnation

    def drop(self, worker: int, incarnation: int) -> None:
        """A worker has left or is lost; nothing happens if it is not there."""
        if self._members.get(worker) == incarnation:
            self._issue({w: i for w, i in self._members.items() if w != worker})

    @property
    def _members(self) -> dict[int, int]:
        return {entry.index: entry.incarnation for entry in self.view.workers}

    def _issue(self, workers: dict[int, int]) -> None:
        entries = tuple(WorkerEntry(w, i) for w, i in sorted(workers.items()))
        view = self.view = View(self.view.number + 1, self.view.servers, entries)
        if self._loop.note is not None:
            self._loop.note(f"{self._loop.now:8.4f} coordinator issues {view}")
        for hear in self._listeners:
            self._loop.after(self._rng.uniform(0, self._delay), partial(hear, view))
