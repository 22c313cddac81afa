"""The interface of what has several processes hold one model together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from trireme.errors import ConfigurationError
from trireme.ps.messages import Leased, LeaseFields, Span
from trireme.ps.results import PushResult
from trireme.session.backends.base import Backend
from trireme.session.loss import Loss
from trireme.session.metric_value import Metric
from trireme.session.model.building import Optimizers
from trireme.session.model.computation import Computation
from trireme.session.model.process_group import ProcessGroup
from trireme.session.model.training_setup import TrainingSetup
from trireme.session.settings import Settings
from trireme.strategies import BACKENDS


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
        self, ask: Callable[..., Leased], dataset: str, batch: int, count: int, fields: LeaseFields
    ) -> Leased:
        """Leases, as rank 0, the next examples of all replicas, and returns those of its own."""


class Together(ABC):
    """Has several processes hold one model: those of a job without servers, or of one worker."""

    @abstractmethod
    def assemble(
        self,
        settings: Settings,
        device: torch.device,
        make_model: Callable[[], nn.Module],
        make_optimizer: Optimizers,
        *,
        in_place: bool,
        given: nn.Module | Callable[[], nn.Module] | None,
    ) -> TrainingSetup:
        """Joins the other processes, and assembles this process's part of the model.

        With `in_place` the module itself is split, else a copy of the model that is `given`.
        """

    @abstractmethod
    def computations(
        self, setup: TrainingSetup, loss: Loss, metrics: Mapping[str, Metric]
    ) -> tuple[Computation, Computation]: ...

    @abstractmethod
    def backend(
        self,
        setup: TrainingSetup,
        waiting: Callable[[str, Sequence[str], float], None],
        doing: Callable[[], tuple[str, str]],
    ) -> Backend:
        """Returns the backend of a process of a job without servers; see `Liveness.doing`."""

    def processes(self, setup: TrainingSetup) -> Processes:
        """Returns how rank 0 of a worker represents the others to the servers."""
        raise ConfigurationError(f"the strategy {setup.settings.strategy.name} has no servers")

    def other_process(self, setup: TrainingSetup) -> Backend:
        """Returns the backend of any other process of a worker of a job with servers."""
        raise ConfigurationError(f"the strategy {setup.settings.strategy.name} has no servers")


def together(settings: Settings) -> Together:
    """Returns what has the processes of this job, or of this worker, hold one model."""
    made: Together = BACKENDS.imported(settings.backend, "open")()
    return made
