"""Computes the gradients of a replica that several processes hold together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from trireme.errors import ConfigurationError
from trireme.parallel.model_part import ModelPart
from trireme.parallel.process_group import lost_peer
from trireme.parallel.reducer import Reducer
from trireme.session.options import Options
from trireme.session.replica.batch import examples_in
from trireme.session.replica.model_loss import model_loss
from trireme.session.replica.replica import Loss, Replica, scalar
from trireme.session.result import Metric, StepResult

__all__ = ["PipelineReplica", "ProcessGroupReplica"]


class ProcessGroupReplica(Replica):
    """Forward and backward in which other processes take part; see `Replica` for the arguments."""

    def backward(self, batch: Any, begin: Callable[[float], None] | None = None) -> StepResult:
        """As `Replica.backward`, with the mean over all replicas.

        Raises:
            JobFailed: another process has ended.
            TriremeError: as `Replica.backward`.
        """
        with lost_peer():
            result = super().backward(batch, begin)
        if isinstance(self.flat, ModelPart) and result.examples:
            self.flat.check_gradients()
        return result


class PipelineReplica(ProcessGroupReplica):
    """Runs pipeline stages. All processes know the loss; the last one has the outputs.

    Args:
        part: the stages of this process.
        loss: see `Loss`.
        options: the session's options.
        metrics: the metrics by name.
        reducer: averages the gradients of the replicas.

    Raises:
        ConfigurationError: an option has no meaning for a pipeline.
    """

    def __init__(
        self,
        part: ModelPart,
        loss: Loss,
        options: Options,
        metrics: Mapping[str, Metric],
        reducer: Reducer,
    ) -> None:
        if options.accumulate > 1:
            raise ConfigurationError(
                f"accumulate={options.accumulate} with a pipeline: micro-batches do that already; "
                f"use --microbatches {options.accumulate}"
            )
        if loss is model_loss:
            raise ConfigurationError(
                "model_loss with a pipeline: no stage has the model's own loss, which needs the "
                "whole model: give the session a loss function of (outputs, targets), or use "
                "--strategy fsdp"
            )
        super().__init__(nn.ModuleList(part.modules), loss, part, options, metrics, reducer)
        self._reducer: Reducer = reducer
        self.pipeline = part.pipeline(lambda outputs, targets: scalar(self._loss(outputs, targets)))

    def _compute(self, batch: tuple[Any, Any], begin: Callable[[float], None] | None) -> StepResult:
        inputs, targets = batch
        if not isinstance(inputs, torch.Tensor) or not isinstance(targets, torch.Tensor):
            raise ConfigurationError(
                "a pipeline takes batches of one tensor of inputs and one of targets"
            )
        examples = examples_in(inputs)
        share = self._reducer.scale_factor(examples)()
        with torch.autocast(self.flat.device.type, torch.bfloat16, enabled=self._autocast):
            loss, outputs = self.pipeline.step(inputs, targets, examples, share)
        return StepResult(loss, list(outputs), self._metrics, examples)
