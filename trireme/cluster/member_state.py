"""What a task knows of its job. The member's thread writes it, other threads read it and wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral, Real

from trireme.cluster.messages import (
    MAX_LINE,
    Dismissed,
    Interrupted,
    JobOver,
    Leave,
    Signalled,
    StatusValue,
    WaitingFor,
)
from trireme.cluster.view import View
from trireme.wire.message import Message

News = View | Dismissed | JobOver
"""A new view; that this task is to leave; how the job ended."""

Subscriber = Callable[[News], object]
"""A function that is called with every new view, with the task's dismissal if it is dismissed, and,
at last, with the end of the job."""


class MemberState:
    """Values under one lock, with waits for their changes. Any thread may use it.

    Attributes may be read at any time. They are set only inside `change`.

    Attributes:
        incarnation: the number of this start of the task; 0 before it has joined. It grows if the
            coordinator has given this process up, because it sent nothing for too long, and then
            admits it again.
        epoch: the epoch of the job that it has joined; "" before that. Each start of a job has
            another epoch, even with the same id, secret and addresses.
        term: the coordinator's term; 0 before the task has joined.
        view: the newest view; None before the first.
        dismissed: why this task is to leave; None while the job needs it.
        signalled: the signal that asks this process to end; None for none.
        interrupted: that the job stops before its end, and why; None while it does not.
        over: how the job ended, as far as this task knows, or why this task is not a member any
            more; None while it is.
        confirmed: whether `over` came from the coordinator; False if this task concluded it.
        waiting: the tasks that the job waits for, and until when (`time.monotonic`); None if it
            waits for none.
        failure: why this task could not join; None if it could, or is still trying.
        leaving: the message with which the task leaves; None while it stays.
        left: whether the coordinator has received that message.
        reports: what a server has to say of its shards, or a chief of the last step: sent when it
            changes, and with each heartbeat, as long as it holds.
        closing: whether the member's thread is to end.
        ended: whether the thread has ended.
        able: called before this task joins again, in the member's thread: whether it can take part.
        extra_status: called at each heartbeat, in the thread that sends it, for a further status.
            So a heartbeat can report on another thread, even if that thread hangs.
    """

    def __init__(self) -> None:
        self.incarnation = 0
        self.epoch = ""
        self.term = 0
        self.view: View | None = None
        self.dismissed: Dismissed | None = None
        self.signalled: Signalled | None = None
        self.interrupted: Interrupted | None = None
        self.over: JobOver | None = None
        self.confirmed = False
        self.waiting: tuple[WaitingFor, float] | None = None
        self.failure: Exception | None = None
        self.leaving: Leave | None = None
        self.left = False
        self.reports: tuple[Message, ...] = ()
        self.closing = False
        self.ended = False
        self._changed = threading.Condition()
        self._status: dict[str, StatusValue] = {}
        self.able: Callable[[], bool] = lambda: True
        self.extra_status: Callable[[], Mapping[str, StatusValue]] = dict
        self._subscribers: list[Subscriber] = []

    @contextmanager
    def change(self) -> Iterator[None]:
        """Holds the lock while attributes are set, then wakes the threads that wait."""
        with self._changed:
            yield
            self._changed.notify_all()

    def wait_until(self, condition: Callable[[], bool], deadline: float) -> bool:
        """Blocks until a condition holds, at most until `deadline` (`time.monotonic`).

        Returns:
            Whether the condition holds.
        """
        with self._changed:
            return self._changed.wait_for(condition, max(0.0, deadline - time.monotonic()))

    def publish(self, news: News) -> None:
        """Calls every subscriber, in this thread."""
        with self._changed:
            subscribers = tuple(self._subscribers)
        for subscriber in subscribers:
            subscriber(news)

    def subscribe(self, subscriber: Subscriber) -> None:
        """Registers a function to be called with the news.

        These are every new `View`, `Dismissed` if the task is to leave, and at last the `JobOver`.
        The function is called in the member's thread and must not block. Subscribe before joining
        to miss no view.
        """
        with self._changed:
            self._subscribers.append(subscriber)

    def report(self, status: Mapping[str, StatusValue]) -> None:
        """Sets values of the status that the next heartbeats report. Does not block.

        Raises:
            TypeError: a value is neither a number nor a string.
        """
        plain = {name: _plain(name, value) for name, value in status.items()}
        with self._changed:
            self._status.update(plain)

    def status(self) -> dict[str, StatusValue]:
        """Returns the status for the next heartbeat."""
        with self._changed:
            return {**self._status, **self.extra_status()}


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
