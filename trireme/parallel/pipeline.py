"""A pipeline: the stages that a process holds, and the order in which it works off micro-batches.

The schedules are those of `torch.distributed.pipelining`. One micro-batch is plain layer-wise
model parallelism. Sources: Huang et al., GPipe (NeurIPS 2019); Narayanan et al., PipeDream (SOSP
2019) and Efficient Large-Scale Language Model Training (SC 2021), interleaved; Qi et al., Zero
Bubble Pipeline Parallelism (ICLR 2024).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from trireme.parallel.config import PipelineConfig
from trireme.parallel.gang import Gang
from trireme.parallel.stages import Stage
from trireme.parallel.work import Work

__all__ = ["Pipeline"]


class Pipeline:
    """This process's stages, driven by a schedule.

    Args:
        gang: the processes.
        stages: those of this process, with their numbers.
        total: how many stages there are.
        config: see `PipelineConfig`.
        loss: (outputs, targets) -> the mean loss of a micro-batch, a scalar.
    """

    def __init__(
        self,
        gang: Gang,
        stages: Sequence[tuple[int, Stage]],
        total: int,
        config: PipelineConfig,
        loss: Callable[[Any, Any], torch.Tensor],
    ) -> None:
        self._gang = gang
        self._stages = stages
        self._total = total
        self._config = config
        self._loss = loss
        self._pieces = 1
        self._schedules: dict[tuple[int, ...], Any] = {}
        self._factor = 1.0
        self._seen: list[tuple[Any, Any, float, int]] = []
        self._examples = 0
        self.work: list[Work] | None = None  # a list while work is noted down

    @property
    def is_first(self) -> bool:
        """Whether this process takes the inputs."""
        return self._stages[0][0] == 0

    @property
    def is_last(self) -> bool:
        """Whether this process computes the loss."""
        return self._stages[-1][0] == self._total - 1

    @property
    def about(self) -> str:
        """Schedule and numbers, in a few words."""
        return (
            f"{self._config.schedule}, {self._total} stages in {self._gang.mesh.pp} processes, "
            f"{self._pieces} micro-batches"
        )

    def gather(self, work: Sequence[Work], step: int, deadline: float) -> list[Work]:
        """Returns, in the chief, what all processes of its pipeline did; elsewhere nothing.

        Args:
            work: what this process did.
            step: when, by a number that all of them give.
            deadline: by the monotonic clock; with somebody's still missing then, there is nothing.
        """
        gang = self._gang
        gang.put(f"work/{step}/{gang.rank}", msgspec.msgpack.encode(list(work)))
        found: list[Work] = []
        for rank in gang.stage_speakers() if gang.is_chief else ():
            while (data := gang.get(f"work/{step}/{rank}")) is None:
                if time.monotonic() > deadline:
                    return []
                time.sleep(0.01)
            found += msgspec.msgpack.decode(data, type=list[Work])
        return found

    def step(
        self, inputs: Any, targets: Any, examples: int, factor: float
    ) -> tuple[torch.Tensor, list[Any]]:
        """Leaves the gradients of a batch's mean loss in the stages' parameters.

        Args:
            inputs: of the whole batch; looked at by the first stage only.
            targets: looked at by the last.
            examples: how many the batch has.
            factor: by which the loss counts.

        Returns:
            In the last process the mean loss, and the outputs of the micro-batches with their
            targets; elsewhere zero, and nothing.

        Raises:
            ConfigurationError: the batch cannot be cut into micro-batches.
        """
        self._factor = factor
        self._seen.clear()
        self._examples = examples
        self._pieces = self._config.pieces(examples, self._gang.mesh.pp)
        schedule = self._schedule(inputs)
        given = (inputs,) if self.is_first else ()
        if self.is_last:
            losses: list[torch.Tensor] = []
            schedule.step(*given, target=targets, losses=losses, return_outputs=False)
        else:
            schedule.step(*given, return_outputs=False)
        # When shapes are worked out before the first step, the loss is called once too often.
        seen = self._seen[-self._pieces :]
        mean = sum(value * size for _, _, value, size in seen) / examples
        return torch.tensor(float(mean)), [(out, target) for out, target, _, _ in seen]

    def _weighted(self, outputs: Any, targets: Any) -> torch.Tensor:
        """The loss of a micro-batch, so that the mean over them is the mean over examples."""
        loss = self._loss(outputs, targets)
        size = int(targets.shape[0])
        self._seen.append((outputs.detach(), targets, float(loss.detach()), size))
        return loss * (self._factor * size * self._pieces / self._examples)

    def _schedule(self, inputs: Any) -> Any:
        """Returns the schedule for batches of a shape: stages learn theirs from the first."""
        key = tuple(inputs.shape) if isinstance(inputs, torch.Tensor) else ()
        if key not in self._schedules:
            self._schedules[key] = self._make()
        return self._schedules[key]

    def _make(self) -> Any:
        group = self._gang.group("pp")
        stages = [
            PipelineStage(stage, number, self._total, self._gang.device, group=group)
            for number, stage in self._stages
        ]
        for (_, module), stage in zip(self._stages, stages, strict=True):
            module.rehearses = True
            self._watch(stage)
        name = self._config.schedule
        if name == "gpipe":
            return ScheduleGPipe(stages[0], self._pieces, loss_fn=self._weighted)
        if name == "1f1b" and self._pieces >= self._gang.mesh.pp:
            return Schedule1F1B(stages[0], self._pieces, loss_fn=self._weighted)
        if name == "1f1b":  # too few to alternate: the same order as GPipe's
            return ScheduleGPipe(stages[0], self._pieces, loss_fn=self._weighted)
        kind = ScheduleInterleaved1F1B if name == "interleaved" else ScheduleInterleavedZeroBubble
        return kind(list(stages), self._pieces, loss_fn=self._weighted)

    def _watch(self, stage: Any) -> None:
        """Has a stage's work noted down while somebody asks for it."""
        kinds = (
            ("forward_one_chunk", "forward"),
            ("backward_one_chunk", "backward"),
            ("backward_weight_one_chunk", "weight"),
        )
        for method, kind in kinds:
            setattr(stage, method, self._timed(getattr(stage, method), stage.stage_index, kind))

    def _timed(self, call: Callable[..., Any], stage: int, kind: str) -> Callable[..., Any]:
        def timed(microbatch: int, *args: Any, **options: Any) -> Any:
            if self.work is None:
                return call(microbatch, *args, **options)
            began = time.time()
            result = call(microbatch, *args, **options)
            process = self._gang.place["pp"]
            self.work.append(Work(process, stage, kind, microbatch, began, time.time()))
            return result

        return timed
