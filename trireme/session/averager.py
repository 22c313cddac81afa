"""A worker that trains by itself for a while, and then exchanges what it has learned.

Between two exchanges the user's own optimizer updates the values here, step by step. At an exchange
the worker pushes a delta, `pulled - current`, and has the new values for it. To the servers a delta
is a gradient like any other: it is pushed, counted, acknowledged and repeated as one.

Sources: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data
(AISTATS 2017), algorithm 1; Douillard et al., DiLoCo (2023), algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes

from trireme.ps.client import Client, ClientOptions
from trireme.ps.dense import FlatModel
from trireme.ps.ending import after_the_end
from trireme.ps.local import export_state, restore_state
from trireme.ps.messages import GroupSpec, OptimizerSpec, Span
from trireme.ps.optim import check_optimizer
from trireme.ps.results import PullResult, PushResult
from trireme.ps.rule import Rule

__all__ = ["Averager", "period_length"]

_SAVING = "saving"
"""The chief: after which exchanges it saves, by the steps of the values that they began from. In
rounds all agree on these. The last two: it may be at the next one when others ask about this one.
"""
_LOCAL = ("local optimizer, even", "local optimizer, odd")
"""Each worker: its optimizer's state after an exchange. What was left after one exchange is wanted
until the next is over, and so must outlast what is left there."""
_UNSENT = "/unsent"
"""Behind a parameter's name, beside the optimizer's state: what packing has lost of its deltas."""
_RESTORED = "restored optimizer of worker:"  # the chief: what the checkpoint has for a worker


class _Left(msgspec.Struct, frozen=True, array_like=True):
    """An optimizer's state, as a worker leaves it at server 0."""

    step: int
    state: bytes


def period_length(rule: Rule, step: int, end: int | None) -> int:
    """Returns how many steps a worker makes by itself from a global step on.

    Synchronous periods end at multiples of `every`, so that a job which was stopped in between, or
    a worker that came later, falls in with what would have been. None goes beyond the end.

    Args:
        rule: the job's.
        step: of the values that it begins from.
        end: the job's last step, where it is known.
    """
    length = rule.period - (step % rule.period if rule.synchronous else 0)
    return length if end is None else max(1, min(length, end - step))


