"""A question to a coordinator from a process that knows the job's secret and is no member."""

from __future__ import annotations

from trireme.cluster.messages import CLUSTER_CATALOG, ClusterStatus, StatusQuery
from trireme.errors import FrameError
from trireme.wire.connection import Connection
from trireme.wire.handshake import Identity, authenticate
from trireme.wire.message import Limits
from trireme.wire.transport import connect

__all__ = ["query_status"]

_OBSERVER = "observer:0"


def query_status(address: str, job: str, secret: bytes, *, timeout: float = 5.0) -> ClusterStatus:
    """Asks the coordinator for the job's status.

    Args:
        address: the coordinator's address, with its scheme.
        job: the job's id.
        secret: the job's secret.
        timeout: in seconds, for the connection and for each answer.

    Raises:
        WireError: no coordinator answers in time, or it is another job's.
    """
    stream = connect(address, timeout=timeout)
    with Connection(stream, CLUSTER_CATALOG, limits=Limits(payload=0)) as connection:
        identity = Identity(job, _OBSERVER)
        authenticate(connection, identity, secret, server="coordinator:0", timeout=timeout)
        connection.send(StatusQuery(), timeout=timeout)
        answer = connection.receive(timeout=timeout).message
    if not isinstance(answer, ClusterStatus):
        raise FrameError(f"{address} answered a question with {type(answer).__name__}")
    return answer
