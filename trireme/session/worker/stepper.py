"""The gradients of a session's steps, and the choice of the optimizer that makes each step."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from trireme.errors import ConfigurationError
from trireme.ps.joint_optimizer import JointOptimizer
from trireme.ps.messages import Stale
from trireme.ps.results import PushResult
from trireme.session.loss import Loss
from trireme.session.model.building import Optimizers
from trireme.session.model.computation import Computation
from trireme.session.model.seeding import Seeding
from trireme.session.model.trained import clip
from trireme.session.result import StepResult
from trireme.session.worker.worker import Worker

_LOOKS = 16
"""The number of the chief's first batches that are looked at for labels that do not count."""


class Stepper:
    """Computes the gradients of one worker's steps, and seeds what is random in them.

    Attributes:
        seeding: seeds what is random.
    """

    def __init__(self, worker: Worker, computation: Computation, optimizers: Optimizers) -> None:
        setup = worker.setup
        self._worker = worker
        self._computation = computation
        self._joint = setup.optimizer if isinstance(setup.optimizer, JointOptimizer) else None
        self._parameters = setup.parameters_of_each()
        several = range(len(self._parameters))
        named = optimizers if isinstance(optimizers, Mapping) else several
        self._places: dict[str | int, int] = dict(zip(named, several, strict=False))
        worker.on_other_parameters.append(self._take_parameters)
        self._options = setup.settings.options
        self._clip_norm = setup.settings.clip_norm
        self._looks = _LOOKS
        if setup.process_group is None:
            flat = setup.flat
            flat.keeps_views = flat.device.type != "cpu"  # GPU memory is scarce
        self.seeding = Seeding(setup)
        self.seeding.begin(worker.global_step)

    def _take_parameters(self) -> None:
        self._parameters = self._worker.setup.parameters_of_each()

    def choose(self, name: str | int | None) -> None:
        """Chooses the optimizer that makes the next step; see `Session.step`."""
        if self._joint is None:
            if name is not None:
                raise ConfigurationError(
                    f"step(batch, optimizer={name!r}): this session has one optimizer; give it "
                    "several by name, in a dict"
                )
            return
        if name is None or name not in self._places:
            wrong = "say which optimizer" if name is None else f"there is no optimizer {name!r}"
            names = ", ".join(map(repr, self._places))
            raise ConfigurationError(f"step(batch, optimizer=...): {wrong}: one of {names}")
        self._joint.chosen = self._places[name]

    def gradient(self, batch: Any, loss: Loss | None) -> StepResult:
        """Computes the gradient of a batch; the fields of the update are not set yet."""
        worker, joint, tables = self._worker, self._joint, self._worker.setup.tables
        if tables is not None:
            tables.forget()
        if self._looks and worker.lifecycle.is_chief:  # all workers run the same program
            self._looks -= 1
            if self._computation.leaves_out_labels(batch):
                self._looks = 0
                worker.progress.warn(
                    "targets are -100, which losses of PyTorch leave out of their mean, and each "
                    "batch counts by its examples: workers, the pieces of accumulate and the "
                    "batches of evaluate are weighed wrongly where they have other numbers of "
                    "labels. Give weight=lambda batch, outputs: (batch[1] != -100).sum(), or as "
                    "your batches have their labels"
                )
        self.seeding.step(worker.global_step)
        worker.begin_step()
        if joint is not None:
            worker.setup.agree_on_optimizer()
        if loss is None:
            result = self._computation.backward(batch)
        else:
            with self._computation.another_loss(loss):
                result = self._computation.backward(batch)
        if joint is not None:
            for place, parameters in enumerate(self._parameters):
                if place != joint.chosen:  # which does not update them
                    for parameter in parameters:
                        parameter.grad = None
        if self._clip_norm is not None:
            clip(self._computation.flat, self._clip_norm, tables)
        return result

    def compute_only(self, batch: Any, loss: Loss | None) -> StepResult:
        """Computes the result of a step that comes after the end of training; updates nothing."""
        with self._computation.another_loss(loss) if loss is not None else nullcontext():
            result = self._computation.backward(batch)
        step = result.global_step = self._worker.global_step
        result.decide(PushResult(Stale(step), step, 0, True))
        return result
