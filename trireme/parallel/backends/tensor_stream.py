"""Whole tensors of a model that is spread over processes, moved one at a time.

No process holds more than its own part and one whole tensor meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

import msgspec
import torch

from trireme.parallel.processes.process_group import TorchProcessGroup
from trireme.tensors import full_tensor

_END = -1

_Described: TypeAlias = list[tuple[str, str, tuple[int, ...]]]
"""The name, dtype and shape of each tensor."""


class TensorStream:
    """The tensors of all processes, which the chief reads one at a time, in any order.

    All processes make it together. Then the chief reads, and closes it; every other process
    serves until then.

    Attributes:
        shapes: a meta tensor of the dtype and shape of each tensor, by name, in the same order in
            every process.
    """

    def __init__(self, process_group: TorchProcessGroup, mine: Mapping[str, torch.Tensor]) -> None:
        self._group = process_group
        self._mine = mine
        self._owners: dict[str, int] = {}
        self.shapes: dict[str, torch.Tensor] = {}
        # Sorted, as names read from a file may be in another order than in the other processes.
        described = msgspec.msgpack.encode(_described({name: mine[name] for name in sorted(mine)}))
        for rank, data in enumerate(process_group.exchange(described)):
            for name, tensor in _metas(data).items():
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


def spread(
    process_group: TorchProcessGroup,
    shapes: Mapping[str, torch.Tensor] | None,
    read: Callable[[str], torch.Tensor],
    wants: Callable[[str], bool],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields to each process the tensors that it wants, of those that the chief reads one by one.

    All processes iterate to the end.
    """
    described = None if shapes is None else msgspec.msgpack.encode(_described(shapes))
    known = _metas(process_group.broadcast(described))
    own = bytes(wants(name) for name in known)
    everyone = process_group.exchange(own)
    for number, (name, shape) in enumerate(known.items()):
        ranks = [rank for rank, wanted in enumerate(everyone) if wanted[number]]
        if not ranks or not (process_group.is_chief or own[number]):
            continue
        if process_group.is_chief:
            tensor = read(name).contiguous()
        else:
            tensor = torch.empty_like(shape, device="cpu")
        if len(ranks) == process_group.size:
            _broadcast(process_group, tensor)
        elif not process_group.is_chief:
            process_group.receive_tensor(tensor, 0)
        else:
            for rank in ranks:
                if rank:
                    process_group.send_tensor(tensor, rank)
        if own[number]:
            yield name, tensor


def _broadcast(process_group: TorchProcessGroup, tensor: torch.Tensor) -> None:
    if tensor.numel():  # as bytes: not every dtype can be sent
        process_group.broadcast_tensor(tensor.detach().view(-1).view(torch.uint8))


def _described(tensors: Mapping[str, torch.Tensor]) -> _Described:
    return [
        (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in tensors.items()
    ]


def _metas(data: bytes) -> dict[str, torch.Tensor]:
    return {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        for name, dtype, shape in msgspec.msgpack.decode(data, type=_Described)
    }
