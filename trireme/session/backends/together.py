"""The interface of what has several processes hold one model together."""

from __future__ import annotations

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from trireme.errors import ConfigurationError
from trireme.session.backends.base import Backend
from trireme.session.backends.processes import Processes
from trireme.session.loss import Loss
from trireme.session.metric_value import Metric
from trireme.session.model.building import Optimizers
from trireme.session.model.computation import Computation
from trireme.session.model.training_setup import TrainingSetup
from trireme.session.settings import Settings
from trireme.strategies import BACKENDS


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

        Args:
            settings: what the launch and the program have chosen.
            device: the device of this process.
            make_model: returns the model, on its device.
            make_optimizer: the optimizer, a function that builds it, or several of these.
            in_place: whether the program's own loop computes with the model, so that the module
                itself is split instead of a copy.
            given: the model of a session's program, or the function that builds it; None for a
                loop of the program's own.

        Raises:
            ConfigurationError: the model cannot be held so.
            TriremeError: the other processes did not join.
        """

    @abstractmethod
    def computations(
        self, setup: TrainingSetup, loss: Loss, metrics: Mapping[str, Metric]
    ) -> tuple[Computation, Computation]:
        """Returns what computes gradients, and what evaluates."""

    @abstractmethod
    def backend(
        self,
        setup: TrainingSetup,
        waiting: Callable[[str, Sequence[str], float], None],
        doing: Callable[[], tuple[str, str]],
    ) -> Backend:
        """Returns the backend of a process of a job without servers.

        Args:
            setup: what it trains.
            waiting: is told why, for which tasks and for how many seconds this process waits.
            doing: returns what this process does, and since when, for the other processes.
        """

    def processes(self, setup: TrainingSetup) -> Processes:
        """Returns how rank 0 of a worker represents the others to the servers."""
        raise ConfigurationError(f"the strategy {setup.settings.strategy.name} has no servers")

    def other_process(self, setup: TrainingSetup) -> Backend:
        """Returns the backend of any other process of a worker of a job with servers."""
        raise ConfigurationError(f"the strategy {setup.settings.strategy.name} has no servers")


def together(settings: Settings) -> Together:
    """Returns what has the processes of this job, or of this worker, hold one model.

    Raises:
        ConfigurationError: it is not installed.
    """
    made: Together = pkgutil.resolve_name(BACKENDS.load(settings.backend).open)()
    return made
