"""A simulated process: it lives, may be stopped and continued, and is killed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from tests.simulation.loop import Loop
from tests.simulation.network import Wire


class Process:
    """What happens to a process happens through it, as long as it lives.

    Args:
        loop: virtual time.

    Attributes:
        alive: whether it was not killed.
        stopped: whether it is stopped: what happens to it waits until it is continued.
    """

    def __init__(self, loop: Loop) -> None:
        self.alive = True
        self.stopped = False
        self._loop = loop
        self._wires: list[Wire] = []
        self._missed: deque[Callable[[], None]] = deque()

    def run(self, call: Callable[[], None]) -> None:
        """Calls a function in the process: now, or when it is continued."""
        if not self.alive:
            return
        if self.stopped:
            self._missed.append(call)
        else:
            call()

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Has a function called in the process so many seconds from now."""
        self._loop.after(seconds, lambda: self.run(call))

    def holds(self, wire: Wire) -> None:
        """Notes one of its connections, which breaks when the process is killed."""
        if len(self._wires) > 32:
            self._wires = [each for each in self._wires if each.whole]
        self._wires.append(wire)

    def stop(self, seconds: float) -> None:
        """Stops the process for so long."""
        self.stopped = True
        self._loop.after(seconds, self._continue)

    def _continue(self) -> None:
        self.stopped = False
        while self._missed and self.alive and not self.stopped:
            self._missed.popleft()()

    def kill(self) -> None:
        """Kills the process."""
        self.alive = False
        self._missed.clear()
        for wire in self._wires:
            wire.break_()
