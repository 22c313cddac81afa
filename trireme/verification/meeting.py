"""Joins the gradients of processes that each stand for one worker of a loop, by files.

It shares no code with the servers and the collectives that it is to judge.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from trireme.errors import WaitTimeout
from trireme.launch.config.task_config import Trial

_SECONDS = 600.0
_PAUSE = 0.002
_WEIGHT = "weight of the gradients"


def meet(
    directory: Path, trial: Trial, step: int, weight: float, parameters: Mapping[str, nn.Parameter]
) -> None:
    """Replaces gradients by their mean over all replicas, weighed by their numbers of examples.

    Args:
        directory: where all of them meet.
        trial: which one this is.
        step: the global step before the update.
        weight: the number of examples of this replica's gradients.
        parameters: by name; one without a gradient counts as zeros.

    Raises:
        WaitTimeout: another replica has not come for 600 seconds, and has not ended.
    """
    mine = {n: p.grad.detach().contiguous() for n, p in parameters.items() if p.grad is not None}
    mine[_WEIGHT] = torch.tensor(weight, dtype=torch.float64)
    save_file(mine, _part(directory, trial))
    _part(directory, trial).rename(_file(directory, step, trial.replica))
    found = [
        load_file(path)
        for path in (_wait(directory, step, each) for each in range(trial.replicas))
        if path is not None
    ]
    total = sum(float(each[_WEIGHT]) for each in found) or 1.0
    with torch.no_grad():
        for name, parameter in parameters.items():
            shares = [(float(e[_WEIGHT]) / total, e[name]) for e in found if name in e]
            if not shares:
                continue
            mean = sum(share * gradient.to(torch.float64) for share, gradient in shares)
            assert isinstance(mean, torch.Tensor)
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.copy_(mean)
    _file(directory, step - 1, trial.replica).unlink(missing_ok=True)  # all have read it


def leave(directory: Path, trial: Trial) -> None:
    """Says that this replica makes no more steps."""
    _ended(directory, trial.replica).touch()


def _wait(directory: Path, step: int, replica: int) -> Path | None:
    path, deadline = _file(directory, step, replica), time.monotonic() + _SECONDS
    while not path.exists():
        if _ended(directory, replica).exists() and not path.exists():
            return None
        if time.monotonic() > deadline:
            raise WaitTimeout(
                f"worker:{replica} of the reference has not made step {step + 1} for "
                f"{_SECONDS:.0f} s: all workers must make the same number of steps"
            )
        time.sleep(_PAUSE)
    return path


def _part(directory: Path, trial: Trial) -> Path:
    return directory / f"gradients-{trial.replica}.part"


def _file(directory: Path, step: int, replica: int) -> Path:
    return directory / f"gradients-{step}-{replica}.safetensors"


def _ended(directory: Path, replica: int) -> Path:
    return directory / f"ended-{replica}"
