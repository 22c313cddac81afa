"""The gradients of a session's steps, and the choice of the optimizer that makes each step."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from trireme.errors import ConfigurationError
from trireme.ps.messages import Stale
from trireme.ps.optimizers import JointOptimizer
from trireme.ps.results import PushResult
from trireme.session.loss import Loss
from trireme.session.model.building import Optimizers
from trireme.session.model.computation import Computation
from trireme.session.model.seeding import Seeding
from trireme.session.model.trained import clip
from trireme.session.result import StepResult
from trireme.session.worker.worker import Worker


class Stepper:
    """Computes the gradients of one worker's steps, and seeds what is random in them."""

    def __init__(self, worker: Worker, computation: Computation, optimizers: Optimizers) -> None:
        setup = worker.setup
        self._worker = worker
        self._computation = computation
        self._joint = setup.optimizer if isinstance(setup.optimizer, JointOptimizer) else None
        several = range(len(setup.parameters_of_each()))
        named = optimizers if isinstance(optimizers, Mapping) else several
        self._places: dict[str | int, int] = dict(zip(named, several, strict=False))
        self._clip_norm = setup.settings.clip_norm
        if setup.process_group is None:
            flat = setup.flat
            flat.keeps_views = flat.device.type != "cpu"  # GPU memory is scarce
        self.seeding = Seeding(setup)
        self.seeding.begin(worker.global_step)

    def choose(self, name: str | int | None) -> None:
        """Chooses the optimizer that makes the next step; see `Session.step`."""
        if self._joint is None and name is None:
            return
        if self._joint is None or name is None or name not in self._places:
            known = f"say which optimizer, one of {', '.join(map(repr, self._places))}"
            if self._joint is None:
                known = "this session has one optimizer; give it several by name, in a dict"
            raise ConfigurationError(f"step(batch, optimizer={name!r}): {known}")
        self._joint.chosen = self._places[name]

    def gradient(self, batch: Any, loss: Loss | None) -> StepResult:
        """Computes the gradient of a batch; the fields of the update are not set yet."""
        worker, joint = self._worker, self._joint
        setup, extension = worker.setup, worker.setup.extension
        if extension is not None:
            extension.forget()
        for observer in worker.observers.values():
            observer.before_gradient(self._computation, batch)
        self.seeding.step(worker.global_step)
        worker.begin_step()
        if joint is not None:
            setup.agree_on_optimizer()
        with self._by(loss):
            result = self._computation.backward(batch)
        if joint is not None:
            for place, parameters in enumerate(setup.parameters_of_each()):
                if place != joint.chosen:  # which does not update them
                    for parameter in parameters:
                        parameter.grad = None
        if self._clip_norm is not None:
            clip(self._computation.flat, self._clip_norm, extension)
        return result

    def compute_only(self, batch: Any, loss: Loss | None) -> StepResult:
        with self._by(loss):
            result = self._computation.backward(batch)
        step = result.global_step = self._worker.global_step
        result.decide(PushResult(Stale(step), step, 0, True))
        return result

    def _by(self, loss: Loss | None) -> AbstractContextManager[None]:
        return nullcontext() if loss is None else self._computation.another_loss(loss)
