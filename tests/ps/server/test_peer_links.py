"""The thread of a connection to another server ends whenever the connection is given up."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

from trireme.cluster.view import ServerEntry, View
from trireme.ps.replication.replicas import Peer
from trireme.ps.server.peer_links import PeerLinks
from trireme.wire.handshake import Identity


def test_a_close_while_it_connects_ends_the_thread() -> None:
    ready, connection = threading.Event(), Mock()
    service: Any = SimpleNamespace(call_soon=lambda call: None)
    links = PeerLinks(service, Identity("job", "ps:0"), b"", lambda link, peer: None)

    def dial(server: ServerEntry, local: bool) -> Any:
        ready.wait(10.0)
        links.close()
        return connection

    links.dial = dial  # type: ignore[method-assign]
    links.want([Peer(7, True, 3)], View(1, (ServerEntry(3, 1, "tcp://h:1"),), ()), "")
    thread = next(each for each in threading.enumerate() if each.name == "to-ps-3-of-shard-7")
    ready.set()
    thread.join(10.0)
    assert not thread.is_alive()
    connection.close.assert_called_once_with()
