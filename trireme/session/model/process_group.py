"""The interface of the processes that hold one model together, as a session sees them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch

from trireme.errors import TriremeError
from trireme.mesh import Mesh


class ProcessGroup(ABC):
    """All processes of a job without servers, or of one worker, which call its methods together."""

    mesh: Mesh
    rank: int  # of this process, from 0; rank 0 is the chief

    @property
    def size(self) -> int:
        return self.mesh.size

    @property
    def replica(self) -> int:
        """The index of this process's batch among those that are computed at a time."""
        return self.mesh.replica(self.rank)

    @property
    def is_chief(self) -> bool:
        return self.rank == 0

    @property
    @abstractmethod
    def reports_metrics(self) -> bool:
        """Whether this process reports loss and metrics: one process does for each replica."""

    @property
    def shows_progress(self) -> bool:
        """Whether this process displays progress that no other process displays."""
        return self.is_chief or (self.mesh.parts == self.mesh.tp == 1)

    @property
    def reporting_ranks(self) -> list[int]:
        """The rank that reports for each replica, in the order of the replicas."""
        replicas = [self.mesh.replica(rank) for rank in range(self.size)]
        return [replicas.index(replica) for replica in range(self.mesh.replicas)]

    @abstractmethod
    def total(self, numbers: Sequence[float]) -> Callable[[], list[float]]:
        """Starts an all-reduce of numbers; returns a function that waits for the sums."""

    @abstractmethod
    def count(self, examples: float) -> Callable[[], float]:
        """Starts the sum of all processes' examples of a step, and of the votes beside it."""

    @abstractmethod
    def vote(self) -> Callable[[], list[float]]:
        """Returns a function that waits for the sums of the votes, as of `count` or as of now."""

    @abstractmethod
    def broadcast(self, data: bytes | None, source: int = 0) -> bytes:
        """Returns the bytes of one process in every process."""

    def exchange(self, data: bytes, sources: Sequence[int] | None = None) -> list[bytes]:
        """Returns the bytes of the `sources`, all processes by default, in the order of ranks."""
        ranks = range(self.size) if sources is None else sources
        return [self.broadcast(data if rank == self.rank else None, rank) for rank in ranks]

    @abstractmethod
    def united(self, mine: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the mean over the replicas of the tensors of all parts of the layers together."""

    @abstractmethod
    def why_broken(self, error: BaseException) -> TriremeError | None:
        """Returns why a call has failed, if this process knows more than the error says."""

    @abstractmethod
    def close(self, *, together: bool) -> None: ...
