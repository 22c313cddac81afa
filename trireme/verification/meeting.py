"""Joins the gradients of processes that each stand for one worker of a loop.

It shares no code with the servers and the collectives that it is to judge.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from trireme.launch.config.task_config import Trial

_WAIT = timedelta(seconds=600)


class Meeting:
    """The processes of a trial, which meet in a directory."""

    def __init__(self, directory: Path, trial: Trial) -> None:
        torch: Any = distributed
        store = torch.FileStore(str(directory / "meeting"), trial.replicas)
        self._group = torch.ProcessGroupGloo(store, trial.replica, trial.replicas, _WAIT)

    def average(self, weight: float, parameters: Collection[nn.Parameter]) -> float:
        """Replaces gradients by their mean over all processes, weighed by numbers of examples.

        A parameter without a gradient counts as zeros. Returns the number of all examples.
        """
        parts = [torch.zeros_like(p) if p.grad is None else p.grad.detach() for p in parameters]
        sums = [part.reshape(-1).to("cpu", torch.float64) * weight for part in parts]
        flat = torch.cat([torch.tensor([weight], dtype=torch.float64), *sums])
        self._group.allreduce([flat]).wait()
        total, *means = torch.split(flat, [1, *map(torch.numel, parts)])
        for parameter, part, mean in zip(parameters, parts, means, strict=True):
            if total and (parameter.grad is not None or mean.any()):
                parameter.grad = part.copy_((mean / total).view_as(part))
        return float(total)

    def leave(self, parameters: Collection[nn.Parameter]) -> None:
        """Takes part with no examples until no process has any: this one makes no more steps."""
        while self.average(0.0, parameters):
            pass
