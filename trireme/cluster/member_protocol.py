"""What a task knows of its job, and what it and its coordinator say to each other. Without I/O.

Events come in as method calls, each with the time it happens at; messages to send come out.
The thread of a member and the simulator drive the same object.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Integral, Real

from trireme.certificates import Certificates
from trireme.cluster.messages import (
    MAX_LINE,
    Dismissed,
    Heartbeat,
    HeartbeatHeard,
    Interrupted,
    JobOver,
    JobOverHeard,
    Join,
    Joined,
    Leave,
    Left,
    RequestRefused,
    Signalled,
    StatusValue,
    ViewChanged,
    WaitingFor,
)
from trireme.cluster.spec import task_name
from trireme.cluster.view import View
from trireme.errors import (
    ClusterError,
    ConfigurationError,
    ConnectionRefused,
    ConnectTimeout,
    FrameError,
    TaskClaimedError,
    WireTimeout,
)
from trireme.wire.message import Message

News = View | Dismissed | JobOver  # a new view; that this task is to leave; how the job ended


def _plain(name: str, value: object) -> StatusValue:
    """Converts a value to a type that can be sent: numpy's numbers cannot."""
    if type(value) is float or type(value) is int:
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, str):
        return str(value)[:MAX_LINE]
    raise TypeError(f"the status {name!r} is a {type(value).__name__}: report numbers and strings")


ATTEMPT_SECONDS = 5.0
"""How long an attempt to connect may take, each answer of the handshake, and the one to `Join`."""

_RETRY_SECONDS = (0.0, 0.05, 0.1, 0.2, 0.5)  # before each attempt; the last one repeats
_CLOSE_SECONDS = 1.0  # for the coordinator to close, once the job is over


@dataclass(frozen=True, slots=True)
class MemberConfig:
    """Which task a member is, and where its coordinator listens. Times are in seconds."""

    coordinator: str
    job: str
    role: str
    index: int
    secret: bytes = field(repr=False)
    address: str = ""
    host: str = ""
    connect_timeout: float = 60.0
    notice_interval: float = 5.0
    certificates: Certificates | None = None

    @property
    def name(self) -> str:
        return task_name(self.role, self.index)


