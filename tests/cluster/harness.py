"""A coordinator in a thread of this process, and peers that speak to it by hand."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Self, TypeVar

from trireme.cluster.coordinator import Coordinator
from trireme.cluster.member import Member
from trireme.cluster.member_protocol import MemberConfig
from trireme.cluster.messages import CLUSTER_CATALOG, JobOver, Join, Joined
from trireme.cluster.state import Policy
from trireme.cluster.view import View
from trireme.errors import WireError
from trireme.wire.connection import Connection, Incoming
from trireme.wire.handshake import Identity, authenticate
from trireme.wire.message import Message
from trireme.wire.refusals import ServiceLimits
from trireme.wire.service import Link, Service
from trireme.wire.transport import connect, listen

JOB = "job-1"
SECRET = b"a secret of thirty-two bytes .. "
PATIENCE = 20.0  # for what happens at once unless the machine is busy

FAST = Policy(
    workers=2,
    servers=0,
    join_timeout=60.0,
    heartbeat_interval=0.05,
    heartbeat_timeout=5.0,
    reconnect_grace=0.5,
    notice_interval=0.05,
)

_names = itertools.count(1)
M = TypeVar("M", bound=Message)


def new_address(scheme: str) -> str:
    """An address at which nobody listens."""
    if scheme == "memory":
        return f"memory://cluster-{next(_names)}"
    listener = listen("tcp://127.0.0.1:0")
    listener.close()
    return listener.address


class Onlooker:
    """A handler beside the coordinator, which knows every link by its task."""

    messages: tuple[type[Message], ...] = ()

    def __init__(self) -> None:
        self.links: dict[str, Link] = {}

    def authenticated(self, link: Link) -> None:
        self.links[link.identity.task] = link

    def received(self, link: Link, incoming: Incoming) -> None:
        raise AssertionError("it has no messages")

    def closed(self, link: Link, error: WireError | None) -> None:
        pass

    def tick(self, now: float) -> None:
        pass


class Host:
    """A service with a coordinator, running while the `with` block does."""

    def __init__(self, address: str, policy: Policy = FAST, **options: float | bool) -> None:
        self.policy = replace(policy, **options)  # type: ignore[arg-type]
        self.done = threading.Event()
        self.coordinator = Coordinator(self.policy, on_done=self.done.set)
        self.onlooker = Onlooker()
        self.service = Service(
            listen(address),
            [self.coordinator, self.onlooker],
            job=JOB,
            secret=SECRET,
            epoch=self.coordinator.state.epoch,
            limits=ServiceLimits(tick_seconds=0.01),
        )
        self.address = self.service.address
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self.service.run()
        except BaseException as error:
            self._failure = error

    def __enter__(self) -> Host:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self) -> None:
        self.service.stop()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        assert self._failure is None, self._failure

    def do(self, function: Callable[[], object]) -> None:
        """Has the service's thread call a function, and waits for it."""
        called = threading.Event()
        self.service.call_soon(lambda: (function(), called.set()))
        assert called.wait(PATIENCE)

    def cut(self, task: str) -> None:
        """Closes the connection of a task."""
        self.do(lambda: self.onlooker.links[task].close())

    @contextmanager
    def hanging(self, then: Callable[[], object] = lambda: None) -> Iterator[None]:
        """Blocks the service's thread, which then calls a function before it hears anybody."""
        hangs, release = threading.Event(), threading.Event()
        self.service.call_soon(lambda: (hangs.set(), release.wait(PATIENCE), then()))
        assert hangs.wait(PATIENCE)
        try:
            yield
        finally:
            release.set()

    def member(self, name: str, **options: object) -> Watched:
        return Watched(self.address, name, **options)


class Watched(Member):
    """A member that has subscribed to its own news."""

    def __init__(self, address: str, name: str, **options: object) -> None:
        role, _, index = name.partition(":")
        config = MemberConfig(
            coordinator=address,
            job=JOB,
            role=role,
            index=int(index),
            secret=SECRET,
            address="tcp://127.0.0.1:9" if role == "ps" else "",
            connect_timeout=PATIENCE,
        )
        super().__init__(replace(config, **options))  # type: ignore[arg-type]
        self._news: queue.Queue[View | JobOver] = queue.Queue()
        self.subscribe(self._news.put)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def next_view(self) -> View:
        news = self._news.get(timeout=PATIENCE)
        assert isinstance(news, View), news
        return news

    def end(self) -> JobOver:
        while not isinstance(news := self._news.get(timeout=PATIENCE), JobOver):
            pass
        return news


class ByHand:
    """A peer that says and hears single messages."""

    def __init__(self, address: str, task: str, incarnation: int = 0) -> None:
        stream = connect(address, timeout=PATIENCE)
        self.connection = Connection(stream, CLUSTER_CATALOG)
        authenticate(
            self.connection,
            Identity(JOB, task, incarnation),
            SECRET,
            server="coordinator:0",
            timeout=PATIENCE,
        )

    def __enter__(self) -> ByHand:
        return self

    def __exit__(self, *exception: object) -> None:
        self.connection.close()

    def say(self, message: Message, sequence: int = 0) -> None:
        self.connection.send(message, sequence=sequence, timeout=PATIENCE)

    def hear(self, wanted: type[M]) -> M:
        """Returns the next message of a type, passing over others."""
        while True:
            message = self.connection.receive(timeout=PATIENCE).message
            if isinstance(message, wanted):
                return message

    def join(self, name: str, incarnation: int = 0) -> int:
        role, _, index = name.partition(":")
        self.say(Join(role, int(index), incarnation, "by-hand", 1, ""))
        return self.hear(Joined).incarnation


class LogEvent(logging.Handler):
    """Waits until the cluster logs lines that hold all of some words, once or several times."""

    def __init__(self, *words: str, times: int = 1) -> None:
        super().__init__()
        self._words = words
        self._times = times
        self._seen = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if all(word in line for word in self._words):
            self._times -= 1
            if self._times == 0:
                self._seen.set()

    def __enter__(self) -> LogEvent:
        logger = logging.getLogger("trireme.cluster")
        self._level = logger.level
        logger.setLevel(logging.INFO)
        logger.addHandler(self)
        return self

    def __exit__(self, *exception: object) -> None:
        logger = logging.getLogger("trireme.cluster")
        logger.removeHandler(self)
        logger.setLevel(self._level)

    def wait(self) -> None:
        assert self._seen.wait(PATIENCE), f"nobody logged {self._words!r}"
