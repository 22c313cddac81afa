"""Training in a lone process, by direct calls to the shard of a parameter server.

A job of one worker without servers uses the same rule, table of pushes and ledger as a large job,
without the wire. The values are the model's own memory, and the optimizer is the user's own object,
so that every `torch.optim` optimizer works.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from trireme.cluster.view import ServerEntry, View, WorkerEntry
from trireme.errors import Rejected
from trireme.ps.flat import FlatModel, PartBuffer
from trireme.ps.layout import Layout
from trireme.ps.messages import (
    Attach,
    Attached,
    GroupSpec,
    Lease,
    Leased,
    OptimizerSpec,
    Pull,
    PullReply,
    Push,
    PushReply,
    Refused,
    SetEnd,
    Span,
    StopJob,
    Stopping,
)
from trireme.ps.optimizers import check_optimizer, export_state, restore_state
from trireme.ps.results import PushResult
from trireme.ps.rule import Rule
from trireme.ps.shard.instructions import Instruction, Reply
from trireme.ps.shard.participants import Participant
from trireme.ps.shard.shard import Shard
from trireme.ps.shard.values.parameters import Values
from trireme.ps.shard.values.snapshot_tensors import Tensors
from trireme.ps.snapshot import ModelState, assemble, disassemble, lacking
from trireme.ps.snapshot_messages import Cut, Freeze, Frozen, Load, Loaded, Snapshot, TensorSpec
from trireme.ps.termination import after_the_end
from trireme.session.backends.base import Backend, FirstState
from trireme.wire.message import Message

__all__ = ["Local"]

_M = TypeVar("_M", bound=Message)

_ALONE = Participant(0, 1)
"""The only worker, in its only start."""


class Local(Backend):
    """The backend of a lone process: a shard that applies updates with the user's optimizer.

    Args:
        flat: the model, laid out for one server.
        optimizer: the user's optimizer, over the model's parameters.
    """

    step: int = 0
    stopping: bool = False

    def __init__(self, flat: FlatModel, optimizer: torch.optim.Optimizer) -> None:
        self._flat = flat
        self._optimizer = optimizer
        self._gradients = PartBuffer(flat.layout, 0, flat.gradients)
        self._shard = Shard(0, self._make_values)
        self._shard.view(0.0, View(1, (ServerEntry(0, 1, ""),), (WorkerEntry(0, 1),)))
        self._sequence = 0
        self._answer: PushReply | None = None

    def _make_values(
        self, layout: Layout, server: int, optimizer: OptimizerSpec, rule: Rule
    ) -> Values:
        buffer = PartBuffer(layout, server, self._flat.values)
        return Values(layout, server, buffer, _UserOptimizer(self._optimizer), rule)

    def start(self, optimizer: OptimizerSpec, rule: Rule, first: FirstState) -> None:
        request = Attach(1, self._flat.layout.spec, optimizer, rule)
        self._ask(self._shard.attach(time.monotonic(), None, _ALONE, request), Attached)
        state = first()
        assert state is not None, "a lone process is chief"
        self._load(state)
        reply = self._ask(self._shard.pull(time.monotonic(), None, _ALONE, Pull(1)), PullReply)
        self.step, self.stopping = reply.step, reply.stop

    def _load(self, state: ModelState) -> None:
        if state.optimizer:
            restore_state(self._optimizer, self._flat.parameters, state.optimizer)
        tensors = disassemble(self._flat.layout, replace(state, optimizer={}), 0)
        specs = tuple(spec for spec, _ in tensors)
        request = Load(1, state.step, specs, (), state.consumed, state.sizes)
        self._ask(self._shard.load(time.monotonic(), None, _ALONE, request, tensors), Loaded)

    def push(
        self,
        weight: float,
        *,
        hyper: tuple[GroupSpec, ...] | None = None,
        examples: Sequence[Span] = (),
        pulled: int | None = None,
    ) -> None:
        if self.stopping:
            raise after_the_end(0, self.step)
        self._flat.collect_gradients()
        self._sequence += 1
        number = self._sequence
        push = Push(1, number, number - 1, self.step, weight, None, tuple(examples))
        answer = self._shard.push(0.0, None, _ALONE, push, self._gradients)
        self._answer = self._ask(answer, PushReply)

    def wait(self) -> PushResult:
        reply = self._answer
        assert reply is not None, "there was no exchange to end"
        self._answer = None
        self.step, self.stopping = reply.step, reply.stop
        return PushResult(reply.verdict, reply.step, reply.staleness, reply.stop)

    def lease(
        self, dataset: str, size: int, batch: int, count: int, *, resized: bool = False
    ) -> tuple[Span, ...]:
        request = Lease(1, dataset, size, batch, count, resized=resized)
        return self._ask(self._shard.lease(time.monotonic(), None, _ALONE, request), Leased).spans

    def stop(self, reason: str) -> int:
        return self._ask(self._shard.stop(time.monotonic(), None, StopJob(reason)), Stopping).step

    def set_end(self, max_steps: int) -> int:
        return self._ask(
            self._shard.set_end(time.monotonic(), None, SetEnd(max_steps)), Stopping
        ).step

    def drain(self) -> int:
        return self.step  # there is no other worker

    def snapshot(self, *, state: bool) -> ModelState:
        self._ask(self._shard.freeze(time.monotonic(), None, Freeze(1)), Frozen)
        cut = self._shard.cut(time.monotonic(), None, Cut(1, self.step, (), state))
        snapshot = self._ask(cut, Snapshot)
        reply = next(i for i in cut if isinstance(i, Reply))
        tensors = [
            (spec, tensor.cpu())
            for spec, tensor in zip(snapshot.tensors, reply.payload, strict=True)
        ]
        copied = assemble(self._flat.layout, [(snapshot, tensors)])
        if not state:
            return copied
        try:
            return replace(copied, optimizer=export_state(self._optimizer, self._flat.parameters))
        except Exception as error:  # of an odd optimizer: the values must not be lost with it
            return replace(copied, lacks=(lacking("the optimizer's state", error),))

    def _ask(self, instructions: list[Instruction], wanted: type[_M]) -> _M:
        for instruction in instructions:
            if isinstance(instruction, Reply):
                if isinstance(instruction.message, wanted):
                    return instruction.message
                if isinstance(instruction.message, Refused):
                    raise Rejected(instruction.message.reason)
        raise Rejected(f"no {wanted.__name__} came, but {instructions!r}")


class _UserOptimizer:
    """The user's optimizer, which updates the model's own parameters.

    Its state has the shapes and names of the parameters instead of flat vectors; `export_state` and
    `restore_state` convert it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        check_optimizer(optimizer)
        self._optimizer = optimizer

    def step(
        self, gradients: PartBuffer, divisor: float = 1.0, absent: tuple[int, ...] = ()
    ) -> None:
        """Updates the parameters from the gradients in their `.grad`."""
        assert divisor == 1.0, "one worker makes one gradient"
        self._optimizer.step()

    def set_hyper(self, groups: Sequence[GroupSpec]) -> None:
        """Does nothing: a program changes hyper-parameters in the optimizer itself."""

    def export(self) -> list[tuple[TensorSpec, torch.Tensor]]:
        """Nothing that is laid out flat."""
        return []

    def restore(self, state: Tensors) -> None:
        """Nothing that is laid out flat."""
