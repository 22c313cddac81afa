"""`SignMomentum`: a step of `lr` against the sign of the gradients' moving average."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from trireme.ps.optimizers import Entry


class SignMomentum(torch.optim.Optimizer):
    """Steps by the sign of a moving average of gradients."""

    def __init__(self, params: ParamsT, lr: float = 1e-3, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "average" not in state:
                    state["average"] = torch.zeros_like(parameter)
                state["average"].lerp_(parameter.grad, 1 - group["beta"])
                parameter.sub_(state["average"].sign(), alpha=group["lr"])


SIGN_MOMENTUM = Entry(SignMomentum, "lr beta", "average", flushes=False)
