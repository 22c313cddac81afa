"""Training by parameter servers: pushes gradients or deltas, and receives values in the answer."""

from __future__ import annotations

from functools import partial
from typing import Unpack

import msgspec
import torch

from trireme.ps.client.client import Client
from trireme.ps.client.server_links import ClientOptions, Membership
from trireme.ps.flat import FlatModel
from trireme.ps.messages import Leased, LeaseTerms, OptimizerSpec, PushTerms
from trireme.ps.results import PushResult, after_the_end
from trireme.ps.rule import Rule
from trireme.session.backends.base import Backend, FirstState, joined_spans
from trireme.session.backends.local_sgd import LocalSgd
from trireme.session.backends.together import Processes


class ParameterServer(Client, Backend):
    """The backend of parameter servers; see `Client` for the first arguments.

    Args:
        options: the identity of this worker, and how it connects.
        membership: knows the newest view.
        flat: the worker's model.
        optimizer: makes the steps between two exchanges, where the worker trains locally.
        processes: the processes that compute this worker's updates together; this is rank 0.
    """

    # Why this worker has asked for the job's end, which is lost with all copies of shard 0.
    _stop_reason: str | None = None

    def __init__(
        self,
        options: ClientOptions,
        membership: Membership,
        flat: FlatModel,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        processes: Processes | None = None,
    ) -> None:
        super().__init__(options, membership, flat)
        self._processes = processes
        if processes is not None:
            self.group = processes.group
        if optimizer is not None:
            self.saves = False
            self.local = LocalSgd(self, flat, optimizer)

    def start(self, optimizer: OptimizerSpec, rule: Rule, first: FirstState) -> None:
        loaded = self.attach(optimizer, rule, self.extension)
        state = None if loaded else first()
        if state is not None:
            self.load(state)
        if self._stop_reason is not None:
            super().stop(self._stop_reason)
        self.pull()
        if self.local is not None:
            self.local.rule = rule
            self.local.begin(self.step)
        self._spread(None)

    def come_back(self, incarnation: int) -> None:
        if incarnation > self.options.incarnation:
            self.renew(incarnation)

    @property
    def global_step(self) -> int:
        return self.step if self.local is None else self.step + self.local.made

    @property
    def pending_steps(self) -> int:
        return 1 if self.local is None else self.local.made

    def push(self, weight: float, **terms: Unpack[PushTerms]) -> None:
        """As `Backend.push`; a worker that trains locally sends a delta at the end of a period.

        Raises:
            ConfigurationError: this worker makes no more updates.
            JobFailed: the job has ended meanwhile; says why.
        """
        if (processes := self._processes) is not None:
            processes.gather()
            weight, examples, reasons = processes.unite(weight, terms.get("examples", ()))
            terms["examples"] = examples
            for reason in reasons:
                self.stop(reason)
        if self.local is None:
            super().push(weight, **terms)
            return
        if self.stopping:
            raise after_the_end(self.options.worker, self.global_step)
        self.check()  # else a failure would show only at the next exchange
        if self.local.step(weight, terms.get("examples", ())):
            self._exchange(self.local)

    def wait(self) -> PushResult | None:  # type: ignore[override]  # None between exchanges
        result = super().wait() if self.local is None else self._exchanged(self.local)
        self._spread(result)
        return result

    def complete(self) -> PushResult | None:
        local = self.local
        if local is None:
            return None
        if local.made and not self.stopping:
            self._exchange(local)
        return self.wait()

    def _exchange(self, local: LocalSgd) -> None:
        if self.wants_save:  # all workers of this round know of it before the round closes
            local.request_save(self.step)
        local.write_delta()
        super().push(
            local.weight,
            examples=joined_spans(local.examples),
            steps=local.made,
            absent=tuple(sorted(local.untouched or ())),
        )
        local.sent = True

    def _exchanged(self, local: LocalSgd) -> PushResult | None:
        """Returns the result of an exchange, after which the next period begins; None for none."""
        self.saves = False
        if not local.sent:
            return None
        began = self.step
        result = msgspec.structs.replace(super().wait(), steps=local.made)
        local.begin(self.step)
        self.saves = local.save_requested(began)
        if self.saves:
            local.leave()
        return result

    def _spread(self, result: PushResult | None) -> None:
        if self._processes is not None:
            self._processes.spread(self.global_step, self.stopping, result)

    def lease(
        self, dataset: str, size: int, batch: int, count: int, **terms: Unpack[LeaseTerms]
    ) -> Leased:
        ask = super().lease
        if self._processes is None:
            return ask(dataset, size, batch, count, **terms)
        return self._processes.deal(partial(ask, dataset, size), dataset, batch, count, terms)

    def stop(self, reason: str) -> int:
        """As `Backend.stop`; in synchronous jobs a local period ends with its next step."""
        self._stop_reason = reason
        if self.local is not None:
            self.local.hurries = True
        return super().stop(reason)

    def drain(self) -> int:
        step = super().drain()
        if self._processes is not None:
            self._processes.spread(step, True, None)
        return step
