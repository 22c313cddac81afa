"""Adam over one flat vector by PyTorch's fused kernel, called with as little as it needs."""

from __future__ import annotations

import torch


class FusedAdam:
    """The optimizer of the peers' servers and of the limits: the best that PyTorch has.

    Args:
        values: 1-D, updated in place.
        learning_rate: Adam's; the rest is PyTorch's default.
    """

    def __init__(self, values: torch.Tensor, learning_rate: float = 1e-3) -> None:
        self.values = values
        self._rate = learning_rate
        self._lists = ([values], [torch.zeros_like(values)], [torch.zeros_like(values)])
        self._step = torch.zeros(())

    def step(self, gradient: torch.Tensor) -> None:
        """Updates the values."""
        values, first, second = self._lists
        self._step.add_(1)
        torch._fused_adam_(
            values,
            [gradient],
            first,
            second,
            [],
            [self._step],
            lr=self._rate,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.0,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )
