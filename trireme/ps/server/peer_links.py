"""The connections that a server makes to other servers, and makes again when they are lost.

Each has a thread of its own, which connects and authenticates. The connection itself is served by
the service's loop.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import msgspec

from trireme.certificates import Certificates
from trireme.cluster.view import ServerEntry, View
from trireme.errors import ConfigurationError, StaleEpochError, WireError
from trireme.ps.replication.messages import PS_CATALOG
from trireme.ps.replication.replicas import Peer
from trireme.wire.connection import Connection
from trireme.wire.handshake import Identity, authenticate
from trireme.wire.service import Link, Service
from trireme.wire.transport import Stream, connect, local_memory

_log = logging.getLogger(__name__)

_RETRY_SECONDS = 0.1
_CONNECT_SECONDS = 5.0
_LOCAL_ATTEMPTS = 20  # by then the name belongs to another process, and TCP is tried
_SILENCE = 10.0  # seconds between two warnings about the same server


class _Wanted(msgspec.Struct, frozen=True):
    """A connection that should be there: what it is for, and where it leads."""

    peer: Peer
    server: ServerEntry


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
        self._service = service
        self._identity = identity
        self._secret = secret
        self._connected = connected
        self._certificates = certificates
        self._local = local
        self._links: dict[_Wanted, _PeerLink] = {}

    def want(self, peers: Sequence[Peer], view: View, epoch: str) -> None:
        """Connects to these servers of a view, and to no others. In the service's thread."""
        self._identity = replace(self._identity, epoch=epoch)
        entries = {peer: view.server(peer.server) for peer in peers}
        wanted = {_Wanted(peer, entry) for peer, entry in entries.items() if entry is not None}
        for gone in self._links.keys() - wanted:
            self._links.pop(gone).close()
        for new in wanted - self._links.keys():
            connecting = partial(
                _connect, new.server, self._identity, self._secret, self._certificates
            )
            self._links[new] = _PeerLink(
                new, self._service, self._identity, connecting, self._connected, local=self._local
            )

    def lost(self, link: Link) -> None:
        """Connects again, as a connection is lost. In the service's thread."""
        for each in self._links.values():
            each.lost(link)

    def close(self) -> None:
        """Ends all threads, without waiting for them."""
        for each in [*self._links.values()]:
            each.close()


class _PeerLink:
    """One connection to another server, as long as it is wanted."""

    def __init__(
        self,
        wanted: _Wanted,
        service: Service,
        identity: Identity,
        connect: Callable[[bool], Connection],
        connected: Callable[[Link, Peer], object],
        *,
        local: bool,
    ) -> None:
        self._wanted = wanted
        self._service = service
        self._identity = identity
        self._connect = connect
        self._connected = connected
        self._local_attempts = _LOCAL_ATTEMPTS if local else 0
        self._link: Link | None = None
        self._lost = threading.Event()
        self._closed = threading.Event()
        name = f"to-ps-{wanted.peer.server}-of-shard-{wanted.peer.shard}"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def lost(self, link: Link) -> None:
        """Connects again, if this was its connection."""
        if link is self._link:
            self._link = None
            self._lost.set()

    def close(self) -> None:
        """Closes the connection, and ends the thread."""
        self._closed.set()
        self._lost.set()
        self._service.call_soon(self._drop)

    def _drop(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def _run(self) -> None:
        said = -math.inf
        name = f"ps:{self._wanted.peer.server}"
        while not self._closed.is_set():
            try:
                connection = self._connect(self._local_attempts > 0)
            except (WireError, ConfigurationError) as error:
                if isinstance(error, StaleEpochError):
                    _log.warning("%s", error)
                    return  # this process has no other epoch
                self._local_attempts -= 1
                # At the end of a job the other may be gone before this server hears that it is.
                if not self._closed.wait(_RETRY_SECONDS) and time.monotonic() > said + _SILENCE:
                    said = time.monotonic()
                    _log.warning("%s cannot reach %s: %s", self._identity.task, name, error)
                continue
            self._lost.clear()
            if self._closed.is_set():  # it is set before `_lost`, which may just have been cleared
                connection.close()
                return
            self._service.call_soon(partial(self._adopt, connection, name))
            self._lost.wait()
            self._closed.wait(_RETRY_SECONDS)

    def _adopt(self, connection: Connection, name: str) -> None:
        """Serves a new connection. In the service's thread."""
        if self._closed.is_set():
            connection.close()
            return
        peer = Identity(self._identity.job, name, epoch=self._identity.epoch)
        self._link = self._service.adopt(connection, peer)
        self._connected(self._link, self._wanted.peer)


def _connect(
    server: ServerEntry,
    identity: Identity,
    secret: bytes,
    certificates: Certificates | None,
    local: bool,
) -> Connection:
    """Returns an authenticated connection to another server.

    If it is `local`, it goes through a unix socket where the server listens at one on this host.
    """
    stream: Stream | None = None
    memory = local_memory() if local else None
    if memory is not None:
        with suppress(WireError):  # it is on another host, or another user has that name
            stream = connect(memory.address(server.address), timeout=1.0)
    if stream is None:
        stream = connect(server.address, timeout=_CONNECT_SECONDS, certificates=certificates)
    return _introduced(stream, server, identity, secret)


def _introduced(
    stream: Stream, server: ServerEntry, identity: Identity, secret: bytes
) -> Connection:
    connection = Connection(stream, PS_CATALOG)
    try:
        authenticate(connection, identity, secret, server=f"ps:{server.index}")
    except BaseException:
        connection.close()
        raise
    return connection
