"""What a program's own loop keeps beside the model, such as its best score, in checkpoints."""

from __future__ import annotations

import base64
import math
from typing import Any, Protocol

import msgspec
import torch
from safetensors.torch import load, save
from torch.optim.lr_scheduler import LRScheduler

from trireme.errors import ConfigurationError
from trireme.session.worker.worker import Worker

_TENSOR = 1  # the code of a tensor among the values of a state, in msgpack


class Stateful(Protocol):
    """An object with a state, as PyTorch's modules, optimizers and schedulers have one."""

    def state_dict(self) -> dict[str, Any]:
        """Returns its state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> object:
        """Takes over a state."""


class KeptState:
    """The objects whose states the chief saves with checkpoints, and leaves for other workers."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.held: dict[str, Stateful] = {}
        worker.checkpoints.kept = self._everything

    def keep(self, name: str, held: Stateful) -> bool:
        """Keeps an object, and loads its state of the job; returns whether there is one."""
        if name in self.held:
            raise ConfigurationError(f"keep({name!r}): another object has this name")
        encoded(name, 0, held.state_dict())  # what cannot be held is refused now
        self.held[name] = held
        return self._load(name, held)

    def go_back(self) -> None:
        """Loads the states of the step to which the job has gone back."""
        for name, held in self.held.items():
            self._load(name, held, until=self._worker.global_step)

    def _load(self, name: str, held: Stateful, until: float = math.inf) -> bool:
        checkpoints, backend = self._worker.checkpoints, self._worker.backend
        found = [*backend.collect(f"kept/{name}").values()]
        if (restored := checkpoints.known_kept.get(name)) is not None:
            found.append(restored)
        found = [data for data in found if decoded(data)[0] <= until]
        group = self._worker.setup.process_group
        if group is not None:
            newest = max(map(decoded, found), key=lambda each: each[0], default=None)
            states = group.exchange(b"" if newest is None else encoded(name, *newest))
            found = [data for data in states if data]
        if not found:
            return False
        _, state = max(map(decoded, found), key=lambda each: each[0])
        held.load_state_dict(state)
        if isinstance(held, LRScheduler):  # in PyTorch the optimizer's state has the rates
            for values, rate in zip(held.optimizer.param_groups, held.get_last_lr(), strict=True):
                before, now = values["lr"], float(rate)
                values["lr"] = torch.full_like(before, now) if torch.is_tensor(before) else now
        return True

    def _everything(self) -> dict[str, str]:
        """Returns the present states for a checkpoint, in base64; other workers get them too."""
        saved: dict[str, str] = {}
        for name, held in self.held.items():
            data = encoded(name, self._worker.global_step, held.state_dict())
            self._worker.backend.share(f"kept/{name}", data)
            saved[name] = base64.b64encode(data).decode()
        return saved


def encoded(name: str, step: int, state: dict[str, Any]) -> bytes:
    """Returns a state, and the global step that it is of, as bytes."""

    def pack(value: object) -> msgspec.msgpack.Ext:
        if isinstance(value, torch.Tensor):
            data = save({"tensor": value.detach().cpu().contiguous()})
            return msgspec.msgpack.Ext(_TENSOR, data)
        raise ConfigurationError(
            f"keep({name!r}): its state_dict has a {type(value).__name__}, which a checkpoint "
            "cannot hold: it may have numbers, text, bytes, None, tensors, lists and mappings"
        )

    return msgspec.msgpack.encode((step, state), enc_hook=pack)


def decoded(data: bytes) -> tuple[int, dict[str, Any]]:
    """Returns the global step and the state that `encoded` was given; tuples come as lists."""

    def unpack(code: int, packed: memoryview) -> object:
        if code != _TENSOR:
            raise ConfigurationError(f"a kept state has a value of the unknown kind {code}")
        return load(bytes(packed))["tensor"]

    step, state = msgspec.msgpack.decode(data, ext_hook=unpack)
    return step, state