class Averager:
    """What `trireme.ps.client.Client` offers; but most updates are made here.

    Args:
        client: the connections to the servers.
        flat: the worker's model.
        optimizer: the user's, over the model's parameters.

    Attributes:
        wants_save: set before a push: this process, as chief, would save after it.
        saves: after a push: whether the chief saves the step that it made, so that every worker has
            left the state of its optimizer there.
    """

    def __init__(self, client: Client, flat: FlatModel, optimizer: torch.optim.Optimizer) -> None:
        check_optimizer(optimizer)
        self.wants_save = False
        self.saves = False
        self._client = client
        self._flat = flat
        self._optimizer = optimizer
        self._rule = Rule()
        self._end: int | None = None
        self._hurries = False
        self._length = 1
        self._base = [torch.empty_like(value) for value in flat.values]
        self._made = 0  # steps since the last exchange
        self._weight = 0.0
        self._examples: list[Span] = []
        self._untouched: set[int] | None = None  # what no step since has had a gradient for
        self._sent = False
        self._asks: list[int] = []  # as chief: what it has left about saving
        self._heard: set[int] = set()  # what chiefs had left when this worker last looked
        self.load = client.load
        self.retire = client.retire
        self.share = client.share
        self.collect = client.collect
        self.lease = client.lease
        self.drain = client.drain
        self.snapshot = client.snapshot
        self.close = client.close
        self.renew = client.renew

    # -- what it is asked -------------------------------------------------------------------------

    @property
    def options(self) -> ClientOptions:
        """Who this worker is."""
        return self._client.options

    @property
    def step(self) -> int:
        """The global step of the last exchange, and the steps that were made here since."""
        return self._client.step + self._made

    @property
    def made(self) -> int:
        """How many steps were made here since the last exchange."""
        return self._made

    @property
    def stopping(self) -> bool:
        """Whether this worker has been told to stop."""
        return self._client.stopping

    @property
    def bytes_sent(self) -> int:
        """Bytes of deltas sent to the servers."""
        return self._client.bytes_sent

    @property
    def bytes_received(self) -> int:
        """Bytes of values received from them."""
        return self._client.bytes_received

    # -- joining, ending --------------------------------------------------------------------------

    def attach(self, optimizer: OptimizerSpec, rule: Rule) -> bool:
        """Shows every server the model, the outer optimizer and the rule; see `Client.attach`."""
        self._rule = rule
        self._end = rule.max_steps if self._end is None else self._end
        return self._client.attach(optimizer, rule)

    def pull(self, *, train: bool = True) -> PullResult:
        """Receives the values; steps that were made here since the last exchange are given up."""
        result = self._client.pull(train=train)
        self._begin()
        return result

    def set_end(self, max_steps: int) -> int:
        """Sets the job's last step if it has none; returns the one that holds."""
        self._end = self._client.set_end(max_steps)
        return self._end

    def stop(self, reason: str) -> int:
        """Asks that the job end; in synchronous jobs this worker's period ends with its next step.

        Returns:
            The global step from which on nobody begins another period.
        """
        self._hurries = True
        return self._client.stop(reason)

    # -- training ---------------------------------------------------------------------------------

    def push(
        self,
        weight: float,
        *,
        hyper: tuple[GroupSpec, ...] | None = None,
        examples: Sequence[Span] = (),
        pull: bool = True,
    ) -> None:
        """Makes a step with the gradients at hand; sends the delta if that ends the period.

        Args:
            weight: how many examples the gradient is the mean of; with 0 the values stay.
            hyper: not needed: the servers' optimizer has its own.
            examples: which they are.
            pull: whether the answer shall bring the new values.

        Raises:
            ConfigurationError: this worker has been told to stop.
            JobFailed: the job has ended meanwhile; says why.
        """
        if self.stopping:
            raise after_the_end(self.options.worker, self.step)
        self._client.check()  # else nobody would hear of it before the next exchange
        self._flat.gather_gradients()
        if weight > 0:
            absent = self._flat.absent
            before = set(absent) if self._untouched is None else self._untouched
            self._untouched = before.intersection(absent)
            self._optimizer.step()
        self._made += 1
        self._weight += weight
        self._examples += examples
        if (self._hurries and self._rule.synchronous) or self._made >= self._length:
            self._send()

    def wait(self) -> PushResult | None:
        """Returns what became of the delta, and has the new values; None between exchanges.

        Raises:
            TriremeError: as `Client.wait`.
        """
        self.saves = False
        if not self._sent:
            return None
        began = self._client.step
        result = msgspec.structs.replace(self._client.wait(), steps=self._made)
        self._begin()
        self._agree_to_save(began)
        return result

    def complete(self) -> PushResult | None:
        """Exchanges what was learned since the last exchange, if that is anything."""
        if not self._made or self.stopping:
            return None
        self._send()
        return self.wait()

    @torch.no_grad()
    def go_back(self) -> None:
        """Gives up what was learned since the last exchange: has the values that it brought."""
        for base, value in zip(self._base, self._flat.values, strict=True):
            value.copy_(base)
        self._made, self._sent = 0, False

    @torch.no_grad()
    def _begin(self) -> None:
        """A period begins from the values at hand."""
        for base, value in zip(self._base, self._flat.values, strict=True):
            base.copy_(value)
        self._length = period_length(self._rule, self._client.step, self._end)
        self._made, self._weight, self._examples, self._sent = 0, 0.0, [], False
        self._untouched = None

    @torch.no_grad()
    def _send(self) -> None:
        """Pushes the delta."""
        if self.wants_save:  # known to all who are in this round before it closes
            self._asks = [*self._asks[-1:], self._client.step]
            self._client.share(_SAVING, msgspec.msgpack.encode(self._asks))
        for base, value, gradient in zip(
            self._base, self._flat.values, self._flat.gradients, strict=True
        ):
            torch.sub(base, value, out=gradient)
            if self._rule.publishes:
                value.copy_(base)  # what comes back is what has changed since
        self._flat.restore_gradients()  # they are the deltas now
        self._client.push(
            self._weight,
            examples=_joined(self._examples),
            steps=self._made,
            absent=tuple(sorted(self._untouched or ())),
        )
        self._sent = True

    # -- the optimizer's state ----------------------------------------------------------------

    def _agree_to_save(self, began: int) -> None:
        """Finds out whether the chief saves after this exchange; leaves the state then.

        Args:
            began: the step of the values that it began from. Where there are no rounds, any
                exchange that was not heard of before will do.
        """
        left = self._client.collect(_SAVING).values()
        asked = {step for data in left for step in msgspec.msgpack.decode(data, type=list[int])}
        self.saves = began in asked if self._rule.synchronous else not asked <= self._heard
        self._heard = asked
        if self.saves:
            self.leave_state()

    def leave_state(self) -> None:
        """Leaves the state of this worker's optimizer for the chief's checkpoint."""
        if not self._made:  # else it would be of steps that no server has
            state = export_state(self._optimizer, self._flat)
            if self._rule.codec != "none":
                for name, residual in self._client.residuals.export().items():
                    state[f"{name}{_UNSENT}"] = residual
            self._client.share(_LOCAL[self._parity(self.step)], _encoded(self.step, state))

    def states(self, step: int) -> dict[str, torch.Tensor]:
        """Returns what each worker has left after an exchange, as `WORKER/PARAMETER/STATE`.

        Where a worker has left nothing there, it is what it left before.

        Args:
            step: that the exchange made.
        """
        parity = self._parity(step)
        left = self._client.collect(_LOCAL[1 - parity]) | self._client.collect(_LOCAL[parity])
        return {
            f"{worker}/{name}": tensor
            for worker, data in sorted(left.items())
            for name, tensor in load_bytes(msgspec.msgpack.decode(data, type=_Left).state).items()
        }

    def _parity(self, step: int) -> int:
        """Returns 0 or 1, in turn from exchange to exchange."""
        return -(-step // self._rule.period) % 2

    def hand_out(self, step: int, states: dict[int, dict[str, torch.Tensor]]) -> None:
        """As chief: leaves each worker the state that a checkpoint has for it.

        Args:
            step: the checkpoint's.
            states: by worker.
        """
        for worker, state in states.items():
            self._client.share(f"{_RESTORED}{worker}", _encoded(step, state))

    def take_state(self) -> bool:
        """Takes over what the chief has left from the checkpoint; returns whether it did.

        A worker that is started later, when the job has gone on from there, does not.

        Raises:
            Rejected: it is of another optimizer.
        """
        found = self._client.collect(f"{_RESTORED}{self.options.worker}")
        for data in found.values():
            left = msgspec.msgpack.decode(data, type=_Left)
            if left.step == self.step:
                tensors = load_bytes(left.state)
                unsent = [name for name in tensors if name.endswith(_UNSENT)]
                self._client.residuals.restore(
                    {name.removesuffix(_UNSENT): tensors.pop(name) for name in unsent}
                )
                restore_state(self._optimizer, self._flat, tensors)
                return True
        return False


def _encoded(step: int, state: dict[str, torch.Tensor]) -> bytes:
    tensors = {name: tensor.contiguous() for name, tensor in state.items()}
    return msgspec.msgpack.encode(_Left(step, save_bytes(tensors)))


def _joined(spans: Sequence[Span]) -> list[Span]:
    """Returns the same examples in as few spans as there can be."""
    joined: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.dataset, span.start)):
        last = joined[-1] if joined else None
        if last is not None and (last.dataset, last.stop) == (span.dataset, span.start):
            joined[-1] = Span(span.dataset, last.start, span.stop)
        else:
            joined.append(span)
    return joined
