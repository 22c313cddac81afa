"""A simulated coordinator: feeds the real membership, and carries out what it decides."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from tests.simulation.network import DOWN, Network, Wire
from trireme.cluster.decision import Decision, Send
from trireme.cluster.membership import Closed, Event, Received, Tick
from trireme.cluster.messages import Heartbeat
from trireme.cluster.state import Policy, State, everybody_told, initial_state
from trireme.cluster.view import View
from trireme.wire.message import Message

_TICK_SECONDS = 0.2

Decide = Callable[[float, State, Event], Decision]
"""How the membership decides: `trireme.cluster.membership.step`."""


@dataclass(frozen=True, slots=True)
class _Line:
    wire: Wire
    deliver: Callable[[Message], None]


class Coordinator:
    """Who takes part, as the membership decides.

    Args:
        network: what carries its messages.
        policy: what the job expects of its tasks.
        decide: the membership.
        lost: told of each incarnation of a worker that a new view has lost.

    Attributes:
        state: the membership's.
    """

    def __init__(
        self, network: Network, policy: Policy, decide: Decide, lost: Callable[[int, int], None]
    ) -> None:
        self._loop = network.loop
        self.state = initial_state(self._loop.now, policy)
        self._decide = decide
        self._lost = lost
        self._lines: dict[int, _Line] = {}
        self._numbers = itertools.count(1)

    @property
    def view(self) -> View:
        """The newest view; one of nobody before the first."""
        return self.state.view or View(0, (), ())

    @property
    def done(self) -> bool:
        """Whether the job is over, and every task knows."""
        return everybody_told(self._loop.now, self.state)

    def tick(self) -> None:
        """Passes time on, until the job is over."""
        self._feed(Tick())
        if not self.done:
            self._loop.after(_TICK_SECONDS, self.tick)

    def opened(self, wire: Wire, deliver: Callable[[Message], None]) -> int:
        """A process has connected; returns the number of the connection."""
        number = next(self._numbers)
        self._lines[number] = _Line(wire, deliver)
        return number

    def receive(self, number: int, message: Message) -> None:
        """A message comes over a connection."""
        if number in self._lines:
            self._feed(Received(number, message))

    def closed(self, number: int) -> None:
        """A connection is gone, and all has come that it still brought."""
        if self._lines.pop(number, None) is not None:
            self._feed(Closed(number, "it broke"))

    def _feed(self, event: Event) -> None:
        before = self.view
        self.state, instructions, reason = self._decide(self._loop.now, self.state, event)
        routine = isinstance(event, Received) and isinstance(event.message, Heartbeat)
        if self._loop.note is not None and reason and not routine:
            self._loop.note(f"{self._loop.now:8.4f} coordinator: {reason}")
        if self.view is not before:
            self._tell_lost(before)
        for instruction in instructions:
            if isinstance(instruction, Send):
                self._send(instruction)
            elif instruction.connection in self._lines:
                wire = self._lines.pop(instruction.connection).wire
                wire.carry(DOWN, wire.break_)

    def _send(self, order: Send) -> None:
        line = self._lines.get(order.connection)
        if line is not None:
            line.wire.carry(DOWN, lambda: line.deliver(order.message))

    def _tell_lost(self, before: View) -> None:
        for entry in before.workers:
            task = self.state.tasks[f"worker:{entry.index}"]
            left = task.state == "left" and task.incarnation == entry.incarnation
            if entry not in self.view.workers and not left:
                self._lost(entry.index, entry.incarnation)
