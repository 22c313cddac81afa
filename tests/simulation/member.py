"""A simulated process's connection to the coordinator: drives the real member's protocol."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tests.simulation.coordinator import CoordinatorHost
from tests.simulation.network import Network, Wire
from tests.simulation.process import Process
from trireme.cluster.member_protocol import MemberConfig, MemberProtocol, News
from trireme.cluster.messages import Leave, Outcome, Signalled
from trireme.cluster.view import View, WorkerEntry
from trireme.errors import ConnectionRefused, PeerClosed, WireTimeout
from trireme.wire.handshake import Identity
from trireme.wire.message import Message


class Member:
    """One process's membership.

    Args:
        network: what carries its messages.
        coordinator: whom to join.
        process: whose it is.
        task: the role and the index.
        place: the process's host, its pid, and the address at which it listens.
        make: its protocol.
        hear: told of each view, and of the end of the job.

    Attributes:
        state: what the process knows of the job.
    """

    def __init__(
        self,
        network: Network,
        coordinator: CoordinatorHost,
        process: Process,
        task: tuple[str, int],
        place: tuple[str, int, str],
        make: Callable[..., MemberProtocol],
        hear: Callable[[News], object],
    ) -> None:
        self._network = network
        self._coordinator = coordinator
        self._process = process
        self._index = task[1]
        host, pid, address = place
        config = MemberConfig("", "", *task, b"", address=address, connect_timeout=math.inf)
        self._name = config.name
        self.state = self._protocol = make(config, network.loop.now, host, pid, pid)
        self.state.subscribe(hear)
        self._wire: Wire | None = None
        self._say: Callable[[Message], None] = lambda message: None
        self._due = math.inf  # when a tick comes
        self._silent_until = 0.0

    @property
    def view(self) -> View:
        """The newest view that the process has heard of; one of nobody before the first."""
        return self.state.view or View(0, (), ())

    @property
    def takes_part(self) -> bool:
        """Whether a worker's process is in that view, as what it is now."""
        return WorkerEntry(self._index, self.state.incarnation) in self.view.workers

    def connect(self) -> None:
        """Connects and joins; again whenever the connection breaks."""
        loop = self._network.loop
        if self._protocol.finished or not self._process.alive:
            return
        stuck = self.state.incarnation and not self.state.able()
        if loop.now < self._silent_until or not self._coordinator.process.alive or stuck:
            self._retry()
            return
        wire = self._network.wire(
            lambda: self._process.run(lambda: self._broke(wire)), ends=(self._name, "coordinator:0")
        )
        self._process.holds(wire)
        identity = Identity("", self._name, self.state.incarnation, self.state.epoch)
        self._say = self._coordinator.connect(
            identity, wire, lambda message: self._process.run(lambda: self._heard(wire, message))
        )
        self._wire = wire
        self._send(self._protocol.connected(loop.now))
        self._await()

    def fall_silent(self, seconds: float) -> None:
        """Nothing that the process says reaches the coordinator for so long."""
        self._silent_until = self._network.loop.now + seconds

    def tell(self, reports: Sequence[Message]) -> None:
        """Sends what the task has to say beside its status."""
        self.state.reports = tuple(reports)
        self._due = self._network.loop.now
        self._tick(self._due)

    def signal(self, name: str) -> None:
        """A signal asks the process to end."""
        self.state.signalled = Signalled(name)
        self._due = self._network.loop.now
        self._tick(self._due)

    def leave(self, outcome: Outcome) -> None:
        """Tells the coordinator that the process ends, until it knows."""
        self.state.leaving = Leave(outcome)
        self._due = self._network.loop.now
        self._tick(self._due)

    def close(self) -> None:
        """Ends the connection, as the end of a process does."""
        self.state.closing = True
        self._hang_up()

    # -- inside -----------------------------------------------------------------------------------

    def _heard(self, wire: Wire, message: Message) -> None:
        if self._wire is not wire:
            return
        try:
            answer = self._protocol.heard(self._network.loop.now, message)
        except ConnectionRefused:
            self._hang_up()
            self._retry()
            return
        if answer is not None:
            self._send(answer)
        if self.state.left:
            self.close()
        self._await()

    def _tick(self, due: float) -> None:
        if due != self._due:
            return  # another one has taken its place
        self._due = math.inf
        now = self._network.loop.now
        if self._wire is None:
            return
        try:
            for message in self._protocol.tick(now):
                self._send(message)
        except WireTimeout:
            self._hang_up()
            self._retry()
            return
        if self._protocol.served(now):
            self._hang_up()
        self._await()

    def _await(self) -> None:
        if self._wire is not None and self._protocol.due < self._due:
            due = self._due = self._protocol.due
            loop = self._network.loop
            loop.at(max(due, loop.now), lambda: self._process.run(lambda: self._tick(due)))

    def _send(self, message: Message) -> None:
        wire, say = self._wire, self._say
        if wire is None:
            return
        if self._network.loop.now < self._silent_until:
            self._network.loop.at(self._silent_until, lambda: say(message))
        else:
            say(message)

    def _broke(self, wire: Wire) -> None:
        if self._wire is wire:
            self._wire = None
            self._retry()

    def _retry(self) -> None:
        if not self._protocol.finished:
            pause = self._protocol.broke(self._network.loop.now, PeerClosed("it broke"))
            if pause is not None:
                self._process.after(max(pause, 0.01), self.connect)

    def _hang_up(self) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None
