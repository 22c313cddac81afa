"""The state of the optimizers of workers that train locally, for the chief's checkpoints."""

from __future__ import annotations

import msgspec
import torch
from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes

from trireme.ps.client.client import Client
from trireme.ps.flat import FlatModel
from trireme.ps.optimizers import export_state, restore_state
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


class LocalOptimizers:
    """Shares this worker's optimizer state at shard 0, and collects that of the others."""

    def __init__(self, client: Client, flat: FlatModel, optimizer: torch.optim.Optimizer) -> None:
        self.rule = Rule()  # the job's, once it is known
        self._client = client
        self._flat = flat
        self._optimizer = optimizer
        self._requests: list[int] = []  # as chief: the content of the topic `saving`
        self._known_requests: set[int] = set()  # the content that this worker saw last

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
        """Shares the state of this worker's optimizer, right after an exchange, for the chief."""
        state = export_state(self._optimizer, self._flat.parameters)
        if self.rule.codec != "none":
            for name, residual in self._client.residuals.export().items():
                state[f"{name}{_UNSENT}"] = residual
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
        """Returns 0 or 1, in turn from exchange to exchange."""
        return -(-step // self.rule.period) % 2

    def hand_out(self, step: int, states: dict[int, dict[str, torch.Tensor]]) -> None:
        """Shares, as chief, the state that a checkpoint has for each worker."""
        for worker, state in states.items():
            self._client.share(f"{_RESTORED}{worker}", _encoded(step, state))

    def take(self) -> bool:
        """Restores the state that the chief has shared from a checkpoint; returns whether it did.

        A worker that starts later, when the job has made further steps, restores nothing.
        """
        found = self._client.collect(f"{_RESTORED}{self._client.options.worker}")
        for data in found.values():
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
