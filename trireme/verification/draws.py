"""Random numbers of a run that is compared: dropout is off, and what else is drawn is told."""

from __future__ import annotations

import random
import sys
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

_KERNELS = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
OFF = "dropout is off in all runs: each worker, and one process, would drop others"


def states() -> object:
    """Returns what tells whether somebody has drawn since from torch, NumPy or `random`."""
    numpy: Any = np.random.get_state()
    drawn = torch.get_rng_state().numpy().tobytes()
    return drawn, hash((numpy[1].tobytes(), numpy[2])), hash(random.getstate())


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
