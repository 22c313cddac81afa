"""The interface of the processes of one worker in a job with servers, which rank 0 represents."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from trireme.ps.messages import Leased, LeaseTerms, Span
from trireme.ps.results import PushResult
from trireme.session.model.process_group import ProcessGroup


class Processes(ABC):
    """What rank 0 of a worker of several processes does with the others, as they do with it."""

    group: ProcessGroup

    @abstractmethod
    def gather(self) -> None:
        """Sums the gradients of all processes in the flat vectors of rank 0."""

    @abstractmethod
    def unite(
        self, weight: float, examples: Sequence[Span], stop: str | None = None
    ) -> tuple[float, Sequence[Span], list[str]]:
        """Returns, in rank 0, the weight and examples of all replicas, and requests to stop."""

    @abstractmethod
    def spread(self, step: int, stop: bool, result: PushResult | None) -> None:
        """Gives the other processes, as rank 0, an answer of the servers, and the values."""

    @abstractmethod
    def deal(
        self, ask: Callable[..., Leased], dataset: str, batch: int, count: int, terms: LeaseTerms
    ) -> Leased:
        """Leases, as rank 0, the next examples of all replicas, and returns those of its own."""
