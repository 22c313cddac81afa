"""The thread of a connection to another server ends whenever the connection is given up."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

from trireme.cluster.view import ServerEntry
from trireme.ps.replication.replicas import Peer
from trireme.ps.server.peer_links import _PeerLink, _Wanted
from trireme.wire.handshake import Identity


def test_a_close_while_it_connects_ends_the_thread() -> None:
    made: list[_PeerLink] = []
    ready, connection = threading.Event(), Mock()

    def connect(local: bool) -> Any:
        ready.wait(10.0)
        made[0].close()
        return connection

    service = SimpleNamespace(call_soon=lambda call: None)
    made.append(
        _PeerLink(
            _Wanted(Peer(7, True, 3), ServerEntry(3, 1, "tcp://h:1")),
            service,  # type: ignore[arg-type]
            Identity("job", "ps:0"),
            connect,
            lambda link, peer: None,
            local=False,
        )
    )
    thread = next(each for each in threading.enumerate() if each.name == "to-ps-3-of-shard-7")
    ready.set()
    thread.join(10.0)
    assert not thread.is_alive()
    connection.close.assert_called_once_with()
