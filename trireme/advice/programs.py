"""What programs get wrong about their labels and their schedules."""

from __future__ import annotations

import traceback
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from trireme.session.model.batch import counted_labels, inputs_and_targets
from trireme.session.model.computation import Computation
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
                    "weight=lambda batch, outputs: (batch[1] != -100).sum()"
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
