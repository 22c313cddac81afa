"""Local SGD: a worker trains locally for some steps, and then exchanges the difference.

Between two exchanges the user's optimizer updates the worker's values step by step. At an exchange
the worker pushes a delta, `pulled - current`, and receives new values. The servers treat a delta as
a gradient: it is pushed, counted, acknowledged and repeated in the same way.

Sources: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data
(AISTATS 2017), algorithm 1; Douillard et al., DiLoCo (2023), algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes

from trireme.ps.client.client import Client
from trireme.ps.flat import FlatModel
from trireme.ps.messages import Span
from trireme.ps.optimizers import check_optimizer, export_state, restore_state
from trireme.ps.rule import Rule

_LOCAL = ("local optimizer, even", "local optimizer, odd")
"""The topics of each worker's optimizer state after an exchange, in turn: the state after one
exchange is read until the next one has ended, and must not be replaced before."""
_UNSENT = "/unsent"
"""The suffix, behind a parameter's name, of the residual that packing has left of its deltas."""
_RESTORED = "restored optimizer of worker:"
"""The prefix of the topics of the states that a checkpoint has for each worker."""
_SAVING = "saving"
"""The topic under which the chief shares after which exchanges it saves.

An exchange is identified by the step of the values that it began from, on which all workers agree
in rounds. The chief shares the last two, because it may have begun the next exchange when another
worker reads about this one."""


class _Left(msgspec.Struct, frozen=True, array_like=True):
    """An optimizer's state, as a worker shares it at shard 0."""

    step: int
    state: bytes


def period_length(rule: Rule, step: int, end: int | None) -> int:
    """Returns the number of local steps that a worker makes from a global step on.

    Synchronous periods end at multiples of `every`, so that a resumed job, or a worker that joins
    later, has the same periods. No period goes beyond the end of the job.
    """
    length = rule.period - (step % rule.period if rule.synchronous else 0)
    return length if end is None else max(1, min(length, end - step))


class LocalSgd:
    """The steps of a worker's own optimizer since the last exchange, and that optimizer's state.

    The state is shared at shard 0, where the chief reads that of all workers for a checkpoint.
    """

    def __init__(self, client: Client, flat: FlatModel, optimizer: torch.optim.Optimizer) -> None:
        check_optimizer(optimizer)
        self.rule = Rule()
        self.hurries = False  # whether the period of a synchronous job ends with its next step
        self._client = client
        self._flat = flat
        self._optimizer = optimizer
        self._base = [torch.empty_like(value) for value in flat.values]
        self._requests: list[int] = []  # as chief: the content of the topic `saving`
        self._known_requests: set[int] = set()  # the content that this worker saw last
        self._begin(1)

    # -- the steps of a period ------------------------------------------------------------------

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
            self._optimizer.step()
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

    # -- the optimizer's state in checkpoints ---------------------------------------------------

    def request_save(self, step: int) -> None:
        """Requests, as chief, to save after the exchange that begins from the values of a step."""
        self._requests = [*self._requests[-1:], step]
        self._client.share(_SAVING, msgspec.msgpack.encode(self._requests))

    def save_requested(self, began: int) -> bool:
        """Returns whether the chief saves after the exchange that began from a step's values.

        Without rounds, any request that is new to this worker counts.
        """
        left = self._client.collect(_SAVING).values()
        steps = {step for data in left for step in msgspec.msgpack.decode(data, type=list[int])}
        known, self._known_requests = self._known_requests, steps
        return began in steps if self.rule.synchronous else not steps <= known

    def leave(self) -> None:
        """Shares the state of this worker's optimizer, right after an exchange, for the chief.

        After steps since the last exchange it would be of a step that no server has.
        """
        if self.made:
            return
        state = export_state(self._optimizer, self._flat.parameters)
        if self.rule.codec != "none":
            residuals = self._client.residuals.export()
            state |= {f"{name}{_UNSENT}": residual for name, residual in residuals.items()}
        step = self._client.step
        self._client.share(_LOCAL[self._parity(step)], _encoded(step, state))

    def states(self, step: int) -> dict[str, torch.Tensor]:
        """Returns the state of each worker's optimizer, keyed `WORKER/PARAMETER/STATE`.

        For a worker that has shared nothing after the exchange, it is the state shared before.
        """
        parity = self._parity(step)
        left = self._client.collect(_LOCAL[1 - parity]) | self._client.collect(_LOCAL[parity])
        return {
            f"{worker}/{name}": tensor
            for worker, data in sorted(left.items())
            for name, tensor in load_bytes(msgspec.msgpack.decode(data, type=_Left).state).items()
        }

    def _parity(self, step: int) -> int:
        return -(-step // self.rule.period) % 2

    def hand_out(self, step: int, states: dict[int, dict[str, torch.Tensor]]) -> None:
        """Shares, as chief, the state that a checkpoint has for each worker."""
        for worker, state in states.items():
            self._client.share(f"{_RESTORED}{worker}", _encoded(step, state))

    def take(self) -> bool:
        """Restores the state that the chief has shared from a checkpoint; returns whether it did.

        A worker that starts later, when the job has made further steps, restores nothing.
        """
        for data in self._client.collect(f"{_RESTORED}{self._client.options.worker}").values():
            left = msgspec.msgpack.decode(data, type=_Left)
            if left.step == self._client.step:
                tensors = load_bytes(left.state)
                unsent = [name for name in tensors if name.endswith(_UNSENT)]
                self._client.residuals.restore(
                    {name.removesuffix(_UNSENT): tensors.pop(name) for name in unsent}
                )
                restore_state(self._optimizer, self._flat.parameters, tensors)
                return True
        return False


def _encoded(step: int, state: dict[str, torch.Tensor]) -> bytes:
    tensors = {name: tensor.contiguous() for name, tensor in state.items()}
    return msgspec.msgpack.encode(_Left(step, save_bytes(tensors)))
