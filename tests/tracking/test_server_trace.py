from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast
from unittest.mock import Mock

from trireme.cluster.view import ServerEntry, ShardEntry, View
from trireme.ps.client.lanes import ClientOptions
from trireme.ps.server.handler import ShardHandler
from trireme.tracking.server_trace import Note, ServerTraces, Trace, Tracer
from trireme.wire.connection import Incoming
from trireme.wire.service import Link, Service
from trireme.wire.transport import listen

OPTIONS = ClientOptions("job", b"secret", 0, 1)


@contextmanager
def server(handler: ShardHandler) -> Iterator[str]:
    """Serves the shards of a handler, and its trace; gives the address."""
    handlers = [handler, Tracer(handler)]
    service = Service(listen("tcp://127.0.0.1:0"), handlers, job="job", secret=b"secret")
    thread = threading.Thread(target=service.run, daemon=True)
    thread.start()
    try:
        yield service.address
    finally:
        service.stop()
        thread.join(10)


def test_a_server_notes_what_it_does_while_a_task_traces_it() -> None:
    handler = ShardHandler(1)
    with server(handler) as address:
        shards = (ShardEntry(0, 128, 1), ShardEntry(128, 256, 1))
        entries = ServerEntry(0, 1, "tcp://127.0.0.1:1"), ServerEntry(1, 1, address)
        view = View(1, entries, (), shards)
        traces, other = ServerTraces(OPTIONS, view), ServerTraces(OPTIONS, view)
        assert [*traces.ask("start")] == [1], "it has both shards, and is asked once"
        note = handler.note
        assert note is not None
        note("Push", 1.0, 2.0, "worker:0", 0)
        note("apply", 1.25, 1.5, "", 7)
        traces.close()
        offset, notes = other.ask("read")[1]
        assert notes == (Note("Push", 1.0, 2.0, "worker:0"), Note("apply", 1.25, 1.5, step=7))
        assert abs(time.monotonic() + offset - time.time()) < 1.0
        other.close()


def test_a_server_that_is_gone_is_left_out() -> None:
    with server(ShardHandler(0)) as address:
        traces = ServerTraces(OPTIONS, View(1, (ServerEntry(0, 1, address),), ()))
    assert not traces.ask("read")


def test_a_server_notes_nothing_once_its_tracers_have_left() -> None:
    handler = ShardHandler(0)
    tracer, links = Tracer(handler), [cast(Link, Mock()) for _ in range(2)]
    for link in links:
        tracer.received(link, Incoming(Trace("start"), 1, (), 0))
    tracer.closed(links[0], None)
    assert handler.note is not None
    tracer.closed(links[1], None)
    assert handler.note is None
