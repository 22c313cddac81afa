"""Training by parameter servers: pushes gradients, and receives values in the answer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Unpack

import torch

from trireme.ps.client.client import Client
from trireme.ps.client.lanes import ClientOptions
from trireme.ps.client.server_links import Membership
from trireme.ps.flat import FlatModel, NamedGroups
from trireme.ps.messages import Leased, LeaseFields, OptimizerSpec, PushFields
from trireme.ps.results import PushResult
from trireme.ps.rule import Rule
from trireme.session.backends.base import Backend, FirstState
from trireme.session.backends.together import Processes


class ServerBackend(Client, Backend):
    """The backend of parameter servers; see `Client` for the first arguments.

    The `processes` compute this worker's updates together; this is rank 0 of them.
    """

    # Why this worker has asked for the job's end, which is lost with all copies of shard 0.
    _stop_reason: str | None = None
    # what a checkpoint has of the optimizer's state, also of parameters to come
    _restored: Mapping[str, torch.Tensor] = {}

    def __init__(
        self,
        options: ClientOptions,
        membership: Membership,
        flat: FlatModel,
        processes: Processes | None = None,
    ) -> None:
        super().__init__(options, membership, flat)
        self._processes = processes
        if processes is not None:
            self.group = processes.group

    def start(self, optimizer: OptimizerSpec, rule: Rule, first: FirstState) -> None:
        alone = self._processes is None and self.extension is None
        self.grows = alone and rule.codec == "none" and not self.trains_locally
        loaded = self.attach(optimizer, rule, self.extension)
        state = None if loaded else first()
        if state is not None:
            self.load(state)
            self._restored = state.optimizer
        if self._stop_reason is not None:
            super().stop(self._stop_reason)
        self.pull()
        self._spread(None)

    def add_parameters(  # type: ignore[override]  # the state is this worker's own
        self, groups: NamedGroups, optimizer: OptimizerSpec
    ) -> None:
        super().add_parameters(groups, optimizer, self._restored)

    def come_back(self, incarnation: int) -> None:
        if incarnation > self.options.incarnation:
            self.renew(incarnation)

    def push(self, weight: float, **fields: Unpack[PushFields]) -> None:
        super().push(self._united(weight, fields), **fields)

    def _united(self, weight: float, fields: PushFields) -> float:
        if (processes := self._processes) is not None:
            processes.gather()
            weight, fields["examples"], reasons = processes.unite(
                weight, fields.get("examples", ())
            )
            for reason in reasons:
                self.stop(reason)
        return weight

    def wait(self) -> PushResult | None:  # type: ignore[override]  # None between exchanges
        result = self._run(self._protocol.wait())
        self._spread(result)
        return result

    def _spread(self, result: PushResult | None) -> None:
        if self._processes is not None:
            self._processes.spread(self.global_step, self.stopping, result)

    def lease(
        self, dataset: str, size: int, batch: int, count: int, **fields: Unpack[LeaseFields]
    ) -> Leased:
        ask = super().lease
        if self._processes is None:
            return ask(dataset, size, batch, count, **fields)
        return self._processes.deal(partial(ask, dataset, size), dataset, batch, count, fields)

    def stop(self, reason: str) -> int:
        self._stop_reason = reason
        return super().stop(reason)

    def drain(self) -> int:
        step = super().drain()
        if self._processes is not None:
            self._processes.spread(step, True, None)
        return step
