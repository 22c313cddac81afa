"""Random numbers of a run that is compared: dropout that follows the examples, and what is drawn.

The mask of dropout for an example follows from its position, whichever process computes it: then
one process that computes all examples drops what several drop. Where the examples cannot be told
in a layer's input, dropout is turned off, and the run says so.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from trireme.data.seeds import derive

_DROPOUT = 16

States = tuple[bytes, int, object]
"""Of the generators of torch, NumPy and `random`."""


def states() -> States:
    """Returns what tells whether somebody has drawn since."""
    numpy: Any = np.random.get_state()
    return (
        torch.get_rng_state().numpy().tobytes(),
        hash((numpy[1].tobytes(), numpy[2])),
        hash(random.getstate()),
    )


class Dropout:
    """Replaces the dropout of `torch.nn.functional` in this process.

    Args:
        follows: whether masks follow the examples; else dropout is off.
    """

    def __init__(self, *, follows: bool) -> None:
        self._follows = follows
        self._positions: Sequence[int] = ()
        self._calls = 0
        self.notes: set[str] = set()

    def examples(self, positions: Sequence[int]) -> None:
        """Names the examples of the next call of the model."""
        self._positions = positions

    def begin(self) -> None:
        """Begins a step."""
        self._calls = 0

    def install(self, model: nn.Module) -> None:
        """Replaces the functions, for the rest of the process."""
        places = {"dropout": 0, "dropout1d": 2, "dropout2d": 2, "dropout3d": 2}
        for name, dims in places.items():
            setattr(functional, name, self._replaced(getattr(functional, name), dims))
        attention = functional.scaled_dot_product_attention

        def attend(*args: Any, **kwargs: Any) -> torch.Tensor:
            if len(args) > 4:
                args = (*args[:4], self._off(args[4], "attention"), *args[5:])
            elif "dropout_p" in kwargs:
                kwargs["dropout_p"] = self._off(kwargs["dropout_p"], "attention")
            return attention(*args, **kwargs)

        functional.scaled_dot_product_attention = attend
        for layer in model.modules():
            if isinstance(layer, nn.RNNBase):
                layer.dropout = float(self._off(layer.dropout, "a recurrent layer"))

    def _off(self, p: Any, where: str) -> Any:
        if p:
            self.notes.add(f"dropout of {where} is off, in all runs")
        return 0.0

    def _replaced(self, original: Callable[..., torch.Tensor], dims: int) -> Callable[..., Any]:
        def dropped(
            input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
        ) -> torch.Tensor:
            if not training or p in (0.0, 1.0):
                return original(input, p, training, inplace)
            mask = self._mask(input, p, dims)
            if mask is None:
                self._off(p, "layers in whose inputs the examples cannot be told")
                return input
            return input.mul_(mask) if inplace else input * mask

        return dropped

    def _mask(self, input: torch.Tensor, p: float, dims: int) -> torch.Tensor | None:
        """Returns the factors of an input; None where its examples cannot be told."""
        self._calls += 1
        examples, shape = len(self._positions), input.shape
        if not self._follows or not examples or not shape:
            return None
        if shape[0] == examples or shape[0] % examples == 0:
            rows = shape if shape[0] == examples else (examples, shape[0] // examples, *shape[1:])
            swaps = False
        elif len(shape) > 1 and shape[1] == examples:
            rows, swaps = (examples, shape[0], *shape[2:]), True
        else:
            return None
        drawn = rows if not dims else (*rows[:dims], *(1 for _ in rows[dims:]))
        keep = torch.stack([self._row(place, drawn[1:], p) for place in self._positions])
        mask = keep.transpose(0, 1) if swaps else keep
        mask = mask if dims else mask.reshape(shape)
        return mask.to(input) / (1 - p)

    def _row(self, position: int, shape: Sequence[int], p: float) -> torch.Tensor:
        seed = derive(_DROPOUT, position, self._calls)
        return torch.rand(tuple(shape), generator=torch.Generator().manual_seed(seed)) >= p
