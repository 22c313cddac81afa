"""torch's fused optimizer kernels, called on state that `torch.optim` has made.

They are called as the fused path of `torch.optim`'s class of that name does after its checks: it
advances the step counters first, which the kernels rely on, then updates in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch


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

DIRECT = frozenset(_KERNELS)
"""The names of torch's classes that have such a kernel."""


class FusedKernel:
    """A kernel, bound to values of a parameter group and to their state.

    Args:
        group: the group's hyper-parameters.
        values: the tensors that the kernel updates, in place.
    """

    def __init__(
        self,
        name: str,
        group: Mapping[str, Any],
        values: list[torch.Tensor],
        states: Sequence[Mapping[str, Any]],
    ) -> None:
        fused = _KERNELS["AdamW" if group.get("decoupled_weight_decay") else name]
        self._fused, self._group, self._values = fused, group, values
        aside = not group.get("momentum", True)
        self._state = [
            [] if aside else [state[kind] for state in states if kind in state]
            for kind in fused.state
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

    def update(self, gradients: list[torch.Tensor], divisor: torch.Tensor | None) -> None:
        """Updates values and state in place.

        A float32 scalar `divisor` divides the gradients, in place; None does not.
        """
        for counter in self._counters:
            counter[0] += 1
        self._fused.update(
            self._values, gradients, *self._state, **self._settings, grad_scale=divisor
        )
