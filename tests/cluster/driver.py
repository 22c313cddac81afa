"""Drives the membership in tests: named tasks instead of connections, a clock moved by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace

from trireme.cluster.membership import Closed, Event, Received, Tick, step
from trireme.cluster.messages import Heartbeat, Join, Leave, Outcome, ViewChanged
from trireme.cluster.state import Close, Decision, Policy, Send, State, initial_state
from trireme.cluster.view import View
from trireme.wire.message import Message


class Driver:
    """A job under test.

    Attributes:
        now: the time; set it, then feed an event.
        state: the membership's.
        sent: (connection, message) of the last event, in order.
        closed: the connections that the last event closed.
        reason: of the last event.
    """

    def __init__(self, workers: int = 2, servers: int = 1, **options: float | bool) -> None:
        self.now = 100.0
        policy = replace(Policy(workers=workers, servers=servers), **options)  # type: ignore[arg-type]
        self.state: State = initial_state(self.now, policy)
        self.sent: list[tuple[int, Message]] = []
        self.closed: list[int] = []
        self.reason = ""
        self._numbers = itertools.count(1)

    def feed(self, event: Event) -> Decision:
        decision = step(self.now, self.state, event)
        self.state = decision.state
        self.sent = [
            (i.connection, i.message) for i in decision.instructions if isinstance(i, Send)
        ]
        self.closed = [i.connection for i in decision.instructions if isinstance(i, Close)]
        self.reason = decision.reason
        assert self.reason or not decision.instructions
        return decision

    def say(self, connection: int, message: Message) -> None:
        self.feed(Received(connection, message))

    def join(self, name: str, incarnation: int = 0, pid: int = 7, term: int = 0) -> int:
        """Joins over a new connection and returns its number."""
        connection = next(self._numbers)
        role, _, index = name.partition(":")
        address = f"tcp://h:{index}" if role == "ps" else ""
        self.say(connection, Join(role, int(index), incarnation, "h", pid, address, term))
        return connection

    def join_all(self) -> dict[str, int]:
        return {name: self.join(name) for name in self.state.tasks}

    def hang_up(self, connection: int) -> None:
        self.feed(Closed(connection, "the peer closed it"))

    def leave(self, connection: int, outcome: Outcome, reason: str = "") -> None:
        self.say(connection, Leave(outcome, reason))

    def wait(self, seconds: float, *alive: int) -> None:
        """Lets time pass in steps of a heartbeat, which these connections send."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 1.0)
            for connection in alive:
                self.say(connection, Heartbeat({}))
            self.feed(Tick())

    def to(self, connection: int) -> list[Message]:
        """What the last event sent on a connection."""
        return [message for number, message in self.sent if number == connection]

    @property
    def view(self) -> View:
        assert self.state.view is not None
        return self.state.view

    @property
    def workers(self) -> dict[int, int]:
        """The incarnation of each worker of the newest view, by index."""
        return {worker.index: worker.incarnation for worker in self.view.workers}

    def views_sent(self) -> list[tuple[int, int]]:
        """(connection, number) of the views that the last event sent."""
        return [(c, m.view.number) for c, m in self.sent if isinstance(m, ViewChanged)]
