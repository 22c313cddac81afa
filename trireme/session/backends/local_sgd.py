"""Local SGD: a worker trains locally for some steps, and then exchanges the difference.

Between two exchanges the user's optimizer updates the worker's values step by step. At an exchange
the worker pushes a delta, `pulled - current`, and receives new values. The servers treat a delta as
a gradient: it is pushed, counted, acknowledged and repeated in the same way.

Sources: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data
(AISTATS 2017), algorithm 1; Douillard et al., DiLoCo (2023), algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from trireme.ps.client.server_links import ClientOptions, Membership
from trireme.ps.flat import FlatModel
from trireme.ps.messages import OptimizerSpec, Span
from trireme.ps.optimizers import check_optimizer
from trireme.ps.results import PushResult
from trireme.ps.rule import Rule
from trireme.ps.termination import after_the_end
from trireme.session.backends.base import FirstState, joined_spans
from trireme.session.backends.local_optimizers import LocalOptimizers
from trireme.session.backends.parameter_server import ParameterServer

_SAVING = "saving"
"""The topic under which the chief shares after which exchanges it saves.

An exchange is identified by the step of the values that it began from, on which all workers agree
in rounds. The chief shares the last two, because it may have begun the next exchange when another
worker reads about this one."""


def period_length(rule: Rule, step: int, end: int | None) -> int:
    """Returns the number of local steps that a worker makes from a global step on.

    Synchronous periods end at multiples of `every`, so that a resumed job, or a worker that joins
    later, has the same periods. No period goes beyond the end of the job.
    """
    length = rule.period - (step % rule.period if rule.synchronous else 0)
    return length if end is None else max(1, min(length, end - step))


@dataclass
class _Period:
    """The local steps of a worker since the last exchange.

    Attributes:
        length: the number of steps in the period.
        made: the number of steps made so far.
        weight: the number of examples in these steps.
        examples: the positions of the examples.
        untouched: the parameters that no step had a gradient for; None before the first step.
        sent: whether the delta has been sent.
    """

    length: int = 1
    made: int = 0
    weight: float = 0.0
    examples: list[Span] = field(default_factory=list)
    untouched: set[int] | None = None
    sent: bool = False


class LocalSgd(ParameterServer):
    """The backend of local SGD: the user's optimizer makes the steps, servers combine deltas.

    Attributes:
        rule: the rule by which deltas become steps; set by `start`.
    """

    def __init__(
        self,
        options: ClientOptions,
        membership: Membership,
        flat: FlatModel,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        check_optimizer(optimizer)
        super().__init__(options, membership, flat)
        self.saves = False
        self.local_optimizers: LocalOptimizers = LocalOptimizers(self, flat, optimizer)
        self._model = flat
        self._optimizer = optimizer
        self.rule = Rule()
        self._end: int | None = None
        self._hurries = False
        self._base = [torch.empty_like(value) for value in flat.values]
        self._period = _Period()
        self._asks: list[int] = []  # as chief: the content of the topic `saving`
        self._heard: set[int] = set()  # the content that this worker saw last

    @property
    def global_step(self) -> int:
        return self.step + self._period.made

    @property
    def pending_steps(self) -> int:
        return self._period.made

    def start(self, optimizer: OptimizerSpec, rule: Rule, first: FirstState) -> None:
        self.rule = self.local_optimizers.rule = rule
        self._end = rule.max_steps
        super().start(optimizer, rule, first)
        self._begin()

    def stop(self, reason: str) -> int:
        """As `Backend.stop`; in synchronous jobs this worker's period ends with its next step."""
        self._hurries = True
        return super().stop(reason)

    def push(self, weight: float, *, examples: Sequence[Span] = (), **others: Any) -> None:
        """Makes a local step with the present gradients; sends the delta when the period ends."""
        if self.stopping:
            raise after_the_end(self.options.worker, self.global_step)
        self.check()  # else a failure would show only at the next exchange
        self._model.gather_gradients()
        period = self._period
        if weight > 0:
            absent = self._model.absent
            before = set(absent) if period.untouched is None else period.untouched
            period.untouched = before.intersection(absent)
            self._optimizer.step()
        period.made += 1
        period.weight += weight
        period.examples += examples
        if (self._hurries and self.rule.synchronous) or period.made >= period.length:
            self._send()

    def wait(self) -> PushResult | None:  # type: ignore[override]  # None between exchanges
        self.saves = False
        if not self._period.sent:
            return None
        began = self.step
        result = msgspec.structs.replace(super().wait(), steps=self._period.made)
        self._begin()
        self._agree_to_save(began)
        return result

    def complete(self) -> PushResult | None:
        if self._period.made and not self.stopping:
            self._send()
        return self.wait()

    @torch.no_grad()
    def _begin(self) -> None:
        """Begins a period from the present values."""
        for base, value in zip(self._base, self._model.values, strict=True):
            base.copy_(value)
        self._period = _Period(period_length(self.rule, self.step, self._end))

    @torch.no_grad()
    def _send(self) -> None:
        """Pushes the delta."""
        if self.wants_save:  # all workers of this round know of it before the round closes
            self._asks = [*self._asks[-1:], self.step]
            self.share(_SAVING, msgspec.msgpack.encode(self._asks))
        flat = self._model
        flat.take_back_values()
        for base, value, gradient in zip(self._base, flat.values, flat.gradients, strict=True):
            torch.sub(base, value, out=gradient)
        flat.restore_gradients()  # they hold the deltas
        period = self._period
        super().push(
            period.weight,
            examples=joined_spans(period.examples),
            steps=period.made,
            absent=tuple(sorted(period.untouched or ())),
        )
        period.sent = True

    def _agree_to_save(self, began: int) -> None:
        """Learns whether the chief saves after this exchange, and shares the state if so."""
        left = self.collect(_SAVING).values()
        asked = {step for data in left for step in msgspec.msgpack.decode(data, type=list[int])}
        self.saves = began in asked if self.rule.synchronous else not asked <= self._heard
        self._heard = asked
        if self.saves:
            self.local_optimizers.leave()
