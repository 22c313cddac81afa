"""The parameter server of a lone process: the same shard, called directly.

A job of one worker and no server runs by the same rules, the same exactly-once table and the same
ledger as a large one; only the wire is missing. The values are the model's own memory, and the
optimizer is the user's own object, so that every `torch.optim` optimizer will do here.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from trireme.cluster.view import ServerEntry, View, WorkerEntry
from trireme.errors import Rejected
from trireme.ps.dense import FlatModel, PartBuffer
from trireme.ps.ending import after_the_end
from trireme.ps.instructions import Instruction, Reply
from trireme.ps.joint import members
from trireme.ps.layout import Layout
from trireme.ps.messages import (
    Attach,
    Attached,
    Cut,
    Freeze,
    Frozen,
    GroupSpec,
    Lease,
    Leased,
    Load,
    Loaded,
    OptimizerSpec,
    Pull,
    PullReply,
    Push,
    PushReply,
    Refused,
    SetEnd,
    Snapshot,
    Span,
    StopJob,
    Stopping,
    TensorSpec,
)
from trireme.ps.optim import OPTIMIZERS, check_optimizer, name_of
from trireme.ps.results import PullResult, PushResult
from trireme.ps.rule import Average, Rule
from trireme.ps.shard import Shard
from trireme.ps.snapshot import ModelState, assemble, disassemble, lacking
from trireme.ps.values import Tensors, Values
from trireme.wire.message import Message

__all__ = [
    "LocalClient",
    "check_complete",
    "export_state",
    "restore_state",
    "state_names",
]

_M = TypeVar("_M", bound=Message)


class LocalClient:
    """What `trireme.ps.client.Client` offers, without servers.

    Args:
        flat: the model, laid out for one server.
        optimizer: the user's, over the model's parameters.
    """

    def __init__(self, flat: FlatModel, optimizer: torch.optim.Optimizer) -> None:
        self.step = 0
        self.stopping = False
        self.bytes_sent = 0
        self.bytes_received = 0
        self._flat = flat
        self._optimizer = optimizer
        self._gradients = PartBuffer(flat.layout, 0, flat.gradients)
        self._shard = Shard(0, self._make_values)
        self._shard.view(0.0, View(1, (ServerEntry(0, 1, ""),), (WorkerEntry(0, 1),)))
        self._sequence = 0
        self._weight = 0.0
        self._answer: PushReply | None = None

    def _make_values(
        self, layout: Layout, server: int, optimizer: OptimizerSpec, average: Average | None
    ) -> Values:
        buffer = PartBuffer(layout, server, self._flat.values)
        return Values(layout, server, buffer, _UserOptimizer(self._optimizer), average)

    def attach(self, optimizer: OptimizerSpec, rule: Rule) -> bool:
        """Shows the shard the rule; returns False: nothing is loaded yet."""
        spec = self._flat.layout.spec
        request = Attach(0, 1, 1, spec, optimizer, rule)
        return self._ask(self._shard.attach(self._now, None, request), Attached).loaded

    def load(self, state: ModelState) -> None:
        """Takes the first values, or a checkpoint's.

        Raises:
            CheckpointError: the state is of another model.
            Rejected: it is of another optimizer.
        """
        if state.optimizer:
            restore_state(self._optimizer, self._flat, state.optimizer)
        tensors = disassemble(self._flat.layout, replace(state, optimizer={}), 0)
        specs = tuple(spec for spec, _ in tensors)
        request = Load(0, 1, 1, state.step, specs, (), state.consumed, state.sizes)
        self._ask(self._shard.load(self._now, None, request, tensors), Loaded)

    def pull(self, *, train: bool = True) -> PullResult:
        """Returns the step; the values are the model's own."""
        reply = self._ask(self._shard.pull(self._now, None, Pull(0, 1, 1, train)), PullReply)
        if train:
            self.stopping = reply.stop
        self.step = reply.step
        return PullResult(reply.step, reply.stop)

    def push(
        self,
        weight: float,
        *,
        hyper: tuple[GroupSpec, ...] | None = None,
        examples: Sequence[Span] = (),
        pull: bool = True,
    ) -> None:
        """Applies the gradients that are in the model. `hyper` is the optimizer's own already.

        Raises:
            ConfigurationError: the job has told this worker to stop.
        """
        if self.stopping:
            raise after_the_end(0, self.step)
        self._flat.collect_gradients()
        self._sequence += 1
        push = Push(
            0, 1, 1, self._sequence, self._sequence - 1, self.step, weight, None, tuple(examples)
        )
        self._answer = self._ask(self._shard.push(0.0, None, push, self._gradients), PushReply)

    def wait(self) -> PushResult:
        """Returns what became of the push."""
        reply = self._answer
        assert reply is not None, "wait without push"
        self._answer = None
        self.step, self.stopping = reply.step, reply.stop
        return PushResult(reply.verdict, reply.step, reply.staleness, reply.stop)

    def lease(
        self, dataset: str, size: int, batch: int, count: int, *, resized: bool = False
    ) -> tuple[Span, ...]:
        """Returns the next examples: `count` spans of `batch`."""
        request = Lease(0, 1, 1, dataset, size, batch, count, resized=resized)
        return self._ask(self._shard.lease(self._now, None, request), Leased).spans

    def stop(self, reason: str) -> int:
        """Ends the job at the next step; returns it."""
        return self._ask(self._shard.stop(self._now, None, StopJob(reason)), Stopping).step

    def set_end(self, max_steps: int) -> int:
        """Sets the job's last step if it has none; returns the one that holds."""
        return self._ask(self._shard.set_end(self._now, None, SetEnd(max_steps)), Stopping).step

    def retire(self) -> None:
        """Nobody waits for this worker."""

    def drain(self) -> int:
        """Returns the global step: there is nobody else to wait for."""
        return self.step

    def share(self, topic: str, data: bytes) -> None:
        """There is nobody to leave it for."""

    def collect(self, topic: str) -> dict[int, bytes]:
        """Nobody has left anything."""
        return {}

    def snapshot(self, *, state: bool) -> ModelState:
        """Copies the values, and with `state` all that goes with them."""
        self._ask(self._shard.freeze(self._now, None, Freeze(1)), Frozen)
        cut = self._shard.cut(self._now, None, Cut(1, self.step, (), state))
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
            return replace(copied, optimizer=export_state(self._optimizer, self._flat))
        except Exception as error:  # of an odd optimizer: the values must not be lost with it
            return replace(copied, lacks=(lacking("the optimizer's state", error),))

    def close(self) -> None:
        """There is nothing to close."""

    @property
    def _now(self) -> float:
        return time.monotonic()

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

    Its state is of the parameters' shapes and names, not of flat vectors: `export_state` and
    `restore_state` see to it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        check_optimizer(optimizer)
        self._optimizer = optimizer

    def step(
        self, gradients: PartBuffer, divisor: float = 1.0, absent: tuple[int, ...] = ()
    ) -> None:
        """Updates the parameters; the gradients are in their `.grad` already, or are None."""
        assert divisor == 1.0, "one worker makes one gradient"
        self._optimizer.step()

    def set_hyper(self, groups: Sequence[GroupSpec]) -> None:
        """Nothing to do: whoever changes a hyper-parameter changes it in the optimizer itself."""

    def export(self) -> list[tuple[TensorSpec, torch.Tensor]]:
        """Nothing that is laid out flat."""
        return []

    def restore(self, state: Tensors) -> None:
        """Nothing that is laid out flat."""


