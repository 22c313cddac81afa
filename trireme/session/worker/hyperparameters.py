"""The hyper-parameters of a worker's optimizer, and the schedule by which they change."""

from __future__ import annotations

from copy import deepcopy
from importlib import import_module
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trireme.errors import ConfigurationError
from trireme.ps.messages import GroupSpec
from trireme.ps.optimizers import spec_of
from trireme.session.model.training_setup import TrainingSetup
from trireme.session.observers.progress import Progress

_FIXED = (float, int, bool, str, type(None))  # what nothing changes in place
_TORCHS = import_module("torch.optim.optimizer")  # which torch.optim has deleted from its names


class Hyperparameters:
    """The user's hyper-parameters, which each update brings to the servers when they change.

    Attributes:
        scheduler: the scheduler that counts global steps; None where the session has none.
    """

    def __init__(self, setup: TrainingSetup, progress: Progress) -> None:
        self.scheduler = _scheduler(setup)
        # Counted here, as not every scheduler counts its steps.
        self._scheduled = getattr(self.scheduler, "last_epoch", 0)
        self._optimizer = setup.optimizer
        if self.scheduler is not None:
            self._first = deepcopy((self.scheduler.state_dict(), self._values(), self._scheduled))
        self._settings = settings = setup.settings
        self._progress = progress
        self._warned = False
        self.counted = False  # whether the program sets them by the job's steps
        # Otherwise the servers do not run the user's optimizer.
        self._sends = setup.served
        # In rounds the servers compare what workers say.
        self._disagree = not settings.rule.synchronous and settings.task.workers > 1
        self._then: list[list[Any]] = []
        self._groups: tuple[GroupSpec, ...] = ()

    def now(self) -> tuple[GroupSpec, ...] | None:
        """Returns the present hyper-parameters; the same object while they are unchanged.

        It is None where the servers do not run the user's optimizer.
        """
        if not self._sends:
            return None
        # Copies, as a program may change a tensor or a list in place.
        now = [
            [v if type(v) in _FIXED else _copied(v) for k, v in group.items() if k != "params"]
            for group in self._optimizer.param_groups
        ]
        if now != self._then:
            if self._then and self.scheduler is None and self._disagree and not self.counted:
                self.warn(
                    "the program changes the optimizer's settings by itself: each worker counts "
                    "its own steps then, and the servers take the settings of each update. Let a "
                    "session count the job's steps (scheduler=...), advance a schedule of your own "
                    "loop to optimizer.loop_steps, or set the rate by global_step"
                )
            self._then = now
            self._groups = spec_of(self._optimizer).groups
        return self._groups

    def forget(self) -> None:
        """Takes the next hyper-parameters as unchanged: there are other groups."""
        self._then = []

    def warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            self._progress.warn(text)

    def _values(self) -> list[dict[str, Any]]:
        groups = self._optimizer.param_groups
        return [{k: v for k, v in group.items() if k != "params"} for group in groups]

    def rewind(self) -> None:
        """Puts the schedule back to its beginning, as the job has lost steps."""
        if self.scheduler is not None:
            state, groups, self._scheduled = deepcopy(self._first)
            self.scheduler.load_state_dict(state)
            for group, values in zip(self._optimizer.param_groups, groups, strict=False):
                group.update(values)

    def advance(self, step: int) -> None:
        """Advances the scheduler, where there is one, to a global step of the job."""
        while self.scheduler is not None and self._scheduled < step:
            try:
                self.scheduler.step()
            except ValueError as error:  # such as OneCycleLR's, past its last step
                shared = self._settings.steps_of_a_loop(1) == 0
                workers, most = self._settings.task.workers, self._settings.max_steps
                every = f" (each update of any of the {workers} workers is one)" if shared else ""
                raise ConfigurationError(
                    f"the {type(self.scheduler).__name__} given as scheduler has no step "
                    f"{self._scheduled + 1} ({error}), and the job is at global step {step}. A "
                    f"session's schedule counts the global steps of the whole job{every}, with "
                    "those before it was resumed: build it for as many steps as it makes"
                    + ("" if most is None else f", max_steps={most}")
                ) from error
            self._scheduled += 1


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [item if type(item) in _FIXED else _copied(item) for item in value]
    return value


def _scheduler(setup: TrainingSetup) -> Any:
    scheduler: Any = setup.settings.options.scheduler
    if scheduler is None:
        return None
    if not isinstance(scheduler, LRScheduler):
        scheduler = scheduler(setup.optimizer)
    elif scheduler.optimizer is not setup.optimizer:
        name = type(scheduler).__name__
        raise ConfigurationError(
            f"the {name} given as scheduler is over another optimizer than the session's: give the "
            "session that very optimizer too, or a function that builds the scheduler: "
            f"scheduler=lambda optimizer: {name}(optimizer, ...)"
        )
    if isinstance(scheduler, ReduceLROnPlateau) or not callable(getattr(scheduler, "step", None)):
        raise ConfigurationError(
            f"the scheduler is {scheduler!r}: give one of torch.optim.lr_scheduler that needs no "
            "metric but the step count, such as ExponentialLR or OneCycleLR, or a function that "
            "returns one"
        )
    # Servers make the steps, and a restored schedule is moved on before any: torch would warn.
    setup.optimizer._opt_called = True  # type: ignore[attr-defined]
    return scheduler


def hooks_of(optimizer: torch.optim.Optimizer, when: Literal["pre", "post"]) -> list[Any]:
    """Returns the hooks of an optimizer's steps, and those of the steps of all optimizers."""
    every = getattr(_TORCHS, f"_global_optimizer_{when}_hooks", {})
    own = getattr(optimizer, f"_optimizer_step_{when}_hooks", {})
    return [*every.values(), *own.values()]
