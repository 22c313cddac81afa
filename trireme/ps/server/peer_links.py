"""The connections that a server makes to other servers, and makes again when they are lost.

Each has a thread of its own, which connects; the service's loop serves it.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from trireme.certificates import Certificates
from trireme.cluster.view import ServerEntry, View
from trireme.errors import AuthenticationError, ConfigurationError, StaleEpochError, WireError
from trireme.ps.dialing import dial
from trireme.ps.replication.replicas import Peer
from trireme.wire.connection import Connection
from trireme.wire.handshake import HANDSHAKE_TIMEOUT, Identity
from trireme.wire.service import Link, Service

_log = logging.getLogger(__name__)

_RETRY_SECONDS = 0.1
_LOCAL_ATTEMPTS = 20  # by then the name belongs to another process, and TCP is tried
_SILENCE = 10.0  # seconds between two warnings about the same server


class PeerLinks:
    """All connections that one server makes to others.

    Args:
        connected: called with each new connection, in the service's thread.
        local: whether servers of one host connect through a unix socket, which takes less
            processor time than TCP: a push and pull of 318 KB with two copies takes 0.8 of it.
    """

    def __init__(
        self,
        service: Service,
        identity: Identity,
        secret: bytes,
        connected: Callable[[Link, Peer], object],
        certificates: Certificates | None = None,
        *,
        local: bool = False,
    ) -> None:
        self.service = service
        self.identity = identity
        self.connected = connected
        self.local = local
        self._secret, self._certificates = secret, certificates
        self._links: dict[tuple[Peer, ServerEntry], PeerLink] = {}

    def want(self, peers: Sequence[Peer], view: View, epoch: str) -> None:
        """Connects to these servers of a view, and to no others. In the service's thread."""
        self.identity = replace(self.identity, epoch=epoch)
        entries = {peer: view.server(peer.server) for peer in peers}
        wanted = {(peer, entry) for peer, entry in entries.items() if entry is not None}
        for gone in self._links.keys() - wanted:
            self._links.pop(gone).close()
        for peer, entry in wanted - self._links.keys():
            self._links[peer, entry] = PeerLink(self, peer, entry)

    def dial(self, server: ServerEntry, local: bool) -> Connection:
        return dial(
            server,
            self.identity,
            self._secret,
            local=local,
            seconds=HANDSHAKE_TIMEOUT,
            certificates=self._certificates,
        )

    def lost(self, link: Link) -> None:
        for each in self._links.values():
            each.lost(link)

    def close(self) -> None:
        for each in [*self._links.values()]:
            each.close()


class PeerLink:
    """One connection to another server, as long as it is wanted."""

    def __init__(self, links: PeerLinks, peer: Peer, server: ServerEntry) -> None:
        self._links, self._peer, self._server = links, peer, server
        self._link: Link | None = None
        self._lost = threading.Event()
        self._closed = threading.Event()
        name = f"to-ps-{peer.server}-of-shard-{peer.shard}"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def lost(self, link: Link) -> None:
        if link is self._link:
            self._link = None
            self._lost.set()

    def close(self) -> None:
        self._closed.set()
        self._lost.set()
        self._links.service.call_soon(self._drop)

    def _drop(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def _run(self) -> None:
        said, attempts = -math.inf, _LOCAL_ATTEMPTS if self._links.local else 0
        while not self._closed.is_set():
            try:
                connection = self._links.dial(self._server, attempts > 0)
            except (WireError, ConfigurationError) as error:
                if isinstance(error, StaleEpochError):
                    _log.warning("%s", error)
                    return  # this process has no other epoch
                attempts = 0 if isinstance(error, AuthenticationError) else attempts - 1
                # At the end of a job the other may be gone before this server hears that it is.
                if not self._closed.wait(_RETRY_SECONDS) and time.monotonic() > said + _SILENCE:
                    said, own = time.monotonic(), self._links.identity.task
                    _log.warning("%s cannot reach ps:%d: %s", own, self._server.index, error)
                continue
            self._lost.clear()
            if self._closed.is_set():  # it is set before `_lost`, which may just have been cleared
                connection.close()
                return
            self._links.service.call_soon(partial(self._adopt, connection))
            self._lost.wait()
            self._closed.wait(_RETRY_SECONDS)

    def _adopt(self, connection: Connection) -> None:
        if self._closed.is_set():
            connection.close()
            return
        own = self._links.identity
        peer = Identity(own.job, f"ps:{self._server.index}", epoch=own.epoch)
        connection.peer = connection.stream.peer
        self._link = self._links.service.adopt(connection, peer)
        self._links.connected(self._link, self._peer)
