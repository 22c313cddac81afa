"""Local SGD: a worker trains locally for some steps, and then exchanges the difference.

Between two exchanges the user's optimizer updates the worker's values step by step. At an exchange
the worker pushes a delta, `pulled - current`, and receives new values. The servers treat a delta as
a gradient: it is pushed, counted, acknowledged and repeated in the same way.

Sources: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data
(AISTATS 2017), algorithm 1; Douillard et al., DiLoCo (2023), algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trireme.ps.flat import FlatModel
from trireme.ps.messages import Span
from trireme.ps.optimizers import check_optimizer
from trireme.ps.rule import Rule


def period_length(rule: Rule, step: int, end: int | None) -> int:
    """Returns the number of local steps that a worker makes from a global step on.

    Synchronous periods end at multiples of `every`, so that a resumed job, or a worker that joins
    later, has the same periods. No period goes beyond the end of the job.
    """
    length = rule.period - (step % rule.period if rule.synchronous else 0)
    return length if end is None else max(1, min(length, end - step))


class LocalSteps:
    """The steps of a worker's own optimizer since the last exchange."""

    def __init__(self, flat: FlatModel, optimizer: torch.optim.Optimizer) -> None:
        check_optimizer(optimizer)
        self.optimizer = optimizer
        self.rule = Rule()
        self.hurries = False  # whether the period of a synchronous job ends with its next step
        self._flat = flat
        self._base = [torch.empty_like(value) for value in flat.values]
        self._begin(1)

    def _begin(self, length: int) -> None:
        self._length = length
        self.made = 0  # steps in this period so far
        self.weight = 0.0  # the number of examples in these steps
        self.examples: list[Span] = []
        self.untouched: set[int] | None = None  # the parameters that no step had a gradient for
        self.sent = False  # whether the delta has been sent

    @torch.no_grad()
    def begin(self, step: int) -> None:
        """Begins a period from the present values, which are of a global step."""
        for base, value in zip(self._base, self._flat.values, strict=True):
            base.copy_(value)
        self._begin(period_length(self.rule, step, self.rule.max_steps))

    def step(self, weight: float, examples: Sequence[Span]) -> bool:
        """Makes a step with the present gradients; returns whether the period ends with it."""
        self._flat.gather_gradients()
        if weight > 0:
            absent = self._flat.absent
            before = set(absent) if self.untouched is None else self.untouched
            self.untouched = before.intersection(absent)
            self.optimizer.step()
        self.made += 1
        self.weight += weight
        self.examples += examples
        return (self.hurries and self.rule.synchronous) or self.made >= self._length

    @torch.no_grad()
    def write_delta(self) -> None:
        """Replaces the gradients by what the steps of this period have changed."""
        flat = self._flat
        flat.take_back_values()
        for base, value, gradient in zip(self._base, flat.values, flat.gradients, strict=True):
            torch.sub(base, value, out=gradient)
        flat.restore_gradients()  # they hold the deltas
