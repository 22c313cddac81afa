"""Local SGD: a worker trains locally for some steps, and then exchanges the difference.

Between two exchanges the user's optimizer updates the worker's values step by step. At an exchange
the worker pushes a delta, `pulled - current`, and receives new values. The servers treat a delta as
a gradient: it is pushed, counted, acknowledged and repeated in the same way.

Sources: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data
(AISTATS 2017), algorithm 1; Douillard et al., DiLoCo (2023), algorithm 1.
"""

from __future__ import annotations

from typing import Unpack

import msgspec
import torch
from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes

from trireme.errors import CheckpointError
from trireme.ps.client.lanes import ClientOptions
from trireme.ps.client.server_links import Membership
from trireme.ps.flat import FlatModel
from trireme.ps.messages import OptimizerSpec, PushFields, Span
from trireme.ps.optimizers import check_optimizer, export_state, restore_state
from trireme.ps.results import PushResult, after_the_end
from trireme.ps.rule import Rule
from trireme.session.backends.base import FirstState, joined_spans
from trireme.session.backends.servers import ServerBackend
from trireme.session.backends.together import Processes
from trireme.session.checkpoint import CheckpointData
from trireme.session.checkpoint.restored import JobState

_LOCAL = ("local optimizer, even", "local optimizer, odd")
"""The topics of each worker's optimizer state after an exchange, in turn: the state after one
exchange is read until the next one has ended, and must not be replaced before."""
_UNSENT = "/unsent"
"""The suffix, behind a parameter's name, of the residual that packing has left of its deltas."""
_RESTORED = "restored optimizer of worker:"
"""The prefix of the topics of the states that a checkpoint has for each worker."""
_SAVING = "saving"
"""The topic of the steps from whose values the exchanges begin after which the chief saves.

It shares the last two, as it may have begun the next when another worker reads about this one."""


class _Left(msgspec.Struct, frozen=True, array_like=True):
    step: int
    state: bytes


_LEFT = msgspec.msgpack.Decoder(_Left)  # made at import: threads that make one at once crash


