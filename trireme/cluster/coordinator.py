"""Serves the membership of a job: messages and time go in, its instructions go out.

The coordinator keeps no journal yet: when its process is gone, the tasks train on with the view
that they have, and after a while give the job up.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable

from trireme.clock import Clock, MonotonicClock
from trireme.cluster.membership import (
    Close,
    Closed,
    Event,
    Paused,
    Policy,
    Received,
    State,
    Tick,
    cluster_status,
    everybody_told,
    initial_state,
    step,
)
from trireme.cluster.messages import (
    CLUSTER_MESSAGES,
    Heartbeat,
    JobOver,
    Join,
    Leave,
    StatusQuery,
    Stop,
)
from trireme.cluster.spec import task_name
from trireme.errors import FrameError, WireError
from trireme.wire.connection import Incoming
from trireme.wire.handshake import new_epoch
from trireme.wire.message import Message
from trireme.wire.service import Link

__all__ = ["Coordinator"]

_log = logging.getLogger(__name__)

_PAUSE_SECONDS = 1.0
"""A service ticks many times a second. What passes between two ticks above this is time in which
it stood still, and heard nobody: it does not count as anybody's silence."""


class Coordinator:
    """Decides who takes part in a job. A `Handler` of a `Service`, alone or beside others.

    Args:
        policy: what the job expects.
        epoch: which start of the job this is; a new one by default.
        term: which start of the coordinator within it, from 1.
        clock: the service's.
        on_done: called once, in the service's thread, when the job is over and everybody was
            told, or `policy.end_grace` has passed since: the service may stop.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        epoch: str | None = None,
        term: int = 1,
        clock: Clock | None = None,
        on_done: Callable[[], None] | None = None,
    ) -> None:
        self._clock = clock or MonotonicClock()
        self._on_done = on_done
        self._state = initial_state(self._clock.now(), policy, epoch or new_epoch(), term)
        self._connections: dict[Link, int] = {}
        self._links: dict[int, Link] = {}
        self._numbers = itertools.count(1)
        self._awake: float | None = None
        self._done = False

    @property
    def messages(self) -> tuple[type[Message], ...]:
        """The cluster's messages."""
        return CLUSTER_MESSAGES

    @property
    def state(self) -> State:
        """What is known of the job; immutable, so any thread may read it."""
        return self._state

    @property
    def epoch(self) -> str:
        """Which start of the job this is. The service that serves it has the same."""
        return self._state.epoch

    @property
    def over(self) -> JobOver | None:
        """How the job ended; None before that."""
        return self._state.over

    @property
    def done(self) -> bool:
        """Whether the job is over and nobody is left to tell."""
        return self._done

    def authenticated(self, link: Link) -> None:
        number = next(self._numbers)
        self._connections[link] = number
        self._links[number] = link

    def received(self, link: Link, incoming: Incoming) -> None:
        message = incoming.message
        if isinstance(message, Join):
            _check_identity(link, message)
        if isinstance(message, Leave):
            link.departing = True
        if not isinstance(message, StatusQuery):
            self._feed(Received(self._connections[link], message))
        if isinstance(message, StatusQuery | Stop):
            status = cluster_status(self._clock.now(), self._state)
            link.offer(status, sequence=incoming.sequence)

    def closed(self, link: Link, error: WireError | None) -> None:
        connection = self._connections.pop(link)
        del self._links[connection]
        self._feed(Closed(connection, str(error) if error else "this side closed it"))

    def tick(self, now: float) -> None:
        self._feed(Tick())
        if not self._done and everybody_told(now, self._state):
            self._done = True
            if self._on_done is not None:
                self._on_done()

    def _feed(self, event: Event) -> None:
        now = self._clock.now()
        paused = 0.0 if self._awake is None else now - self._awake - _PAUSE_SECONDS
        self._awake = now
        if paused > 0:
            self._decide(now, Paused(paused))
        self._decide(now, event)

    def _decide(self, now: float, event: Event) -> None:
        before = self._state
        self._state, instructions, reason = step(now, before, event)
        if reason:
            routine = isinstance(event, Received) and isinstance(event.message, Heartbeat)
            _log.log(logging.DEBUG if routine else logging.INFO, "%s", reason)
        for instruction in instructions:
            link = self._links[instruction.connection]
            if isinstance(instruction, Close):
                link.close()
            else:
                link.offer(instruction.message)


def _check_identity(link: Link, join: Join) -> None:
    name = task_name(join.role, join.index)
    if link.identity.task != name:
        raise FrameError(f"{link.identity.task} asked to join as {name}")
