"""Memory that a worker lends to a server of its host."""

from __future__ import annotations

from dataclasses import dataclass

from trireme.ps.messages import LendMemory, MemoryLent
from trireme.wire.connection import Connection
from trireme.wire.shared_memory import Lending, SharedMemory
from trireme.wire.transports.shm import ShmStream

__all__ = ["SharedBuffer"]


@dataclass(frozen=True)
class SharedBuffer:
    """The memory that is lent: gradients to read, and values to write.

    Attributes:
        memory: contains both.
        outbound: the gradients.
        inbound: the values.
    """

    memory: SharedMemory
    outbound: tuple[memoryview, ...]
    inbound: tuple[memoryview, ...]

    def offer(self, connection: Connection, stream: ShmStream, *, timeout: float) -> bool:
        """Lends the memory to the server: what lies there need not cross the socket.

        Args:
            connection: between two frames, with no request under way.
            stream: the connection's.
            timeout: in seconds, to send the offer and again to hear the answer.

        Returns:
            Whether the server uses it; if not, everything crosses the socket.

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
