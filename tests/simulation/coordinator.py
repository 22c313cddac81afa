"""The processes of a simulated job's coordinator: each drives the real one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import msgspec

from tests.simulation.connection import End
from tests.simulation.loop import Loop
from tests.simulation.network import DOWN, UP, Network, Wire
from tests.simulation.process import Process
from trireme.cluster import coordinator as real
from trireme.cluster.coordinator import Coordinator
from trireme.cluster.membership import Event, ProcessEnded, is_routine
from trireme.cluster.messages import Scale
from trireme.cluster.spec import OBSERVER
from trireme.cluster.state import Decision, Policy, State
from trireme.cluster.view import View
from trireme.errors import FrameError
from trireme.wire.connection import Incoming
from trireme.wire.handshake import Identity
from trireme.wire.message import Message

_TICK_SECONDS = 0.2

Decide = Callable[..., Decision]
"""How the membership decides: `trireme.cluster.membership.step`."""


class MemoryJournal:
    """A journal that outlives the process which writes it. It keeps what was written, encoded."""

    def __init__(self) -> None:
        self._content = b""

    @property
    def state(self) -> State | None:
        """What was written last; None for nothing."""
        return msgspec.msgpack.decode(self._content, type=State) if self._content else None

    def write(self, state: State) -> None:
        """Writes a state."""
        self._content = msgspec.msgpack.encode(state)


class _Clock:
    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def now(self) -> float:
        return self._loop.now


class CoordinatorHost:
    """Where the coordinator runs, and where it is started again.

    Args:
        network: what carries its messages.
        policy: what the job expects of its tasks.
        viewed: told of each new view, with the one before.
    """

    def __init__(
        self, network: Network, policy: Policy, viewed: Callable[[View, State], None]
    ) -> None:
        self._network = network
        self._loop = network.loop
        self._policy = policy
        self._viewed = viewed
        self._journal: Any = MemoryJournal()
        self._over = False
        self._newest: dict[str, list[End]] = {}  # by task: its newest connection
        self._cut_off: dict[str, float] = {}  # by task without one: since when
        self._longest: dict[str, float] = {}  # by task: for how long it had none
        self.process = Process(self._loop)
        self._coordinator = self._start()

    def _start(self) -> Coordinator:
        clock, process = _Clock(self._loop), self.process
        made = Coordinator(self._policy, epoch="e", clock=clock, journal=self._journal)
        made.later = lambda decide: process.after(0.0, lambda: self._feed(decide))
        return made

    @property
    def state(self) -> State:
        """The membership's."""
        return self._coordinator.state

    @property
    def view(self) -> View:
        """The newest view; one of nobody before the first."""
        return self.state.view or View(0, (), ())

    @property
    def done(self) -> bool:
        """Whether the job is over, and every task knows."""
        return self._over

    def longest_without(self, task: str) -> float:
        """Returns for how many seconds a task that had been connected was not, at most."""
        since = self._cut_off.get(task, self._loop.now)
        return max(self._longest.get(task, 0.0), self._loop.now - since)

    # -- its processes ----------------------------------------------------------------------------

    def begin(self) -> None:
        """Starts the first process."""
        self._tick(self.process)

    def kill(self, seconds: float) -> None:
        """Kills its process; another one goes on after so many seconds."""
        self.process.kill()
        self._loop.after(seconds, self._start_again)

    def _start_again(self) -> None:
        self._note("coordinator: is started again")
        self.process = Process(self._loop)
        self._feed(self._resume)
        self._tick(self.process)

    def _resume(self) -> None:
        self._coordinator = self._start()

    def _tick(self, process: Process) -> None:
        if not process.alive:
            return
        self._feed(lambda: self._coordinator.tick(self._loop.now))
        if self._coordinator.done:
            self._over = True
        else:
            process.after(_TICK_SECONDS, lambda: self._tick(process))

    # -- its connections --------------------------------------------------------------------------

    def connect(
        self, identity: Identity, wire: Wire, deliver: Callable[[Message], None]
    ) -> Callable[[Message], None]:
        """Takes a connection; returns what sends over it, once that has arrived."""
        process, ends = self.process, list[End]()
        process.holds(wire)

        def accept() -> None:
            if not process.alive:
                wire.break_()
                return
            self._longest[identity.task] = self.longest_without(identity.task)
            self._cut_off.pop(identity.task, None)
            self._newest[identity.task] = ends
            ends.append(
                End(
                    process,
                    self._coordinator,
                    identity,
                    lambda message, _, __: wire.carry(DOWN, lambda: deliver(message)),
                    lambda: wire.carry(DOWN, wire.break_),
                )
            )

        def send(message: Message) -> None:
            wire.carry(UP, lambda: process.run(lambda: self._receive(ends, message)))

        wire.carry(UP, accept)
        wire.ended = lambda: process.run(lambda: self._end(identity.task, ends))
        return send

    def _receive(self, ends: list[End], message: Message) -> None:
        if ends and not ends[0].closed:
            self._feed(lambda: self._received(ends[0], message))

    def _received(self, end: End, message: Message) -> None:
        try:
            self._coordinator.received(end, Incoming(message, 0, (), 0))  # type: ignore[arg-type]
        except FrameError:
            end.close()

    def _end(self, task: str, ends: list[End]) -> None:
        if self._newest.get(task) is ends:
            self._cut_off.setdefault(task, self._loop.now)
        if ends:
            self._feed(ends[0].broke)

    def tell(self, message: Scale, heard: Callable[[Message], None]) -> bool:
        """Somebody who is no member says something; returns False where nobody listens now."""
        if not self.process.alive:
            return False
        wire = self._network.wire(lambda: None)
        self.connect(Identity("", OBSERVER), wire, heard)(message)
        self._loop.after(5.0, wire.close)
        return True

    def process_ended(self, ended: ProcessEnded) -> None:
        """Whoever has started a process tells that it has ended."""
        if self.process.alive:
            self._feed(lambda: self._coordinator.process_ended(ended))

    # -- what it decides --------------------------------------------------------------------------

    def _feed(self, call: Callable[[], None]) -> None:
        before = self.view
        call()
        if self.view is not before and self.view.number != before.number:
            self._viewed(before, self.state)

    @contextmanager
    def deciding(self, decide: Decide) -> Iterator[None]:
        """Has the membership decide so."""

        def told(now: float, state: State, *events: Event) -> Decision:
            decision = decide(now, state, *events)
            routine = all(map(is_routine, events))
            if self._loop.note is not None and decision.reason and not routine:
                self._note(f"coordinator: {decision.reason}")
            return decision

        with patch.object(real, "step", told):
            yield

    def _note(self, what: str) -> None:
        if self._loop.note is not None:
            self._loop.note(f"{self._loop.now:8.4f} {what}")
