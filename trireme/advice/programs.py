"""What programs get wrong about their labels, their schedules and further optimizers."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from trireme.ps.messages import Span
from trireme.session.model.batch import counted_labels, inputs_and_targets
from trireme.session.model.computation import Computation
from trireme.session.model.module_names import named_parameters
from trireme.session.worker.observer import Observer


class UncountedLabels(Observer):
    """Warns, once, where labels among the chief's first batches are left out of the mean."""

    _looks = 16  # of the chief's first batches

    def before_gradient(self, computation: Computation, batch: Any) -> None:
        if not self._looks or not self.worker.lifecycle.is_chief:  # all run the same program
            return
        self._looks -= 1
        if computation.weighs_examples:
            _, targets = inputs_and_targets(batch)
            counted = counted_labels(computation.model, targets)
            if counted is not None and counted < targets.numel():
                self._looks = 0
                self.worker.warn_as_chief(
                    "targets are -100, which losses of PyTorch leave out of their mean, and each "
                    "batch counts by its examples. Give the number of labels that count, such as "
                    "weight=lambda batch, outputs: (batch[1] != -100).sum() where a batch is a pair"
                )


class PassedSchedules(Observer):
    """Explains the error of a schedule that the program has stepped past its end itself."""

    def on_fail(self, error: BaseException) -> None:
        frames = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
        passed: Any = next((each for each in frames[::-1] if isinstance(each, LRScheduler)), None)
        total, asked = getattr(passed, "total_steps", None), getattr(passed, "last_epoch", 0)
        if not isinstance(error, ValueError) or total is None or asked <= total:
            return
        worker = self.worker
        counted = "a step of the loop is a global step"
        if worker.setup.settings.steps_of_a_loop(1) == 0:
            counted = "each update of any worker is a global step"
        error.add_note(
            f"The program steps this {type(passed).__name__} itself: it was built for {total} "
            f"steps, and was asked for step {asked}. The job is at global step "
            f"{worker.global_step}, and this process began at step {worker.first_step}: {counted}. "
            "Before each step, advance the schedule to where the job is: while "
            "schedule.last_epoch < optimizer.loop_steps: schedule.step(), where optimizer is what "
            "trireme.distribute returned; or let a session count: Session(scheduler=...)"
        )


class OtherOptimizers(Observer):
    """Warns, once, where an optimizer that the job was not given trains a part of the model."""

    def __init__(self, worker: Any) -> None:
        super().__init__(worker)
        self._others: dict[str, nn.Parameter] = {}

    def on_start(self) -> None:
        setup = self.worker.setup
        if setup.replicas > 1 and setup.part is None:  # other processes have copies of them
            mine = {id(each) for each in [*setup.flat.parameters.values(), *setup.frozen()]}
            self._others = {n: p for n, p in named_parameters(setup.model) if id(p) not in mine}
        self._remember()

    def _remember(self) -> None:
        self._versions = [(each._version, each.grad) for each in self._others.values()]

    def before_update(self, weight: float, examples: Sequence[Span]) -> None:
        pairs = zip(self._others.items(), self._versions, strict=True)
        for (name, each), (version, gradient) in pairs:
            has_gradient = each.grad is not None or gradient is not None
            if each._version != version and each.requires_grad and has_gradient:
                if any(each is mine for mine in self.worker.setup.flat.parameters.values()):
                    continue  # it was added to an optimizer of the job since
                self._others = {}
                self.worker.warn_as_chief(
                    f"the program trains parameter {name!r} by an optimizer that the job was not "
                    "given: each worker changes a copy of its own, by its own batches alone. Give "
                    "the job all optimizers: Session(model, loss, [first, second]), or "
                    "distribute(model, [first, second]) in a loop of your own"
                )
                break

    def after_update(self) -> None:
        self._remember()
