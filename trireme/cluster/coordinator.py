"""Serves the membership of a job: feeds it messages and time, and carries out its instructions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec.structs import replace

from trireme.cluster.membership import (
    Closed,
    Event,
    Paused,
    ProcessEnded,
    Received,
    Stop,
    Tick,
    is_routine,
    step,
)
from trireme.cluster.messages import CLUSTER_MESSAGES, Join, Leave, Scale, StatusQuery
from trireme.cluster.spec import OBSERVER, task_name
from trireme.cluster.state import (
    Close,
    Policy,
    State,
    cluster_status,
    everybody_informed,
    initial_state,
)
from trireme.errors import FrameError, NetworkLost, WireError
from trireme.wire.clock import Clock, MonotonicClock
from trireme.wire.connection import Incoming
from trireme.wire.handshake import new_epoch
from trireme.wire.service import Link

_log = logging.getLogger(__name__)


_STALL_SECONDS, _STALL_SHARE = 1.0, 0.5
"""A service ticks many times a second. Time between two ticks beyond so many seconds, or beyond
this share of the silence after which a task is lost, is time in which the coordinator was stalled,
and does not count as silence of the tasks."""


class Journal(Protocol):
    """Where a coordinator keeps its newest state, which then outlives its process."""

    state: State | None

    def write(self, state: State) -> None: ...


class Coordinator:
    """Decides who takes part in a job. A `Handler` of a `Service`, alone or beside others.

    A journal keeps each decision, before anybody hears of it. Where it holds a state, the job goes
    on with that. `on_done` is called once, when the job is over and every task knows, or
    `end_grace` has passed; `on_change` when `state` has changed otherwise than by a heartbeat.

    Attributes:
        state: the state of the job. It is immutable, so that any thread may read it.
        done: whether the job is over and every task was informed.
        later: has the service call a function in its next turn. What comes until then is decided
            together, with one view and one write to the journal: a thousand tasks that come at once
            would take minutes otherwise.
    """

    messages = CLUSTER_MESSAGES

    def __init__(
        self,
        policy: Policy,
        *,
        epoch: str | None = None,
        clock: Clock | None = None,
        journal: Journal | None = None,
        on_done: Callable[[], None] | None = None,
        on_change: Callable[[], object] = lambda: None,
    ) -> None:
        self._clock = clock or MonotonicClock()
        self._on_done = on_done
        self._on_change = on_change
        self._journal = journal
        now, kept = self._clock.now(), None if journal is None else journal.state
        if kept is None:
            self.state = initial_state(now, policy, epoch or new_epoch())
        else:
            self.state = resumed(now, kept)
            _log.info("goes on as term %d of the job's coordinator", self.state.term)
        if journal is not None:
            journal.write(self.state)
        self._links: dict[int, Link] = {}  # by id, which is the number of the connection
        self._last_fed: float | None = None
        self._events: list[Event] = []  # that are not decided yet
        self._closed: list[Link] = []  # of these
        self.done = False
        self.later: Callable[[Callable[[], object]], object] | None = None

    def authenticated(self, link: Link) -> None:
        self._links[id(link)] = link

    def received(self, link: Link, incoming: Incoming) -> None:
        message = incoming.message
        if isinstance(message, Join):
            name = task_name(message.role, message.index)
            if link.identity.task != name:
                raise FrameError(f"{link.identity.task} asked to join as {name}")
        if isinstance(message, Leave):
            link.departing = True
        if isinstance(message, StatusQuery):
            status = cluster_status(self._clock.now(), self.state)
            link.offer(status, sequence=incoming.sequence)
            return
        if isinstance(message, Scale) and link.identity.task != OBSERVER:
            raise FrameError(f"{link.identity.task} sent Scale")
        self._handle(Received(id(link), message, incoming.sequence))

    def closed(self, link: Link, error: WireError | None) -> None:
        # After a stall the membership gives tasks up first, and may close this very link.
        self._closed.append(link)  # which keeps its id from being another one's
        silent = isinstance(error, NetworkLost)
        self._handle(Closed(id(link), str(error) if error else "this side closed it", silent))

    def stop_job(self, reason: str, *, final: bool) -> None:
        """Stops the job before its end; finally, if none of its processes is started again."""
        self._handle(Stop(reason, final))

    def process_ended(self, ended: ProcessEnded) -> None:
        """Gives up a task whose process has ended, without waiting for its silence."""
        self._handle(ended)

    def tick(self, now: float) -> None:
        self._events.append(Tick())
        self._decide()
        if not self.done and everybody_informed(now, self.state):
            self.done = True
            self._on_change()
            if self._on_done is not None:
                self._on_done()

    def _handle(self, event: Event) -> None:
        first, routine = not self._events, is_routine(event)
        self._events.append(event)
        if self.later is None or (first and routine):
            self._decide()
        elif first:
            self.later(self._decide)

    def _decide(self) -> None:
        now, events, closed = self._clock.now(), self._events, self._closed
        if not events:
            return  # the tick was first
        self._events, self._closed = [], []
        usual = min(_STALL_SECONDS, _STALL_SHARE * self.state.policy.heartbeat_timeout)
        paused = 0.0 if self._last_fed is None else now - self._last_fed - usual
        self._last_fed = now
        if paused > 0:
            self._carry_out(now, [Paused(paused)])
        self._carry_out(now, events)
        for link in closed:
            del self._links[id(link)]

    def _carry_out(self, now: float, events: Sequence[Event]) -> None:
        self.state, instructions, reason = step(now, self.state, *events)
        routine = all(map(is_routine, events))
        if (instructions or reason) and not routine:
            if self._journal is not None:
                self._journal.write(self.state)
            self._on_change()
        for line in filter(None, reason.split("\n")):
            _log.log(logging.DEBUG if routine else logging.INFO, "%s", line)
        for instruction in instructions:
            link = self._links[instruction.connection]
            if isinstance(instruction, Close):
                link.close()
            else:
                link.offer(instruction.message, sequence=instruction.sequence)


def resumed(now: float, state: State) -> State:
    """Returns the state with which another coordinator goes on.

    Times of the last coordinator's clock mean nothing on this one's: all deadlines begin again.
    Every task that was connected is disconnected until it comes back, which it does by itself.
    """
    tasks = {}
    for name, task in state.tasks.items():
        if task.active:
            task = replace(task, state="disconnected", reason="the coordinator was started again")
        tasks[name] = replace(
            task,
            connection=None,
            since=now,
            heard=now,
            hears=0.0,
            pace=replace(task.pace, moved=now),
            signal=None if task.signal is None else (task.signal[0], now),
        )
    under_way = state.reconfiguration
    return replace(
        state,
        term=state.term + 1,
        tasks=tasks,
        started=now,
        over_since=now,
        noticed=now,
        plan_after=now,
        resumed=now,
        shunned={server: (now, times) for server, (_, times) in state.shunned.items()},
        unlinked={},
        reconfiguration=None if under_way is None else replace(under_way, since=now),
    )
