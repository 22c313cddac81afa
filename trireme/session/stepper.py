"""The steps of a session: computes the gradient of a batch and exchanges it for new values."""

from __future__ import annotations

import time
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from trireme.data.seeds import derive
from trireme.errors import ConfigurationError
from trireme.ps.messages import Stale
from trireme.ps.results import PushResult
from trireme.session.data_feed import DataFeed
from trireme.session.observers.recorder import Recorder
from trireme.session.replica.optimizer_choice import OptimizerChoice, agree_on_optimizer
from trireme.session.replica.replica import Loss, Replica, clip
from trireme.session.result import StepResult
from trireme.session.worker import Worker

__all__ = ["Stepper"]

_SEED_WORKER, _SEED_STEP = 12, 13


class Stepper:
    """Makes the steps of one worker, and seeds what is random in them.

    Args:
        worker: the worker, which has joined its job.
        replica: computes gradients.
        choice: which of several optimizers makes a step; None for one optimizer.
        data_feed: knows which examples a step is made from.
        recorder: counts the steps.
    """

    def __init__(
        self,
        worker: Worker,
        replica: Replica,
        choice: OptimizerChoice | None,
        data_feed: DataFeed,
        recorder: Recorder,
    ) -> None:
        setup = worker.setup
        self._worker = worker
        self._replica = replica
        self._choice = choice
        self._options = setup.settings.options
        self._clip_norm = setup.settings.clip_norm
        self._data_feed = data_feed
        self._recorder = recorder
        self._overlaps = (
            setup.process_group is None
            and choice is None  # backward also makes gradients that are not to be sent
            and setup.settings.overlaps
            and worker.backend.announces
        )
        if setup.process_group is None:
            flat = setup.flat
            flat.keeps_views = self._overlaps or flat.device.type != "cpu"  # GPU memory is scarce
        self._replica_number = setup.replica
        torch.manual_seed(derive(self._options.seed, _SEED_WORKER, self._replica_number))

    def choose(self, optimizer: str | int | None) -> None:
        """Chooses the optimizer that makes the next step; see `Session.step`.

        Raises:
            ConfigurationError: there is no such optimizer, or there is only one.
        """
        if self._choice is not None:
            self._choice.choose(optimizer)
        elif optimizer is not None:
            raise ConfigurationError(
                f"step(batch, optimizer={optimizer!r}): this session has one optimizer; give it "
                "several by name, in a dict"
            )

    def step(self, batch: Any, loss: Loss | None) -> StepResult:
        """Makes an update of the job from a batch.

        Args:
            batch: the batch.
            loss: replaces the session's loss for this step.
        """
        trainer = self._worker.trainer
        began = time.monotonic()
        if self._options.deterministic:
            step = self._worker.global_step
            seed = derive(self._options.seed, _SEED_STEP, self._replica_number, step)
            torch.manual_seed(seed)
        trainer.begin_step()
        if self._choice is not None:
            agree_on_optimizer(self._worker.setup)
        spans = self._data_feed.spans_of(batch)
        begin = partial(trainer.begin_update, examples=spans) if self._overlaps else None
        if loss is None:
            result = self._replica.backward(batch, begin)
        else:
            with self._replica.another_loss(loss):
                result = self._replica.backward(batch, begin)
        if self._choice is not None:
            self._choice.leave_out_others()
        if self._clip_norm is not None:
            clip(self._replica.flat, self._clip_norm)
        computed = time.monotonic()
        self._data_feed.updated()
        pushed = trainer.update(float(result.examples), spans, self._data_feed.prepare)
        if pushed is not None:
            result.decide(pushed)
        result.global_step = self._worker.global_step
        result.seconds = time.monotonic() - began
        self._recorder.step(result, began, computed)
        return result

    def compute_only(self, batch: Any, loss: Loss | None) -> StepResult:
        """Computes the result of a step that comes after the end of training; updates nothing."""
        with self._replica.another_loss(loss) if loss is not None else nullcontext():
            result = self._replica.backward(batch)
        self._data_feed.updated()
        step = result.global_step = self._worker.global_step
        result.decide(PushResult(Stale(step), step, 0, True))
        return result
