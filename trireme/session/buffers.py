"""Buffers and frozen parameters: all of a model that is not trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes

from trireme.launch.detect import TaskConfig
from trireme.ps.names import named_buffers, state_of
from trireme.session.training import Training

__all__ = ["Buffers", "Shelf"]

_INITIAL = "initial"
_BUFFERS = "buffers"


class Shelf(Protocol):
    """Where workers leave bytes for each other: any client is one."""

    def share(self, topic: str, data: bytes) -> None:
        """Leaves bytes for the other workers; the last under a topic replaces the one before."""

    def collect(self, topic: str) -> dict[int, bytes]:
        """Returns what each worker has left under a topic."""


class Buffers:
    """The buffers and the frozen parameters of a model that several workers train.

    All begin with the chief's. From there each worker's floating buffers go their own way, and
    their mean is evaluated and saved.

    Args:
        task: who this process is.
        training: what is trained; these are the rest of its model.
        shelf: where workers leave theirs for each other.
    """

    def __init__(self, task: TaskConfig, training: Training, shelf: Shelf) -> None:
        self._task = task
        self._training = training
        self._shelf = shelf
        self._alone = not task.coordinator and training.gang is None  # nobody else is in this job
        self._last: dict[str, torch.Tensor] | None = None  # their mean, when training has ended

    # -- at the beginning ---------------------------------------------------------------------

    def constants(self) -> dict[str, torch.Tensor]:
        """Returns buffers and frozen parameters: all of the model that is not trained."""
        model = self._training.model
        # By identity: a tied parameter has several names, and is trained under one of them.
        trained = {id(parameter) for parameter in self._training.flat.parameters.values()}
        return {
            name: tensor.detach().cpu().contiguous().clone()
            for name, tensor in state_of(model).items()
            if id(tensor) not in trained
        }

    def set_constants(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replaces those that are named, and nothing that is trained."""
        own = state_of(self._training.model)
        with torch.no_grad():
            for name, tensor in tensors.items():
                if name in own and name not in self._training.flat.parameters:
                    own[name].copy_(tensor)

    def hand_out(self) -> None:
        """As chief: leaves the constants for every worker to begin with."""
        self._shelf.share(_INITIAL, save_bytes(self.constants()))

    def take(self) -> None:
        """Takes over the constants that the chief has left."""
        left = self._shelf.collect(_INITIAL)
        if left:
            self.set_constants(load_bytes(left[min(left)]))

    def spread(self) -> None:
        """Where several processes are one worker: all take over their leader's."""
        gang = self._training.gang
        if gang is not None and self._task.servers:
            told = gang.broadcast(save_bytes(self.constants()) if gang.is_chief else None)
            self.set_constants(load_bytes(told))

    # -- while training goes on ---------------------------------------------------------------

    def share(self) -> None:
        """Leaves this worker's buffers for whoever evaluates or saves."""
        if self._alone or not self._floating():
            return
        own, gang = self._own(), self._training.gang
        if gang is not None and self._task.servers:
            from trireme.parallel.part import join

            own = join(gang, own)
        self._shelf.share(_BUFFERS, save_bytes(own))

    def average(self) -> dict[str, torch.Tensor]:
        """Returns the mean over the workers of each floating buffer, as they were last shared."""
        if self._last is not None:
            return self._last
        everything = self._floating()
        if self._alone or not everything:
            return everything
        shared = {w: load_bytes(data) for w, data in self._shelf.collect(_BUFFERS).items()}
        shared[self._task.index] = {**shared.get(self._task.index, {}), **self._own()}
        averages: dict[str, torch.Tensor] = {}
        for name, tensor in everything.items():
            found = [s[name].double() for s in shared.values() if name in s] or [tensor.double()]
            averages[name] = torch.stack(found).mean(0).to(tensor.dtype)
        return averages

    @torch.no_grad()
    def settle(self) -> None:
        """Training has ended: the model has the mean from now on, which is what is saved."""
        if self._alone:
            return
        self._last = self.average()
        for name, buffer in named_buffers(self._training.model):
            if name in self._last:
                buffer.copy_(self._last[name])

    def _own(self) -> dict[str, torch.Tensor]:
        """Returns the buffers that this process keeps up to date."""
        part, everything = self._training.part, self._floating()
        if part is None:
            return everything
        return {name: b for name, b in everything.items() if name in part.buffer_names}

    def _floating(self) -> dict[str, torch.Tensor]:
        return {
            name: buffer.detach().cpu().contiguous().clone()
            for name, buffer in named_buffers(self._training.model)
            if buffer.is_floating_point()
        }
