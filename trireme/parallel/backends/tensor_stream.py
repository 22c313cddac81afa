"""Whole tensors of a model that is spread over processes, moved one at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import msgspec
import torch

from trireme.parallel.processes.process_group import TorchProcessGroup
from trireme.tensors import full_tensor

_END = -1

Described: TypeAlias = list[tuple[str, str, tuple[int, ...]]]
"""The name, dtype and shape of each tensor."""


class TensorStream:
    """The tensors of all processes, which the chief reads one at a time, in any order.

    All processes make it together. Then the chief reads, and closes it; every other process
    serves until then. `shapes` are meta tensors, in the same order in every process.
    """

    def __init__(self, process_group: TorchProcessGroup, mine: Mapping[str, torch.Tensor]) -> None:
        self._group = process_group
        self._mine = mine
        self._owners: dict[str, int] = {}
        self.shapes: dict[str, torch.Tensor] = {}
        # Sorted, as names read from a file may be in another order than in the other processes.
        about = msgspec.msgpack.encode(described({name: mine[name] for name in sorted(mine)}))
        for rank, data in enumerate(process_group.exchange(about)):
            for name, tensor in metas(msgspec.msgpack.decode(data, type=Described)).items():
                self._owners.setdefault(name, rank)
                self.shapes.setdefault(name, tensor)
        self._names = list(self.shapes)
        self._numbers = {name: number for number, name in enumerate(self._names)}

    def read(self, name: str) -> torch.Tensor:
        """Returns a whole tensor on the CPU, in memory of its own, in the chief."""
        self._group.broadcast_tensor(torch.tensor([self._numbers[name]]))
        # Where the tensor is sharded, all processes that hold a part join it together.
        whole = full_tensor(self._mine[name]).clone() if name in self._mine else None
        if whole is not None and self._owners[name] == self._group.rank:
            return whole
        received = torch.empty_like(self.shapes[name], device="cpu")
        self._group.receive_tensor(received, self._owners[name])
        return received

    def serve(self) -> None:
        """Sends what the chief reads, until it closes the stream."""
        while True:
            word = torch.tensor([_END])
            self._group.broadcast_tensor(word)
            if int(word) == _END:
                return
            name = self._names[int(word)]
            if name in self._mine:
                whole = full_tensor(self._mine[name])
                if self._owners[name] == self._group.rank:
                    self._group.send_tensor(whole, 0)

    def close(self) -> None:
        """Ends the stream, in the chief."""
        self._group.broadcast_tensor(torch.tensor([_END]))


def described(tensors: Mapping[str, torch.Tensor]) -> Described:
    """Returns the name, dtype and shape of each tensor."""
    return [
        (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in tensors.items()
    ]


def metas(about: Described) -> dict[str, torch.Tensor]:
    """Returns meta tensors of what is described."""
    return {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        for name, dtype, shape in about
    }
