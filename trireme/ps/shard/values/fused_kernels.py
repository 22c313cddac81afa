"""torch's fused optimizer kernels, called on state that `torch.optim` has made.

Each function here does what the fused path of `torch.optim`'s class of that name does, after its
checks: it advances the step counters first, which the kernels rely on, then updates in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

__all__ = ["DIRECT", "Kernel"]

Kernel = Callable[[Mapping[str, Any], list[torch.Tensor], torch.Tensor | None], None]
"""(hyper-parameters of a group, its gradients, what to divide them by: a float32 scalar) -> None;
values and state change in place, and gradients that are to be divided."""

Group = Mapping[str, Any]
Values = list[torch.Tensor]
States = Sequence[Mapping[str, Any]]


def _counters(states: States) -> tuple[Values, Callable[[], None]]:
    """Returns the step counters, and a function that adds one to each.

    They are single numbers, and these views of their memory are quicker than any call of torch's.
    """
    steps: Values = [state["step"] for state in states]
    numbers = [step.reshape(1).numpy().data for step in steps]

    def advance() -> None:
        for number in numbers:
            number[0] += 1

    return steps, advance


def _bind_adam(values: Values, states: States) -> Kernel:
    steps, advance = _counters(states)
    first = [state["exp_avg"] for state in states]
    second = [state["exp_avg_sq"] for state in states]
    largest = [state["max_exp_avg_sq"] for state in states if "max_exp_avg_sq" in state]

    def update(group: Group, gradients: Values, divisor: torch.Tensor | None) -> None:
        beta1, beta2 = group["betas"]
        decoupled = group.get("decoupled_weight_decay")
        advance()
        (torch._fused_adamw_ if decoupled else torch._fused_adam_)(
            values,
            gradients,
            first,
            second,
            largest,
            steps,
            amsgrad=group["amsgrad"],
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
            grad_scale=divisor,
            found_inf=None,
        )

    return update


def _bind_sgd(values: Values, states: States) -> Kernel:
    momenta = [state["momentum_buffer"] for state in states if "momentum_buffer" in state]

    def update(group: Group, gradients: Values, divisor: torch.Tensor | None) -> None:
        torch._fused_sgd_(
            values,
            gradients,
            momenta if group["momentum"] else [],
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            is_first_step=False,
            grad_scale=divisor,
            found_inf=None,
        )

    return update


def _bind_adagrad(values: Values, states: States) -> Kernel:
    sums = [state["sum"] for state in states]
    steps, advance = _counters(states)

    def update(group: Group, gradients: Values, divisor: torch.Tensor | None) -> None:
        advance()
        torch._fused_adagrad_(
            values,
            gradients,
            sums,
            steps,
            lr=group["lr"],
            lr_decay=group["lr_decay"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
            grad_scale=divisor,
            found_inf=None,
        )

    return update


DIRECT: Mapping[str, Callable[[Values, States], Kernel]] = {
    "Adam": _bind_adam,
    "AdamW": _bind_adam,
    "SGD": _bind_sgd,
    "Adagrad": _bind_adagrad,
}
"""By the name of torch's class: binds a kernel to the values of a group and to their state."""