def state_names(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]
) -> list[str | None]:
    """Returns the parameters' names in the order in which the optimizer's state counts them.

    One that is not among `parameters`, because it is frozen, counts too, but has no state, and no
    name here.
    """
    by_identity = {id(parameter): name for name, parameter in parameters.items()}
    return [by_identity.get(id(p)) for group in optimizer.param_groups for p in group["params"]]


def export_state(optimizer: torch.optim.Optimizer, flat: FlatModel) -> dict[str, torch.Tensor]:
    """Returns copies of an optimizer's state as `PARAMETER/STATE` -> tensor, on the CPU."""
    names = state_names(optimizer, flat.parameters)
    state: dict[int, dict[str, Any]] = optimizer.state_dict()["state"]
    return {
        f"{names[index]}/{key}": torch.as_tensor(value).detach().cpu().clone()
        for index, entries in state.items()
        if names[index] is not None
        for key, value in entries.items()
        if isinstance(value, (torch.Tensor, int, float))
    }


def restore_state(
    optimizer: torch.optim.Optimizer, flat: FlatModel, tensors: dict[str, torch.Tensor]
) -> None:
    """Replaces an optimizer's state, on whatever device its parameters are.

    Raises:
        Rejected: it is another optimizer's.
    """
    index = {
        name: position
        for position, name in enumerate(state_names(optimizer, flat.parameters))
        if name
    }
    state: dict[int, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        parameter, _, entry = key.rpartition("/")
        if parameter in index:
            state.setdefault(index[parameter], {})[entry] = tensor.clone()
    check_complete(optimizer, state)
    optimizer.load_state_dict(
        {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
    )


def check_complete(
    optimizer: torch.optim.Optimizer, state: Mapping[int, Mapping[str, torch.Tensor]]
) -> None:
    """Checks that parameters which have state have all that the optimizer goes on from."""
    groups = [
        (each, group)
        for each in members(optimizer)
        for group in each.param_groups
        for _ in group["params"]
    ]
    for index, entries in state.items():
        owner, group = groups[index]
        known = OPTIMIZERS.get(name_of(owner) or "")
        missing = known.needs(group) - entries.keys() if known is not None else None
        if missing:
            raise Rejected(
                f"the checkpoint has no {min(missing)!r}, from which {type(owner).__name__} "
                "would go on: it is another optimizer's; go on with the same optimizer, or choose "
                "another run directory"
            )
