"""What a program knows of its job."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch

from trireme.session.worker.job import Job
from trireme.session.worker.recorder import Recorder
from trireme.session.worker.stopping import ShouldStop
from trireme.session.worker.worker import Worker


class JobView(ABC):
    """What a program knows of its job, by a session or by an optimizer of its own loop."""

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

        Under asynchronous strategies one worker calls it, and the others receive the values with
        their next answers. Where workers make steps together, all of them must call it, between
        the same two steps, with the same values; a worker that trains locally changes its own.

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
