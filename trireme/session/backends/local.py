"""Training in a lone process, by the user's own optimizer.

The values are the model's own memory, so that every `torch.optim` optimizer works. A ledger deals
the examples as in a large job, so that a checkpoint continues under any number of workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import nn

from trireme.errors import Rejected
from trireme.ps.extension import HeldExtension, held_extension
from trireme.ps.extra import ExtraRequest
from trireme.ps.flat import FlatModel
from trireme.ps.leader.example_ledgers import ExampleLedgers
from trireme.ps.messages import Applied, Lease, Leased, LeaseFields, OptimizerSpec, PushFields, Span
from trireme.ps.optimizers import check_optimizer, members, named_state, restore_state
from trireme.ps.results import PushResult, after_the_end
from trireme.ps.rule import Rule
from trireme.ps.snapshot import ModelState, lacking
from trireme.session.backends.base import Backend, FirstState
from trireme.session.model.trained import Trained
from trireme.tensors import fill_local, local_part, to_local

KINDS = ("values", "average", "state")
"""The kinds of tensors in a state: its values, their moving average, the optimizer's state."""

_WHOLE = (0, 1)  # the bounds of one shard that has all


class Local(Backend):
    """The backend of a lone process, and the base of that of processes that step together."""

    step: int = 0
    stopping: bool = False

    def __init__(
        self, held: Trained, optimizer: torch.optim.Optimizer, replicas: int = 1, replica: int = 0
    ) -> None:
        check_optimizer(optimizer)
        self._held = held
        self._names = frozenset(n for n, p in held.parameters.items() if p.requires_grad)
        self._optimizer = optimizer
        self._replicas = range(replicas)
        self._replica = replica
        self._rule = Rule()
        self._end: int | None = None
        self._ledgers = ExampleLedgers()  # each process has the same ones
        self._ledgers.members(self._replicas)
        self._ledgers.own = replica
        self._average: dict[str, torch.Tensor] = {}
        self._extra: HeldExtension | None = None
        self._unclaimed: Mapping[str, torch.Tensor] = {}  # a checkpoint's, of parameters to come
        self.grows = isinstance(held, FlatModel)

    def start(self, optimizer: OptimizerSpec, rule: Rule, first: FirstState) -> None:
        self._rule, self._end = rule, rule.max_steps
        if self.group is None and isinstance(self._held, FlatModel):
            self._held.keeps_sparse = True  # the user's optimizer takes them, or says why not
        if self.extension is not None:
            self._extra = held_extension(self.extension.shown, _WHOLE, 0)
        self._ledgers.interleave = self.together or rule.synchronous
        self._take(self._agreed(first()))

    def _agreed(self, state: ModelState | None) -> ModelState:
        assert state is not None, "a lone process is chief"
        return state

    @torch.no_grad()
    def _take(self, state: ModelState) -> None:
        self.step = state.step
        for name, parameter in self._held.parameters.items():
            if name in state.values:
                fill_local(parameter, state.values[name])
        if self._rule.average is not None:
            known = state.average or state.values
            self._average = {}
            for name, parameter in self._trained():
                average = torch.zeros_like(parameter.detach())
                fill_local(average, known.get(name, parameter.detach()))
                self._average[name] = average
        self._unclaimed = dict(state.optimizer) if self.grows else {}
        if state.optimizer:
            restore_state(self._optimizer, self._held.parameters, state.optimizer, local_part)
        if self._extra is not None and self.extension is not None and state.extra:
            self._extra.load(self.extension.tensors(state.extra, _WHOLE, 0), state.step)
        self._ledgers.restore(state.consumed, state.sizes, state.orders)
        self.stopping = self._ended

    def grow(self, digest: int) -> None:
        parameters = self._held.parameters
        added = {name: each for name, each in parameters.items() if name not in self._names}
        self._names = frozenset(parameters)
        if self._rule.average is not None:
            for name, parameter in added.items():
                self._average.setdefault(name, parameter.detach().clone())
        for key, tensor in self._unclaimed.items():  # as a job that resumes unfreezes a layer again
            name, _, entry = key.rpartition("/")
            if name in added:
                for each in members(self._optimizer):
                    if any(p is added[name] for g in each.param_groups for p in g["params"]):
                        each.state[added[name]][entry] = tensor.clone()

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        """Returns the parameters that the job trains, also those that the program froze later."""
        return [(n, p) for n, p in self._held.parameters.items() if n in self._names]

    @property
    def _ended(self) -> bool:
        return self._end is not None and self.step >= self._end

    def push(self, weight: float, **fields: Unpack[PushFields]) -> None:
        if self.stopping:
            raise after_the_end(0 if self.group is None else self.group.rank, self.step)
        if self.group is None:
            self._held.collect_gradients()
        self._apply(fields.get("examples", ()), skip=weight == 0)
        extra = fields.get("extra")
        if self._extra is not None and weight > 0 and extra is not None:
            self._extra.apply(extra.divided(_WHOLE).of_shard(0), self.step + 1)

    def pull_extra(self, request: ExtraRequest) -> Any:
        assert self._extra is not None
        parts = request.divided(_WHOLE)
        return parts.united([self._extra.pull(parts.of_shard(0))])

    @torch.no_grad()
    def _apply(self, examples: Sequence[Span], *, skip: bool) -> None:
        if not skip:
            step, closure = self._optimizer.step, self.closure
            self.returned = step() if closure is None else step(closure)
            rule = self._rule.average
            if rule is not None:
                weight = 1 - rule.decay_at(self.step + 1)
                for name, parameter in self._trained():
                    to_local(self._average[name]).lerp_(to_local(parameter.detach()), weight)
        self._ledgers.finish(self._replica, examples)

    def wait(self) -> PushResult:
        self.step += 1
        self.stopping = self._ended
        return PushResult(Applied(self.step), self.step, 0, self.stopping)

    def lease(
        self, dataset: str, size: int, batch: int, count: int, **fields: Unpack[LeaseFields]
    ) -> Leased:
        request = Lease.of(dataset, size, batch, count, 0, fields)
        try:
            # Positions returned before a resume go to the first request: all request in one order.
            leased = [self._ledgers.lease(replica, request).spans for replica in self._replicas]
        except ValueError as error:
            raise Rejected(str(error)) from None
        # All replicas make as many steps: at the end some make them without examples.
        longest, own = max(map(len, leased)), leased[self._replica]
        empty = Span(dataset, request.until, request.until)
        spans = own + (empty,) * (longest - len(own))
        epoch = self._ledgers.epoch(dataset, self._replica)
        return Leased(spans, request.until > 0 and not longest, epoch)

    def frontier(self, dataset: str) -> int:
        """Returns the position from which on nothing of a data set was dealt to any replica."""
        return self._ledgers.frontier(dataset)

    def stop(self, reason: str) -> int:
        soonest = self.step + 1
        self._end = soonest if self._end is None else min(self._end, soonest)
        return self._end

    def drain(self) -> int:
        return self.step  # there is no other worker

    def snapshot(self, *, state: bool) -> ModelState:
        tensors, lacks = self._tensors(state=state)
        copies = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
        found = self._state(copies, self._ledgers.consumed() if state else (), lacks)
        if not state or self._extra is None or self.extension is None:
            return found
        return replace(found, extra=self.extension.joined([self._extra.copy()]))

    def _tensors(self, *, state: bool) -> tuple[dict[str, torch.Tensor], tuple[str, ...]]:
        """Returns what this process holds, by `KIND/NAME`, and what it could not read."""
        # The model has the frozen ones; where no process holds all of it, each saves what it has.
        saved = self._held.parameters.items() if self.streams else self._trained()
        tensors = {f"values/{name}": parameter.detach() for name, parameter in saved}
        if self._average:
            tensors |= {f"average/{name}": self._average[name] for name, _ in self._trained()}
        if state:
            try:
                mine = named_state(self._optimizer, self._held.parameters)
                tensors |= {f"state/{name}": tensor for name, tensor in mine.items()}
            except Exception as error:  # of an odd optimizer: the values must not be lost with it
                return tensors, (lacking("the optimizer's state", error),)
        return tensors, ()

    def _state(
        self,
        tensors: Mapping[str, torch.Tensor],
        consumed: tuple[Span, ...],
        lacks: tuple[str, ...] = (),
    ) -> ModelState:
        values, average, optimizer = unpacked(tensors)
        return ModelState(
            self.step,
            values,
            average,
            optimizer,
            consumed=consumed,
            sizes=self._ledgers.sizes(),
            orders=self._ledgers.orders(),
            lacks=lacks,
        )


def unpacked(tensors: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Returns the tensors of each of `KINDS` by name, from tensors by `KIND/NAME`."""
    named: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in KINDS}
    for key, tensor in tensors.items():
        kind, _, name = key.partition("/")
        named[kind][name] = tensor
    return list(named.values())
