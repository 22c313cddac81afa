"""The methods by which a program asks its job, and records for TensorBoard."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from trireme.session.worker.job import Job
from trireme.session.worker.observer import OBSERVERS
from trireme.session.worker.recorder import Recorder
from trireme.session.worker.stopping import ShouldStop
from trireme.session.worker.worker import Worker


class JobMethods(ABC):
    """What a program asks of its job, by a session or by an optimizer of its own loop.

    Only the chief records; on other workers, and without a run directory, those methods do nothing.
    """

    @property
    @abstractmethod
    def job(self) -> Job:
        """This process's part in the job; for Trireme's own hooks."""

    @property
    def worker(self) -> Worker:
        """The worker that takes part in the job; for Trireme's own hooks."""
        return self.job.worker

    @property
    def recorder(self) -> Recorder:
        """The recorder that counts and shows this worker's steps; for Trireme's own hooks."""
        return self.job.recorder

    @property
    def is_chief(self) -> bool:
        """Whether this is the live worker with the lowest index."""
        return self.worker.lifecycle.is_chief

    @property
    def global_step(self) -> int:
        """The global step of the values that this worker has."""
        return self.worker.global_step

    @property
    def should_stop(self) -> ShouldStop:
        """`should_stop()` returns whether training should end; all workers agree on the answer."""
        return ShouldStop(self.worker.asked_to_stop)

    def write_values(self, values: Mapping[str, torch.Tensor]) -> None:
        """Replaces values of trained parameters in the whole job, such as clipped ones.

        Under asynchronous strategies one worker calls it. Where workers make steps together, all
        of them must, between the same two steps, with the same values; a worker that trains locally
        changes its own.

        Args:
            values: whole tensors by the parameters' names in the model.

        Raises:
            ConfigurationError: there is no such parameter, or it has another shape.
            Rejected: under `sync` with `--aggregate`, whose late workers would overwrite others.
        """
        self.worker.write_values(values)

    def save(self) -> None:
        """Saves a checkpoint now. Only the chief saves; on other workers it does nothing.

        Where processes hold the model together, all of them must call it.
        """
        self.worker.save()

    @property
    def model(self) -> nn.Module:
        """The whole model, as the job knows it."""
        return self.worker.setup.model

    @property
    def board(self) -> Any:
        """The TensorBoard writer; None where this worker is not chief or has no run directory."""
        curves = self.worker.observers.get("curves")
        return curves.board if curves is not None and self.is_chief else None

    @property
    def summary(self) -> Any:
        """Records images, histograms and the like: the `trireme.dashboards.summary.Summary`.

        Raises:
            ConfigurationError: its plug-in is not installed.
        """
        OBSERVERS.load("curves")
        return self.worker.observers["curves"].summary(self)

    @property
    def pipeline(self) -> Any:
        """What runs this process's stages or operations; None without a pipeline or a graph."""
        return None

    def log(
        self,
        values: Mapping[str, float | torch.Tensor] | None = None,
        *,
        run: str = "train",
        step: int | None = None,
        **named: float | torch.Tensor,
    ) -> None:
        """Records numbers.

        Args:
            values: the numbers by name.
            run: the TensorBoard run that they belong to.
            step: the global step that they belong to, such as `evaluated_step`; None for the
                present one.
            named: further numbers, as keywords.
        """
        if self.is_chief:
            self.recorder.log({**(values or {}), **named}, run, step)
