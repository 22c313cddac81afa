"""Connections to parameter servers, of workers and of other servers."""

from __future__ import annotations

from trireme.certificates import Certificates
from trireme.cluster.view import ServerEntry
from trireme.errors import AuthenticationError, WireError
from trireme.ps.replication.messages import PS_CATALOG
from trireme.wire.connection import Connection
from trireme.wire.handshake import HANDSHAKE_TIMEOUT, Identity, authenticate
from trireme.wire.message import Catalog
from trireme.wire.transport import Stream, connect, local_memory


def dial(
    server: ServerEntry,
    identity: Identity,
    secret: bytes,
    *,
    local: bool,
    seconds: float,
    certificates: Certificates | None = None,
    catalog: Catalog = PS_CATALOG,
) -> Connection:
    """Returns an authenticated connection to a server.

    If `local`, it goes through a unix socket where the server listens at one on this host. Another
    process of this host may have taken its name, which is an `AuthenticationError`.
    """
    stream: Stream | None = None
    memory = local_memory() if local else None
    if memory is not None:
        try:
            stream = connect(memory.address(server.address), timeout=1.0)
        except AuthenticationError:
            raise
        except WireError:
            pass  # it is on another host
    if stream is None:
        patience = min(5.0, seconds)
        stream = connect(server.address, timeout=patience, certificates=certificates)
    connection = Connection(stream, catalog)
    connection.peer = f"ps:{server.index} at {server.address}"
    try:
        patience = min(HANDSHAKE_TIMEOUT, seconds)
        authenticate(connection, identity, secret, server=f"ps:{server.index}", timeout=patience)
    except BaseException:
        connection.close()
        raise
    return connection
