"""Explains the error of a schedule that the program has stepped past its end itself."""

from __future__ import annotations

import traceback
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from trireme.session.worker.observer import Observer


class PassedSchedules(Observer):
    """Adds a note to the error: which steps were counted, and how to count them."""

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
