"""A service in a thread of this process, and clients for it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

from tests.conformance import PATIENCE
from trireme.errors import WireError
from trireme.wire.clock import Clock
from trireme.wire.connection import Connection, Incoming
from trireme.wire.handshake import Identity, authenticate
from trireme.wire.message import Catalog, Message
from trireme.wire.refusals import ServiceLimits
from trireme.wire.service import Link, Service
from trireme.wire.transport import Listener, Stream, connect, listen

JOB, SECRET = "job-1", b"the secret of job-1"


class Echo(Message, frozen=True, array_like=True):
    """Asks to be sent back."""

    kind: ClassVar[int] = 210
    text: str = ""


CATALOG = Catalog([Echo])


class EchoHandler:
    """Sends back what comes and records everything, for other threads to look at."""

    messages: tuple[type[Message], ...] = (Echo,)

    def __init__(self) -> None:
        self.links: queue.Queue[Link] = queue.Queue()
        self.closings: queue.Queue[tuple[Link, WireError | None]] = queue.Queue()
        self.ticks: list[float] = []

    def authenticated(self, link: Link) -> None:
        self.links.put(link)

    def received(self, link: Link, incoming: Incoming) -> None:
        link.offer(incoming.message, incoming.payload, sequence=incoming.sequence)

    def closed(self, link: Link, error: WireError | None) -> None:
        self.closings.put((link, error))

    def tick(self, now: float) -> None:
        self.ticks.append(now)


class Running:
    """A service that runs."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.service.run()
        except BaseException as error:
            self.failure = error

    def join(self) -> None:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "the service does not end"

    def turn(self) -> None:
        """Returns after the loop has gone round, so that what was due is done."""
        for _ in range(2):
            turned = threading.Event()
            self.service.call_soon(turned.set)
            assert turned.wait(PATIENCE), "the service does not turn"

    def stranger(self) -> Stream:
        return connect(self.service.address, timeout=PATIENCE)

    def client(self, task: str = "worker:0") -> Connection:
        connection = Connection(self.stranger(), CATALOG)
        authenticate(connection, Identity(JOB, task), SECRET, server="ps:0", timeout=PATIENCE)
        return connection


@contextmanager
def running(
    *handlers: Any,
    address: str = "tcp://127.0.0.1:0",
    listener: Listener | None = None,
    clock: Clock | None = None,
    limits: ServiceLimits | None = None,
    **options: Any,
) -> Iterator[Running]:
    """Runs a service with these handlers; stops it after the block and reraises its failure."""
    service = Service(
        listener or listen(address),
        handlers,
        job=JOB,
        secret=SECRET,
        clock=clock,
        limits=limits or ServiceLimits(),
        **options,
    )
    run = Running(service)
    try:
        yield run
    finally:
        service.stop()
        run.join()
    if run.failure is not None:
        raise run.failure


def ask(connection: Connection, text: str, payload: bytes = b"") -> None:
    """Has a message echoed."""
    connection.send(Echo(text), [payload], sequence=len(text), timeout=PATIENCE)
    incoming = connection.receive(timeout=PATIENCE)
    assert incoming.message == Echo(text)
    assert incoming.sequence == len(text)
    assert b"".join(incoming.payload) == payload


def nothing_more(handler: EchoHandler) -> bool:
    """Whether the handler was told of no closing that a test has not looked at."""
    with suppress(queue.Empty):
        handler.closings.get_nowait()
        return False
    return True
