"""The workers that take part, by the newest view that a server has taken."""

from __future__ import annotations

from typing import NamedTuple

from trireme.cluster.view import View


class Participant(NamedTuple):
    """One incarnation of a worker, as the handshake of its connection has proven it."""

    worker: int
    incarnation: int


class Participants:
    """The workers of a view, and which of them still train."""

    def __init__(self) -> None:
        self.view = View(0, (), ())  # the newest
        self.incarnations: dict[int, int] = {}  # each worker's, by index
        self.live: dict[int, int] = {}  # the same of the workers that still train
        self.retired: set[int] = set()  # the workers that train no more, though they stay

    def take(self, view: View) -> set[int]:
        """Takes a newer view; returns the workers that were there before and go on."""
        before, self.view = self.incarnations, view
        self.incarnations = {entry.index: entry.incarnation for entry in view.workers}
        staying = {w for w, i in self.incarnations.items() if before.get(w) == i}
        self.retired &= staying
        self.retire()
        return staying

    def retire(self, *workers: int) -> None:
        """Notes that workers train no more, though they stay."""
        self.retired.update(workers)
        self.live = {w: i for w, i in self.incarnations.items() if w not in self.retired}

    def holds(self, who: Participant) -> bool:
        return self.incarnations.get(who.worker) == who.incarnation

    def fence(self, who: Participant, view: int) -> str | None:
        """Returns why a request is fenced off; None when it is not."""
        current = self.incarnations.get(who.worker)
        if current is None:
            return f"worker:{who.worker} is not in view {self.view.number}"
        if who.incarnation != current:
            return f"worker:{who.worker} was started anew: {current} has replaced {who.incarnation}"
        if view != self.view.number:
            return f"view {view} is not the present one, {self.view.number}"
        return None
