"""Hands out what a program changes beside its parameters: teachers, queues, statistics."""

from __future__ import annotations

import time
from typing import Any

import torch

from trireme.session.model.module_names import state_of
from trireme.session.result import StepResult
from trireme.session.worker.observer import Observer

_SECONDS = 1.0
_SHARE = 0.01  # of the time, which it may take


class Constants(Observer):
    """On the chief of a job with servers: shares buffers and frozen parameters that have changed.

    A worker that is started again begins with what was shared last.
    """

    def __init__(self, worker: Any) -> None:
        super().__init__(worker)
        self._due, self._view = 0.0, -1
        self._sums: list[complex] = []

    def on_start(self) -> None:
        self._view, self._sums = self.worker.lifecycle.view_number, self._sum()

    def after_step(self, recorder: Any, result: StepResult, *, due: bool) -> None:
        lifecycle, now = self.worker.lifecycle, time.monotonic()
        if now < self._due and lifecycle.view_number == self._view:
            return
        view, sums, group = lifecycle.view_number, self._sum(), self.worker.setup.process_group
        changed = (view, sums) != (self._view, self._sums)
        if changed and lifecycle.is_chief and self.worker.task.servers and group is None:
            self.worker.buffers.hand_out(view)
        self._view, self._sums = view, sums
        done = time.monotonic()
        self._due = done + max(_SECONDS, (done - now) / _SHARE)

    def _sum(self) -> list[complex]:
        """Returns numbers that are others when a program has written to what is not trained."""
        trained = {id(parameter) for parameter in self.worker.setup.flat.parameters.values()}
        rest = [each for each in state_of(self.worker.setup.model).values() if not each.is_meta]
        return [
            # Not all types of one byte have sums.
            complex((each if each.element_size() > 1 else each.view(torch.uint8)).sum())
            for each in rest
            if id(each) not in trained
        ]
