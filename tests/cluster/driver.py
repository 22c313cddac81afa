"""Drives the membership in tests: named tasks instead of connections, a clock moved by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace

from trireme.cluster.membership import Closed, Event, Received, Tick, step
from trireme.cluster.messages import (
    CaughtUp,
    Heartbeat,
    Join,
    LastStepSaved,
    Leave,
    Outcome,
    ReadyToSwitch,
    Scale,
    ViewChanged,
)
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

    def leave(
        self, connection: int, outcome: Outcome, reason: str = "", *, chief: bool | None = None
    ) -> None:
        """Leaves; as chief where the newest view says so."""
        if chief is None:
            task, view = self.state.holder(connection), self.state.view
            chief = task is not None and view is not None and task.index == view.chief
        if chief and outcome != "failed":
            self.say(connection, LastStepSaved(1))
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


class Job(Driver):
    """A running job of two workers whose servers can be lost, join anew, and report."""

    def __init__(self, servers: int = 3, replicas: int = 2, **options: float | bool) -> None:
        super().__init__(2, servers, replicas=replicas, **options)
        self.held = self.join_all()

    def lose(self, name: str) -> None:
        self.hang_up(self.held.pop(name))
        self.pass_time(self.state.policy.reconnect_grace)

    def pass_time(self, seconds: float) -> None:
        """Everybody is alive meanwhile."""
        self.now += seconds
        for connection in self.held.values():
            self.say(connection, Heartbeat({}))
        self.feed(Tick())

    def come(self, name: str) -> None:
        self.held[name] = self.join(name)

    def report_caught_up(self, number: int, server: int) -> None:
        entry = self.view.server(server)
        assert entry is not None
        primary = self.view.shards[number].primary
        message = CaughtUp(self.view.generation, number, server, entry.incarnation)
        self.say(self.held[f"ps:{primary}"], message)

    def fill(self) -> None:
        """Every joining copy catches up."""
        for number, shard in enumerate(self.view.shards):
            for server in shard.joining:
                self.report_caught_up(number, server)

    def report_ready(self, number: int) -> None:
        assert self.state.reconfiguration is not None
        message = ReadyToSwitch(self.state.reconfiguration.view, self.view.generation, number)
        self.say(self.held[f"ps:{self.view.shards[number].primary}"], message)

    def switch(self) -> None:
        """Every shard stops at the cut."""
        for number in range(len(self.view.shards)):
            self.report_ready(number)

    def settle_once(self) -> None:
        """Takes the next step of a reconfiguration, if one is due."""
        if self.view.next_shards:
            self.switch()
        elif any(shard.joining for shard in self.view.shards):
            self.fill()
        else:
            self.feed(Tick())

    def settle(self) -> int:
        """Goes on until nothing is to be done; returns how many generations that took."""
        before = self.view.generation
        for _ in range(50):
            quiet = not self.view.next_shards and not any(s.joining for s in self.view.shards)
            self.settle_once()
            if quiet and not self.view.next_shards:
                return self.view.generation - before
        raise AssertionError("it does not come to rest")

    def scale(self, servers: int | None = None, workers: int | None = None) -> Message:
        """Asks for other numbers of tasks, and returns the answer."""
        self.feed(Received(0, Scale(servers, workers), 5))
        (answer,) = self.to(0)
        return answer

    @property
    def placement(self) -> list[tuple[int, int, tuple[int, ...]]]:
        return [(shard.start, shard.stop, shard.copies) for shard in self.view.shards]
