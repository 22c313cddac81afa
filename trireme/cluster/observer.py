"""What a process may ask the coordinator that knows the job's secret and is no member."""

from __future__ import annotations

from dataclasses import dataclass

from trireme.certificates import Certificates
from trireme.cluster.messages import (
    CLUSTER_CATALOG,
    ClusterStatus,
    Refused,
    Scale,
    Scaled,
    StatusQuery,
)
from trireme.cluster.spec import OBSERVER
from trireme.errors import ConfigurationError, FrameError
from trireme.wire.connection import Connection
from trireme.wire.handshake import Identity, authenticate
from trireme.wire.message import Limits, Message
from trireme.wire.transport import connect


@dataclass(frozen=True, slots=True)
class Observer:
    """Asks the coordinator of a job, over a new connection each time.

    Every method raises WireError if no coordinator answers in time, or it is another job's.

    Attributes:
        coordinator: the coordinator's address, with its scheme.
        job: the job's id.
        secret: the job's secret.
        certificates: an observer's, where the job uses TLS.
        timeout: in seconds, for the connection and for each answer.
    """

    coordinator: str
    job: str
    secret: bytes
    certificates: Certificates | None = None
    timeout: float = 5.0

    def query_status(self) -> ClusterStatus:
        """Returns the job's status."""
        answer = self._ask(StatusQuery())
        if not isinstance(answer, ClusterStatus):
            raise self._senseless(answer)
        return answer

    def scale(self, servers: int | None = None, workers: int | None = None) -> Scaled:
        """Asks for other numbers of tasks; None for as many as there are.

        Returns:
            What the job shall have now, and which tasks somebody has to start.

        Raises:
            ConfigurationError: the job cannot be scaled so. The message says why.
        """
        answer = self._ask(Scale(servers, workers))
        if isinstance(answer, Refused):
            raise ConfigurationError(f"the job is not scaled: {answer.reason}")
        if not isinstance(answer, Scaled):
            raise self._senseless(answer)
        return answer

    def _ask(self, request: Message) -> Message:
        stream = connect(self.coordinator, timeout=self.timeout, certificates=self.certificates)
        with Connection(stream, CLUSTER_CATALOG, limits=Limits(payload=0)) as connection:
            authenticate(
                connection,
                Identity(self.job, OBSERVER),
                self.secret,
                server="coordinator:0",
                timeout=self.timeout,
            )
            connection.send(request, sequence=1, timeout=self.timeout)
            return connection.receive(timeout=self.timeout).message

    def _senseless(self, answer: Message) -> FrameError:
        return FrameError(f"{self.coordinator} answered a question with {type(answer).__name__}")
