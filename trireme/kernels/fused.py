"""Updates by torch's fused optimizer kernels, bound to pieces of a shard and to their state.

They spare the bookkeeping of `Optimizer.step`, which takes longer than a kernel does for a small
model, and divide gradients themselves, which spares a pass over memory, where that is as precise.
They are called as the fused path of `torch.optim`'s class of that name does after its checks: it
advances the step counters first, which the kernels rely on, then updates in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch

from trireme.ps.flat import PartBuffer
from trireme.ps.shard.values.direct_steps import Bound, DirectSteps, DirectStepsType
from trireme.ps.shard.values.piece import Piece


class _Fused(NamedTuple):
    """One of torch's kernels."""

    update: Callable[..., None]  # the kernel
    state: tuple[str, ...]  # the kinds of state that it takes after the gradients, in this order
    hyper: tuple[str, ...]  # the hyper-parameters that it takes by torch's names
    fixed: Mapping[str, bool] = {}  # its other arguments


_ADAM = (
    ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"),
    ("lr", "weight_decay", "eps", "amsgrad", "maximize"),
)
_KERNELS = {
    "Adam": _Fused(torch._fused_adam_, *_ADAM),
    "AdamW": _Fused(torch._fused_adamw_, *_ADAM),
    "SGD": _Fused(
        torch._fused_sgd_,
        ("momentum_buffer",),
        ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"),
        {"is_first_step": False},
    ),
    "Adagrad": _Fused(
        torch._fused_adagrad_,
        ("sum", "step"),
        ("lr", "lr_decay", "weight_decay", "eps", "maximize"),
    ),
}
_SWITCHES = ("momentum", "decoupled_weight_decay")
"""Hyper-parameters whose change requires another kernel. A change of `momentum` also makes torch
begin or cease to use its buffers."""

DIRECT = frozenset(_KERNELS)  # the names of torch's classes that have such a kernel

_MOST_CALLS = 64  # bindings of kernels that are kept, one for each set of absent parameters


class _Kernel:
    """A kernel, bound to pieces of one parameter group, which it updates, and to their state."""

    def __init__(
        self,
        name: str,
        group: Mapping[str, Any],
        pieces: Sequence[Piece],
        states: Sequence[Mapping[str, Any]],
    ) -> None:
        self._fused = _KERNELS["AdamW" if group.get("decoupled_weight_decay") else name]
        self._group = group
        self._values = [piece.values for piece in pieces]
        self.places = [piece.place for piece in pieces]  # the positions of the pieces' segments
        self._pieces = [] if all(piece.is_whole for piece in pieces) else pieces
        aside = not group.get("momentum", True)
        self._state = [
            [] if aside else [state[kind] for state in states if kind in state]
            for kind in self._fused.state
        ]
        # Single numbers: these views of their memory are quicker than any call of torch's.
        self._counters = [s["step"].reshape(1).numpy().data for s in states if "step" in s]
        self._switches = self._switched()
        self.refresh()

    def refresh(self) -> bool:
        """Takes the group's present hyper-parameters; returns False if they need another kernel."""
        self._settings = {name: self._group[name] for name in self._fused.hyper}
        self._settings |= self._fused.fixed
        if "betas" in self._group:
            self._settings["beta1"], self._settings["beta2"] = self._group["betas"]
        return self._switches == self._switched()

    def _switched(self) -> list[bool]:
        return [bool(self._group.get(name)) for name in _SWITCHES]

    def update(self, gradients: PartBuffer, divisor: torch.Tensor | None) -> None:
        """Updates values and state in place.

        A float32 scalar `divisor` divides the gradients, in place; None does not.
        """
        if self._pieces:
            parts = [piece.gradient(gradients) for piece in self._pieces]
        else:
            parts = list(map(gradients.segments.__getitem__, self.places))
        for counter in self._counters:
            counter[0] += 1
        self._fused.update(self._values, parts, *self._state, **self._settings, grad_scale=divisor)


class FusedSteps(DirectSteps):
    """Steps by the kernels of one optimizer."""

    def __init__(self, name: str, *, wide: bool) -> None:
        self._name, self._wide = name, wide
        self._divisor = torch.tensor(1.0)  # the last one
        self._calls: dict[tuple[int, ...], list[_Kernel]] = {}  # by the absent parameters

    def step(self, gradients: PartBuffer, divisor: float, absent: tuple[int, ...]) -> bool:
        kernels = self._calls.get(absent)
        if kernels is None:
            return False
        scale = None if divisor == 1.0 else self._scale(divisor)
        if divisor != 1.0 and scale is None:
            for place in dict.fromkeys(place for kernel in kernels for place in kernel.places):
                gradients.segments[place].div_(divisor)
        for kernel in kernels:
            kernel.update(gradients, scale)
        return True

    def bind(self, absent: tuple[int, ...], found: Sequence[Bound]) -> None:
        if len(self._calls) >= _MOST_CALLS:
            self._calls.clear()
        self._calls[absent] = [_Kernel(self._name, *each) for each in found]

    def clear(self) -> None:
        self._calls.clear()

    def refresh(self) -> None:
        if not all([kernel.refresh() for kernel in chain.from_iterable(self._calls.values())]):
            self._calls.clear()

    def _scale(self, divisor: float) -> torch.Tensor | None:
        """Returns a divisor for the kernels, which take a float32; None where that is not precise.

        For narrow dtypes the kernels round the quotient later than `div_` does.
        """
        if self._divisor.item() != divisor:
            self._divisor = torch.tensor(divisor, dtype=torch.float32)
        return self._divisor if self._wide and self._divisor.item() == divisor else None


def open_steps(name: str, *, wide: bool) -> DirectSteps:
    """Returns the steps of an optimizer; those of the base class make none."""
    return FusedSteps(name, wide=wide) if name in DIRECT else DirectSteps()


FUSED = DirectStepsType(open_steps)
