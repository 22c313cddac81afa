"""A pipeline: runs a process's stages on micro-batches in the order of a schedule.

The schedules are those of `torch.distributed.pipelining`. With one micro-batch a pipeline is plain
layer-wise model parallelism. Sources: Huang et al., GPipe (NeurIPS 2019); Narayanan et al.,
PipeDream (SOSP 2019) and Efficient Large-Scale Language Model Training (SC 2021), interleaved; Qi
et al., Zero Bubble Pipeline Parallelism (ICLR 2024).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from trireme.parallel.config import PipelineConfig
from trireme.parallel.operation_log import OperationLog, StageOperation
from trireme.parallel.processes.process_group import TorchProcessGroup
from trireme.parallel.stages import Stage

_SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
}
_TIMED = (
    ("forward_one_chunk", "forward"),
    ("backward_one_chunk", "backward"),
    ("backward_weight_one_chunk", "weight"),
)
"""The methods of a stage whose times can be recorded, and the kinds of these operations."""


class Pipeline(OperationLog):
    """Runs the stages of this process by a schedule."""

    def __init__(
        self,
        process_group: TorchProcessGroup,
        stages: Sequence[tuple[int, Stage]],
        total: int,
        config: PipelineConfig,
        loss: Callable[[Any, Any], torch.Tensor],
        trained: Callable[[], tuple[bool, ...]] = tuple,
    ) -> None:
        """Runs stages; `trained` returns which parameters of the whole model require a gradient."""
        super().__init__()
        self._process_group = process_group
        self._stages = stages
        self._total = total
        self._config = config
        self._loss = loss
        self._pieces = 1
        self._trained = trained
        self._schedules: dict[tuple[tuple[int, ...], tuple[bool, ...]], Any] = {}
        self._factor = 1.0
        self._seen: list[tuple[Any, Any, float, int]] = []
        self._examples = 0

    def step(
        self, inputs: Any, targets: Any, examples: int, factor: float
    ) -> tuple[torch.Tensor, list[Any]]:
        """Computes the gradients of a batch's mean loss into the stages' parameters."""
        self._factor = factor
        self._seen.clear()
        self._examples = examples
        self._pieces = self._config.pieces(examples, self._process_group.mesh.pp)
        # A schedule for each shape of batches, and for what is frozen: from the first batch the
        # stages infer their shapes, and between which of them gradients are sent.
        shape = tuple(inputs.shape) if isinstance(inputs, torch.Tensor) else ()
        kind = shape, self._trained()
        if kind not in self._schedules:
            self._schedules[kind] = self._make()
        given = (inputs,) if self._stages[0][0] == 0 else ()
        wanted = targets if self._stages[-1][0] == self._total - 1 else None
        self._schedules[kind].step(*given, target=wanted, return_outputs=False)
        # Shape inference before the first step calls the loss once more.
        seen = self._seen[-self._pieces :]
        mean = sum(value * size for _, _, value, size in seen) / examples
        loss = torch.tensor(float(mean), device=self._process_group.device)
        dist.all_reduce(loss, group=self._process_group.group("pp"))  # zero in other processes
        return loss, [(out, target) for out, target, _, _ in seen]

    def _weighted(self, outputs: Any, targets: Any) -> torch.Tensor:
        loss = self._loss(outputs, targets)
        size = int(targets.shape[0])
        self._seen.append((outputs.detach(), targets, float(loss.detach()), size))
        return loss * (self._factor * size * self._pieces / self._examples)

    def _make(self) -> Any:
        group = self._process_group.group("pp")
        stages = [
            PipelineStage(stage, number, self._total, self._process_group.device, group=group)
            for number, stage in self._stages
        ]
        for (_, module), stage in zip(self._stages, stages, strict=True):
            module.rehearses = True
            for method, kind in _TIMED:
                setattr(stage, method, self._timed(getattr(stage, method), stage.stage_index, kind))
        name = self._config.schedule
        if name == "1f1b" and self._pieces < self._process_group.mesh.pp:
            name = "gpipe"  # with so few micro-batches 1F1B is GPipe's order
        schedule: Any = _SCHEDULES[name]
        own = stages[0] if issubclass(schedule, PipelineScheduleSingle) else stages
        return schedule(own, self._pieces, loss_fn=self._weighted)

    def _timed(self, call: Callable[..., Any], stage: int, kind: str) -> Callable[..., Any]:
        def timed(microbatch: int, *args: Any, **options: Any) -> Any:
            if self.operations is None:
                return call(microbatch, *args, **options)
            began = time.time()
            result = call(microbatch, *args, **options)
            process = self._process_group.coordinates["pp"]
            self.operations.append(
                StageOperation(process, stage, kind, microbatch, began, time.time())
            )
            return result

        return timed
