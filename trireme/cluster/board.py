"""What a task knows of its job: written by the member's thread, read and awaited by the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral, Real

from trireme.cluster.messages import MAX_LINE, JobOver, Leave, StatusValue, WaitingFor
from trireme.cluster.view import View

__all__ = ["Board", "Subscriber"]

Subscriber = Callable[[View | JobOver], object]
"""What is called with every new view and, at last, with the end of the job."""


class Board:
    """Values under one lock, with waits for their changes. Any thread may use it.

    Attributes are read freely, and set inside `change` only.

    Attributes:
        incarnation: the task's; 0 before it has joined.
        epoch: which start of the job it has joined; "" before that.
        term: the coordinator's, likewise; 0 before that.
        view: the newest; None before the first.
        over: how the job ended, as far as this task knows; None before that.
        told: whether `over` is the coordinator's word, and not this side's conclusion.
        stop: why the job was asked to stop; None if it was not.
        waiting: for whom the job waits, and until when (`time.monotonic`); None if for nobody.
        failure: why this task could not join; None if it could, or is still trying.
        leaving: what the task has to say before it leaves; None while it stays.
        left: whether the coordinator has heard that.
        closing: whether the thread shall end.
        ended: whether it has.
        pulse: asked at each heartbeat for what it says besides, in the thread that sends it.
    """

    def __init__(self) -> None:
        self.incarnation = 0
        self.epoch = ""
        self.term = 0
        self.view: View | None = None
        self.over: JobOver | None = None
        self.told = False
        self.stop: str | None = None
        self.waiting: tuple[WaitingFor, float] | None = None
        self.failure: Exception | None = None
        self.leaving: Leave | None = None
        self.left = False
        self.closing = False
        self.ended = False
        self._changed = threading.Condition()
        self._status: dict[str, StatusValue] = {}
        self.pulse: Callable[[], Mapping[str, StatusValue]] = dict
        self._subscribers: list[Subscriber] = []

    @contextmanager
    def change(self) -> Iterator[None]:
        """Holds the lock while attributes are set, then wakes those who wait."""
        with self._changed:
            yield
            self._changed.notify_all()

    def await_change(self, settled: Callable[[], bool], deadline: float) -> bool:
        """Blocks until something is so, at most until `deadline` (`time.monotonic`).

        Returns:
            Whether it is so.
        """
        with self._changed:
            return self._changed.wait_for(settled, max(0.0, deadline - time.monotonic()))

    def publish(self, news: View | JobOver) -> None:
        """Hands news to every subscriber, in this thread."""
        with self._changed:
            subscribers = tuple(self._subscribers)
        for subscriber in subscribers:
            subscriber(news)

    def subscribe(self, subscriber: Subscriber) -> None:
        """Adds one to call with news from now on."""
        with self._changed:
            self._subscribers.append(subscriber)

    def report(self, status: Mapping[str, StatusValue]) -> None:
        """Merges into what the next heartbeats say.

        Raises:
            TypeError: a value is neither a number nor a string.
        """
        plain = {name: _plain(name, value) for name, value in status.items()}
        with self._changed:
            self._status.update(plain)

    def status(self) -> dict[str, StatusValue]:
        """Returns a copy of what the next heartbeat says."""
        with self._changed:
            return {**self._status, **self.pulse()}


def _plain(name: str, value: object) -> StatusValue:
    """Returns a value as the wire has it: numpy's numbers, for one, are not."""
    if type(value) is float or type(value) is int:
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, str):
        return str(value)[:MAX_LINE]
    raise TypeError(f"the status {name!r} is a {type(value).__name__}: report numbers and strings")
