"""Finds updates that are too small for the precision of the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from trireme.ps.messages import Span
from trireme.session.worker.observer import Observer
from trireme.tensors import to_local

_STEPS = (10, 100, 1000)
"""The worker's updates that are looked at: early ones, and some after a warm-up."""
_SAMPLE = 4096
_NARROW = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


class LostUpdates(Observer):
    """Warns, once, where most updates of a step fall below the last place of the values."""

    def __init__(self, worker: Any) -> None:
        super().__init__(worker)
        self._updates = 0
        # Of each narrow parameter with a gradient: some values, and which of them are to move.
        self._before: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def before_update(self, weight: float, examples: Sequence[Span]) -> None:
        self._updates += 1
        self._before.clear()
        if self._updates not in _STEPS:
            return
        for name, parameter in self.worker.setup.trained.parameters.items():
            gradient = parameter.grad
            dense = gradient is not None and gradient.layout is torch.strided
            if gradient is not None and dense and parameter.dtype in _NARROW:
                self._before[name] = _sampled(parameter), _sampled(gradient) != 0

    def after_update(self) -> None:
        updated = lost = 0
        narrow = set[str]()
        for name, (values, moves) in self._before.items():
            parameter = self.worker.setup.trained.parameters[name]
            narrow.add(_NARROW[parameter.dtype])
            updated += int(moves.sum())
            lost += int((moves & (_sampled(parameter) == values)).sum())
        self._before.clear()
        if updated and 2 * lost > updated:
            self.worker.warn_as_chief(
                f"{100 * lost // updated}% of the values that have a gradient did not change in "
                f"update {self._updates}: the parameters are in {' and '.join(sorted(narrow))}, "
                "and updates below the last place of a value are lost, at every step. Train "
                'float32 parameters and compute in bfloat16 (precision="bfloat16", or '
                "torch.autocast in a loop of your own), or raise the learning rate"
            )
            self._updates = _STEPS[-1]  # it is said once


def _sampled(tensor: torch.Tensor) -> torch.Tensor:
    flat = to_local(tensor.detach()).reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLE)].clone()
