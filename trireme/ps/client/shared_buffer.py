"""Memory that a worker lends to whoever takes its pushes on this host."""

from __future__ import annotations

from dataclasses import dataclass

from trireme.ps.messages import LendMemory, MemoryLent
from trireme.wire.connection import Connection
from trireme.wire.shared_buffers import Lending
from trireme.wire.shared_memory import SharedMemory
from trireme.wire.transports.shm import ShmStream

__all__ = ["SharedBuffer"]


@dataclass(frozen=True)
class SharedBuffer:
    """What is lent: gradients to read, and values to write.

    Attributes:
        memory: in which both lie.
        outbound: the gradients.
        inbound: the values.
    """

    memory: SharedMemory
    outbound: tuple[memoryview, ...]
    inbound: tuple[memoryview, ...]

    def offer(self, connection: Connection, stream: ShmStream, *, timeout: float) -> bool:
        """Lends it to the other end of a connection: what lies there need not cross the socket.

        Args:
            connection: between two frames, with no request under way.
            stream: the connection's.
            timeout: in seconds, to send the offer and again to hear the answer.

        Returns:
            Whether the other end uses it; if not, everything crosses the socket.

        Raises:
            WireError: the connection failed, or there was no answer in time.
        """
        stream.pass_descriptor(self.memory.fileno())
        places = [
            tuple(self.memory.place_of(view) for view in views)
            for views in (self.outbound, self.inbound)
        ]
        connection.send(LendMemory(self.memory.nbytes, *places), timeout=timeout)
        answer = connection.receive(timeout=timeout).message
        accepted = isinstance(answer, MemoryLent) and answer.accepted
        if accepted:
            connection.lending = Lending.of_lender(self.outbound, self.inbound)
        return accepted