class LocalSgd(ServerBackend):
    """The backend of a worker whose own optimizer makes the steps between two exchanges.

    Its state is shared at shard 0, where the chief reads that of all workers for a checkpoint.
    """

    trains_locally = True

    def __init__(
        self,
        options: ClientOptions,
        membership: Membership,
        flat: FlatModel,
        optimizer: torch.optim.Optimizer,
        processes: Processes | None = None,
    ) -> None:
        check_optimizer(optimizer)
        super().__init__(options, membership, flat, processes)
        self.saves = False
        self._turn, self._left = 0, -1  # the topic of the state left last, and its step
        self._rule = Rule()
        self._hurries = False  # whether the period of a synchronous job ends with its next step
        self._model = flat
        self._optimizer = optimizer
        self._base = [torch.empty_like(value) for value in flat.values]
        self._requests: list[int] = []  # as chief: the content of the topic `saving`
        self._known_requests: set[int] = set()  # the content that this worker saw last
        self._begin_period(1)

    def _begin_period(self, length: int) -> None:
        self._length = length
        self._made = 0  # steps in this period so far
        self._own = 0  # those among them that this worker had examples for
        self._weight = 0.0  # the number of examples in these steps
        self._examples: list[Span] = []
        self._untouched: set[int] | None = None  # the parameters that no step had a gradient for
        self._sent = False  # whether the delta has been sent

    @torch.no_grad()
    def _begin_here(self) -> None:
        for base, value in zip(self._base, self._model.values, strict=True):
            base.copy_(value)
        self._begin_period(self._rule.steps_from(self.step))

    def start(self, optimizer: OptimizerSpec, rule: Rule, first: FirstState) -> None:
        self._rule, self._made = rule, 0
        super().start(optimizer, rule, first)
        self._begin_here()

    @property
    def global_step(self) -> int:
        return self.step + self._made

    @property
    def pending_steps(self) -> int:
        return self._own

    def push(self, weight: float, **fields: Unpack[PushFields]) -> None:
        """As `Backend.push`; sends a delta at the end of a period."""
        weight = self._united(weight, fields)
        if self.stopping:
            raise after_the_end(self.options.worker, self.global_step)
        self.check()  # else a failure would show only at the next exchange
        flat = self._model
        flat.gather_gradients()
        if weight > 0:
            before = set(flat.absent) if self._untouched is None else self._untouched
            self._untouched = before.intersection(flat.absent)
            self._optimizer.step()
            self._own += 1
        self._made += (counted := fields.get("steps", 1))
        self._weight += weight
        self._examples += fields.get("examples", ())
        ends = not counted or (self._hurries and self._rule.synchronous)
        if ends or self._made >= self._length:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        """Pushes what the steps of this period have changed."""
        if self.wants_save:  # all workers of this round know of it before the round closes
            self._requests = [*self._requests[-1:], self.step]
            self.share(_SAVING, msgspec.msgpack.encode(self._requests))
        flat = self._model
        flat.take_back_values()
        for base, value, gradient in zip(self._base, flat.values, flat.gradients, strict=True):
            torch.sub(base, value, out=gradient)
        flat.restore_gradients()  # they hold the deltas
        super(ServerBackend, self).push(
            self._weight,
            examples=joined_spans(self._examples),
            steps=self._made,
            absent=tuple(sorted(self._untouched or ())),
        )
        self._sent = True

    def wait(self) -> PushResult | None:  # type: ignore[override]  # None between exchanges
        result = self._exchanged()
        self._spread(result)
        return result

    def complete(self) -> PushResult | None:
        if self._made and not self.stopping:
            self._exchange()
        return self.wait()

    def _exchanged(self) -> PushResult | None:
        self.saves = False
        if not self._sent:
            return None
        began = self.step
        result = msgspec.structs.replace(super(ServerBackend, self).wait(), steps=self._own)
        self._begin_here()
        left = self.collect(_SAVING).values()
        steps = {step for data in left for step in msgspec.msgpack.decode(data, type=list[int])}
        known, self._known_requests = self._known_requests, steps
        self.saves = began in steps if self._rule.synchronous else not steps <= known
        if self.saves:
            self.leave_state()
        return result

    def stop(self, reason: str) -> int:
        """As `Backend.stop`; in synchronous jobs a local period ends with its next step."""
        self._hurries = True
        return super().stop(reason)

    def leave_state(self) -> None:
        if self._made:
            return  # it would be of a step that no server has
        state = export_state(self._optimizer, self._model.parameters)
        if self._rule.codec != "none":
            residuals = self.residuals.export()
            state |= {f"{name}{_UNSENT}": residual for name, residual in residuals.items()}
        if self.step != self._left:
            self._left, self._turn = self.step, 1 - self._turn
        self.share(_LOCAL[self._turn], _encoded(self.step, state))

    def states(self, step: int) -> dict[str, torch.Tensor]:
        # Of a worker that has shared nothing after the exchange, the state shared before.
        both = [(w, _LEFT.decode(d)) for t in _LOCAL for w, d in self.collect(t).items()]
        both.sort(key=lambda each: (each[0], each[1].step))
        left = {worker: each.state for worker, each in both if each.step <= step}
        return {
            f"{worker}/{name}": tensor
            for worker, state in left.items()
            for name, tensor in load_bytes(state).items()
        }

    def hand_out_states(self, data: CheckpointData, then: JobState, workers: int) -> str:
        if then.applies == "gradients":
            # The servers ran the same optimizer before: every worker continues with its state.
            states = {worker: dict(data.optimizer) for worker in range(workers)}
        elif then.workers == workers:
            states = _local_states(data, workers)
        else:
            return (
                f"the checkpoint has the optimizers of {then.workers} workers, and this job has "
                f"{workers}: each worker's optimizer begins with fresh state"
            )
        for worker, state in states.items():
            if state or not data.local:  # else it begins with fresh state, and says so
                self.share(f"{_RESTORED}{worker}", _encoded(data.step, state))
        return ""

    def take_state(self) -> bool:
        for data in self.collect(f"{_RESTORED}{self.options.worker}").values():
            left = _LEFT.decode(data)
            if left.step == self.step:  # not in a worker that starts later
                tensors = load_bytes(left.state)
                unsent = [name for name in tensors if name.endswith(_UNSENT)]
                self.residuals.restore(
                    {name.removesuffix(_UNSENT): tensors.pop(name) for name in unsent}
                )
                restore_state(self._optimizer, self._model.parameters, tensors)
                return True
        return False


def _local_states(data: CheckpointData, workers: int) -> dict[int, dict[str, torch.Tensor]]:
    states: dict[str, dict[str, torch.Tensor]] = {str(worker): {} for worker in range(workers)}
    for name, tensor in data.local.items():
        worker, _, key = name.partition("/")
        if worker not in states:
            raise CheckpointError(
                f"the checkpoint of step {data.step} has state {name!r} of a worker's optimizer, "
                f"and it was saved by {workers} workers"
            )
        states[worker][key] = tensor
    return {int(worker): state for worker, state in states.items()}


def _encoded(step: int, state: dict[str, torch.Tensor]) -> bytes:
    tensors = {name: tensor.contiguous() for name, tensor in state.items()}
    return msgspec.msgpack.encode(_Left(step, save_bytes(tensors)))
