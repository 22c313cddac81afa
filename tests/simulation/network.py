"""A network that delays, cuts and breaks: connections in order each way, until they break."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from tests.simulation.loop import Loop

UP, DOWN = 0, 1
"""The two ways of a connection: from who made it, and back."""


_BREAKS_AFTER = 10.0
"""A connection over which nothing passes breaks after so many seconds, as TCP's do."""

_LATEST = 1.0
"""So many seconds after a connection broke, what was under way on it may still arrive."""


@dataclass(frozen=True, slots=True)
class Weather:
    """How bad the network is.

    Attributes:
        latency: the mean of a message's way, in seconds; each draws its own.
        slow: the chance that a message takes up to a second more.
        breaks: the chance that a message breaks its connection.
        calm_from: from then on nothing breaks and nothing is slow.
        lag: how much longer a message may take on its way back to who made the connection.
    """

    latency: float = 0.005
    slow: float = 0.0
    breaks: float = 0.0
    calm_from: float = 0.0
    lag: float = 0.0


class Network:
    """Draws the fate of every message.

    Attributes:
        broken: how many connections broke.
        parted: by two names: until when nothing passes between the two.
    """

    def __init__(self, loop: Loop, rng: random.Random, weather: Weather) -> None:
        self.loop = loop
        self.rng = rng
        self.broken = 0
        self._wires: list[Wire] = []
        self.parted: dict[tuple[str, str], float] = {}
        self._weather = weather
        self._cuts: dict[tuple[str, str], float] = {}  # from, to: until when nothing passes
        self._deaf: dict[str, float] = {}  # until when nothing reaches it

    def wire(
        self,
        broke: Callable[[], None],
        ended: Callable[[], None] = lambda: None,
        ends: tuple[str, str] = ("", ""),
    ) -> Wire:
        """Returns a new connection.

        Args:
            broke: called some time after it has broken.
            ended: called after the last of what it has brought up, however it came to its end.
            ends: the names of who makes it and of the other end.
        """
        self._wires = [each for each in self._wires if each.whole]
        self._wires.append(made := Wire(self, broke, ended, ends))
        return made

    def cut(self, source: str, target: str, seconds: float) -> None:
        """Lets nothing pass from one to the other for so long; it arrives later."""
        self._cuts[source, target] = self.loop.now + seconds
        self.parted.pop((min(source, target), max(source, target)), None)  # it may end sooner

    def deafen(self, target: str, seconds: float) -> None:
        """Delays every message to one process for some seconds, and none that it sends."""
        self._deaf[target] = self.loop.now + seconds

    def is_deaf(self, name: str) -> bool:
        """Returns whether nothing reaches a process now."""
        return self.loop.now < self._deaf.get(name, 0.0)

    def part(self, one: str, other: str, seconds: float) -> None:
        """Lets nothing pass between two for so long; it arrives later."""
        self.cut(one, other, seconds)
        self.cut(other, one, seconds)
        pair = min(one, other), max(one, other)
        self.parted[pair] = until = self.loop.now + seconds
        if seconds > _BREAKS_AFTER:
            self.loop.after(_BREAKS_AFTER, lambda: self._break_parted(pair, until))

    def _break_parted(self, pair: tuple[str, str], until: float) -> None:
        """Breaks the connections of two that have not heard each other for long."""
        if self.parted.get(pair) == until:
            for wire in [each for each in self._wires if each.whole and each.joins(pair)]:
                wire.break_()

    def latency(self, way: int) -> float:
        """Draws how long a message takes."""
        seconds = self.rng.expovariate(1 / self._weather.latency)
        if way == DOWN and self._weather.lag:
            seconds += self.rng.uniform(0, self._weather.lag)
        if self._stormy and self.rng.random() < self._weather.slow:
            seconds += self.rng.random()
        return seconds

    def passes_from(self, source: str, target: str) -> float:
        """Returns from when on something passes from one to the other."""
        if not (self._cuts or self._deaf):
            return 0.0
        return max(self._cuts.get((source, target), 0.0), self._deaf.get(target, 0.0))

    def breaks(self) -> bool:
        """Draws whether a message breaks its connection."""
        return self._stormy and self.rng.random() < self._weather.breaks

    @property
    def _stormy(self) -> bool:
        return self.loop.now < self._weather.calm_from


class Wire:
    """One connection. When it breaks, both ways break; the first of what is under way may arrive.

    Attributes:
        whole: whether it can be used.
        ended: called after the last of what it has brought up.
    """

    def __init__(
        self,
        network: Network,
        broke: Callable[[], None],
        ended: Callable[[], None],
        ends: tuple[str, str],
    ) -> None:
        self.whole = True
        self._network = network
        self.ended = ended
        self._broke = broke
        self._ends = ends
        self._free = [0.0, 0.0]  # by way: when the last message on it arrives
        self._spent = [False, False]  # by way: whether anything was lost; then so is all later

    def joins(self, pair: tuple[str, str]) -> bool:
        """Returns whether it is between these two."""
        return set(self._ends) == set(pair)

    def carry(self, way: int, deliver: Callable[[], None]) -> None:
        """Sends a message: `deliver` is called when it arrives, if it does."""
        if not self.whole:
            return
        network = self._network
        source, target = self._ends if way == UP else self._ends[::-1]
        opens = network.passes_from(source, target)
        at = max(self._free[way], max(network.loop.now, opens) + network.latency(way))
        self._free[way] = at
        if network.breaks():
            self.break_()
            at += _LATEST * network.rng.random()  # the last copy may arrive after its repeat
            self._free[way] = at
        network.loop.at(at, lambda: self._arrive(way, deliver))

    def break_(self) -> None:
        """Breaks the connection; its owner finds out a little later."""
        if self.whole:
            self.close()
            self._network.broken += 1
            self._network.loop.after(self._network.latency(UP), self._find_out)

    def _find_out(self) -> None:
        self._spent[DOWN] = True
        self._broke()

    def close(self) -> None:
        """Ends the connection from the side that made it; `broke` is not called."""
        if self.whole:
            self.whole = False
            last = max(self._free[UP], self._network.loop.now) + _LATEST
            self._network.loop.at(last, lambda: self.ended())

    def _arrive(self, way: int, deliver: Callable[[], None]) -> None:
        if not self.whole and not self._spent[way]:
            self._spent[way] = self._network.rng.random() < 0.5
        if self.whole or not self._spent[way]:
            deliver()
