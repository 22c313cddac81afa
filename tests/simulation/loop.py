"""Virtual time: a queue of calls, and processes that wait in it instead of in threads."""

from __future__ import annotations

from collections.abc import Callable, Generator
from heapq import heappop, heappush
from typing import Any

_MOST_CALLS = 200_000  # five servers that grow in a storm take more than 50,000

Start = Callable[[Callable[[Any], None]], None]
"""Begins an operation; the argument is called with its result, once, later."""

Process = Generator[Start, Any, None]
"""A process as a generator: it yields what it waits for, and is sent the result."""


class Loop:
    """Calls functions in the order of their times. Nothing here takes real time.

    Attributes:
        now: the virtual time in seconds.
        note: told what happens, where somebody wants to read it.
    """

    def __init__(self, note: Callable[[str], None] | None = None) -> None:
        self.now = 0.0
        self.note = note
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._made = 0

    def at(self, time: float, call: Callable[[], None]) -> None:
        """Has a function called at a time; among those of one time the first made is first."""
        self._made += 1
        heappush(self._calls, (time, self._made, call))

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Has a function called so many seconds from now."""
        self.at(self.now + seconds, call)

    def sleep(self, seconds: float) -> Start:
        """Returns what a process yields to wait so long."""
        return lambda resume: self.after(seconds, lambda: resume(None))

    def run(self, *, until: float, done: Callable[[], bool]) -> bool:
        """Lets time pass until `done` says so; returns False when `until` came first.

        It also returns False after very many calls: somebody goes round in circles.
        """
        last = self._made + _MOST_CALLS
        while not done():
            if not self._calls or self._calls[0][0] > until or self._made > last:
                return False
            self.now, _, call = heappop(self._calls)
            call()
        return True


class Task:
    """A process under way."""

    def __init__(self, process: Process, finished: Callable[[], None] = lambda: None) -> None:
        self._process = process
        self._finished = finished
        self.over = False

    def begin(self) -> None:
        """Runs the process up to the first thing that it waits for."""
        self._resume(None)

    def kill(self) -> None:
        """Ends the process where it is; what it waits for will find nobody."""
        self.over = True

    def _resume(self, result: Any) -> None:
        if self.over:
            return
        try:
            start = self._process.send(result)
        except StopIteration:
            self.over = True
            self._finished()
            return
        start(self._resume)