class MemberProtocol:
    """One task's side of its membership. Any thread reads it; `change` holds its lock."""

    def __init__(
        self, config: MemberConfig, now: float, host: str, pid: int, start: int = 0
    ) -> None:
        self.incarnation = 0  # of this task; grows if it was given up, and is admitted again
        self.epoch = ""  # of the job: each start of one has another
        self.term = 0  # the coordinator's
        self.view: View | None = None  # the newest
        self.dismissed: Dismissed | None = None  # set when this task is to leave
        self.signalled: Signalled | None = None  # by a signal that asks this process to end
        self.interrupted: Interrupted | None = None  # set when the job stops before its end
        self.over: JobOver | None = None  # how the job ended, or why this task is no member
        self.confirmed = False  # whether `over` came from the coordinator
        self.waiting: tuple[WaitingFor, float] | None = None  # until when (`time.monotonic`)
        self.failure: Exception | None = None  # why this task could not join
        self.leaving: Leave | None = None  # the message with which it leaves
        self.left = False  # whether the coordinator has received that
        # What a server reports of its shards, or a chief of the last step: sent when it changes,
        # and with each heartbeat, as long as it holds.
        self.reports: tuple[Message, ...] = ()
        self.closing = self.ended = False  # the member's thread is to end; has ended
        self.able: Callable[[], bool] = lambda: True  # to take part: asked before it joins again
        # Called at each heartbeat, in the thread that sends it: it can report on another thread,
        # even if that thread hangs.
        self.extra_status: Callable[[], Mapping[str, StatusValue]] = dict
        self._changed = threading.Condition()
        self._status: dict[str, StatusValue] = {}
        self._subscribers: list[Callable[[News], object]] = []
        # Since when there is no connection that has joined; None while there is one.
        self.away_since: float | None = now
        self._config = config
        self._host = host
        self._pid = pid
        self._start = start
        self._attempts = 0
        self._interval = 1.0
        self._answer_timeout = ATTEMPT_SECONDS
        self._patience = config.connect_timeout
        # The current connection:
        self._joined = False
        self._leave_sent = self._signal_sent = False
        self._reported: tuple[Message, ...] = ()  # over this connection
        self._next_heartbeat, self._asked = 0.0, False
        self._unanswered_since: float | None = None  # since when an answer is due
        self._heard = 0.0  # the coordinator's time of its last answer to a heartbeat
        self._close_deadline: float | None = None  # until when the coordinator may close

    @contextmanager
    def change(self) -> Iterator[None]:
        """Holds the lock while attributes are set, then wakes the threads that wait."""
        with self._changed:
            yield
            self._changed.notify_all()

    def publish(self, news: News) -> None:
        for subscriber in self._subscribers:
            subscriber(news)

    def subscribe(self, subscriber: Callable[[News], object]) -> None:
        """Has a function called with all news, in the member's thread; before joining."""
        self._subscribers.append(subscriber)

    def report(self, status: Mapping[str, StatusValue]) -> None:
        """Sets values of the status that the next heartbeats report: numbers and strings."""
        plain = {name: _plain(name, value) for name, value in status.items()}
        with self._changed:
            self._status.update(plain)

    def status(self) -> dict[str, StatusValue]:
        """Returns the status for the next heartbeat."""
        with self._changed:
            return {**self._status, **self.extra_status()}

    @property
    def finished(self) -> bool:
        """Whether there is nothing more to say: the job is over, or the task has left."""
        return self.closing or self.left or self.over is not None

    # -- events -----------------------------------------------------------------------------------

    def connected(self, now: float) -> Join:
        """There is a new connection; returns the message that joins."""
        self._joined = self._leave_sent = self._signal_sent = False
        self._reported = ()
        self._heard = 0.0
        self._close_deadline = None
        self._unanswered_since = now
        config = self._config
        where = self._host, self._pid, config.address
        return Join(config.role, config.index, self.incarnation, *where, self.term, self._start)

    def heard(self, now: float, message: Message) -> Message | None:
        """The coordinator has sent a message; returns the answer, if it wants one."""
        due = self._unanswered_since is not None
        if self._joined:
            self._unanswered_since = None
        with self.change():
            if isinstance(message, WaitingFor):
                self.waiting = (message, now + message.deadline_seconds)
            elif isinstance(message, Interrupted):
                self.interrupted = message
            elif isinstance(message, Left):
                self.left = True
        if isinstance(message, Joined):
            self._take_joined(now, message)
        elif isinstance(message, RequestRefused):
            self._take_refused(now, message)
        elif isinstance(message, ViewChanged):
            if self.view is None or message.view.number > self.view.number:
                with self.change():
                    self.view, self.waiting = message.view, None
                self.publish(message.view)
        elif isinstance(message, Dismissed):
            if self.dismissed is None:
                with self.change():
                    self.dismissed = message
                self.publish(message)
        elif isinstance(message, JobOver):
            self._end(message, confirmed=True)
            self._close_deadline = now + _CLOSE_SECONDS
            return JobOverHeard()
        elif isinstance(message, HeartbeatHeard):
            self._heard = message.time
            if not due:  # the coordinator asks whether this task hears it
                self._asked, self._next_heartbeat = True, now
        elif not isinstance(message, WaitingFor | Interrupted | Left):
            raise FrameError(f"the coordinator sent {type(message).__name__} to a member")
        return None

    def tick(self, now: float) -> list[Message]:
        """Time has passed; returns the messages that are due on this connection."""
        since = self._unanswered_since
        if since is not None and now >= since + self._answer_timeout:
            raise WireTimeout(
                f"the coordinator at {self._config.coordinator} sent nothing for "
                f"{now - since:.0f} s: its process hangs, or the network is cut"
            )
        messages: list[Message] = []
        if not self._joined or self._close_deadline is not None:
            return messages
        beats = now >= self._next_heartbeat
        if beats or self.reports != self._reported:
            self._reported = self.reports
            messages += self._reported
        if self.signalled is not None and not self._signal_sent:
            self._signal_sent = True
            messages.append(self.signalled)
        if self.leaving is not None and not self._leave_sent:
            self._leave_sent = True
            messages.append(self.leaving)  # after the reports: nothing is heard of who left
        if beats:
            self._next_heartbeat = now + self._interval
            # Asked for, it is the proof that the reports wait for.
            at, self._asked = 0 if self._asked else len(messages), False
            messages.insert(at, Heartbeat(self.status(), self._heard))
            if since is None:
                self._unanswered_since = now
        return messages

    def broke(self, now: float, error: Exception) -> float | None:
        """The connection broke; returns the seconds until the next attempt, if there is one."""
        if self.away_since is None:
            self.away_since = now
            self._attempts = 0
        if now >= self.reconnect_deadline:
            where, absence = self._config.coordinator, f"{now - self.away_since:.0f} s: {error}"
            if self.incarnation:
                reason = f"nothing was heard of the coordinator at {where} for {absence}"
                self._end(JobOver("failed", "coordinator:0", reason), confirmed=False)
                return None
            self.fail(
                ConnectTimeout(
                    f"{self._config.name} could not reach the coordinator at {where} within "
                    f"{absence}. Check that the coordinator runs (ps:0 hosts it in a job started "
                    "by hand), the address, and the firewall"
                )
            )
            return None
        pause = _RETRY_SECONDS[min(self._attempts, len(_RETRY_SECONDS) - 1)]
        self._attempts += 1
        return min(pause, self.reconnect_deadline - now)

    def fail(self, error: Exception) -> None:
        """Ends the membership for a local reason. A thread that waits in `join` gets the error."""
        if not self.incarnation:
            with self.change():
                self.failure = error
        reason = f"the membership of {self._config.name} failed: {error}"
        self._end(JobOver("failed", self._config.name, reason), confirmed=False)

    # -- when -------------------------------------------------------------------------------------

    @property
    def due(self) -> float:
        """When a `tick` matters."""
        if self._close_deadline is not None:
            return self._close_deadline
        heartbeat = self._next_heartbeat if self._joined else math.inf
        since = math.inf if self._unanswered_since is None else self._unanswered_since
        return min(heartbeat, since + self._answer_timeout)

    @property
    def reconnect_deadline(self) -> float:
        """Until when to try to connect again; never, while a connection has joined."""
        return math.inf if self.away_since is None else self.away_since + self._patience

    def served(self, now: float) -> bool:
        """Returns whether this connection is to be closed. Who has left stays until the end."""
        return self.closing or (self._close_deadline is not None and now >= self._close_deadline)

    # -- inside -----------------------------------------------------------------------------------

    def _take_joined(self, now: float, message: Joined) -> None:
        self._joined = True
        self.away_since = self._unanswered_since = None
        self._interval = message.heartbeat_interval
        self._answer_timeout = message.heartbeat_timeout
        self._patience = message.rejoin_timeout
        self._next_heartbeat = now + self._interval
        with self.change():
            self.epoch, self.term = message.epoch, message.term
            self.incarnation = message.incarnation

    def _take_refused(self, now: float, message: RequestRefused) -> None:
        if message.code == "deposed":
            raise ConnectionRefused(message.reason)
        kinds = {"outside": ConfigurationError, "unknown": ClusterError, "dismissed": ClusterError}
        self.fail(kinds.get(message.code, TaskClaimedError)(message.reason))
        self._close_deadline = now

    def _end(self, over: JobOver, *, confirmed: bool) -> None:
        if self.over is not None:
            return
        with self.change():
            self.over, self.confirmed = over, confirmed
        self.publish(over)
