"""What makes one process stand for a job: it begins alike, drops nothing, and joins gradients."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import distributed, nn
from torch.nn import functional

from trireme.verification.sketch import precision

_KERNELS = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
_WAIT = timedelta(seconds=600)
OFF = "dropout is off in all runs: each worker, and one process, would drop others"


def turn_dropout_off(model: nn.Module, notes: set[str]) -> None:
    """Has no kernel of dropout drop anything in this process, and notes it where one would."""

    def kept(kernel: Any, input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        if train and p:
            notes.add(OFF)
        return kernel(input, 0.0, train)  # type: ignore[no-any-return]

    def attend(*args: Any, **kwargs: Any) -> torch.Tensor:
        if any(args[4:5]) or kwargs.get("dropout_p"):
            notes.add(OFF)
            kwargs |= {"dropout_p": 0.0, **dict(zip(("is_causal",), args[5:], strict=False))}
            args = args[:4]
        return attention(*args, **kwargs)

    kernels: Any = functional._VF  # type: ignore[attr-defined]
    for kernel in (*_KERNELS, *(f"{name}_" for name in _KERNELS)):
        setattr(kernels, kernel, partial(kept, getattr(kernels, kernel)))
    attention = functional.scaled_dot_product_attention
    for module in list(sys.modules.values()):  # the program may have imported the function
        for name in [name for name, each in list(vars(module).items()) if each is attention]:
            setattr(module, name, attend)
    for layer in model.modules():
        if isinstance(layer, nn.RNNBase) and layer.dropout:
            notes.add(OFF)
            layer.dropout = 0.0


@torch.no_grad()
def begin_alike(
    held: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor], *, perturbed: bool
) -> None:
    """Fills tensors with those that another run has saved, or with values off by rounding."""
    generator = torch.Generator().manual_seed(1)
    for name in sorted(held.keys() & saved.keys()):
        value = saved[name]
        if perturbed and name.startswith("values/"):
            signs = torch.randint(2, value.shape, generator=generator) * 2 - 1
            value = value * (1 + signs * precision(value.dtype))
        held[name].copy_(value)


class Meeting:
    """Processes that each stand for one worker of a loop, which meet in a directory.

    They share no code with the servers and the collectives that they are to judge.
    """

    def __init__(self, directory: str, rank: int, size: int) -> None:
        torch: Any = distributed
        store = torch.FileStore(f"{directory}/meeting", size)
        self._group = torch.ProcessGroupGloo(store, rank, size, _WAIT)

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
