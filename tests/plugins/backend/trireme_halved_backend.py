"""The backend of `--strategy halved`; it imports `torch.distributed`, and so is a module apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import distributed as dist

from trireme.parallel.assembly import Parallel
from trireme.session.model.reducer import Reducer
from trireme.session.model.training_setup import TrainingSetup


class HalvedMean(Reducer):
    """Averages the gradients of all processes, each parameter's by itself."""

    def __init__(self, setup: TrainingSetup) -> None:
        self._group: Any = setup.process_group
        self._flat = setup.flat

    def scale_factor(self, examples: float) -> Callable[[], float]:
        total, size = self._group.count(examples), self._group.size
        return lambda: examples * size / total() if total() else 0.0

    def finish(self) -> None:
        for parameter in self._flat.parameters.values():
            if parameter.grad is not None:
                half = parameter.grad.to(torch.float16)
                dist.all_reduce(half, group=self._group.replicas)
                parameter.grad.copy_(half).div_(self._group.size)


class HalvedTogether(Parallel):
    """Joins the processes as `allreduce` does, and reduces gradients otherwise."""

    def assemble(self, *args: Any, **options: Any) -> TrainingSetup:
        setup = super().assemble(*args, **options)
        return replace(setup, reducer=HalvedMean(setup))
