"""Processes that train together compare what they hold alike, and come to the same verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import torch

from trireme.corruption.checks import Checks
from trireme.corruption.digests import digests
from trireme.corruption.judge import judge
from trireme.ps.flat import as_bytes
from trireme.ps.optimizers import members
from trireme.tensors import is_dtensor, to_local


class Processes:
    """Compares the values of one process with those of the others of its group."""

    def __init__(self, worker: Any, checks: Checks) -> None:
        self._worker, self._checks = worker, checks
        self._group = worker.backend.group
        self._warned = False

    def compare(self, before: int, step: int) -> None:
        """Compares the values of all processes, where that is due."""
        if not self._checks.due(before, step):
            return
        names, tensors = zip(*self._held(), strict=True)
        found = self._group.exchange(msgspec.msgpack.encode((self._part(), digests(tensors))))
        parts: dict[str, dict[str, list[int]]] = {}
        for rank, (part, taken) in enumerate(map(msgspec.msgpack.decode, found)):
            parts.setdefault(part, {})[f"worker:{rank}"] = taken
        if all(len(copies) == 1 for copies in parts.values()) and not self._warned:
            self._warned = True
            self._worker.warn_as_chief(
                "--check-every: no two processes hold the same values, so none can be compared; "
                "with replicas of the shards (--mesh dp=2,fsdp=2) they can"
            )
        for copies in parts.values():
            self._judge(step, copies, names)

    def _judge(self, step: int, copies: Mapping[str, list[int]], names: tuple[str, ...]) -> None:
        verdict, action, own = judge(copies), self._checks.action, f"worker:{self._group.rank}"
        first = next(iter(copies))
        if verdict is None:
            self._checks.settled(first)
            return
        text = verdict.said("the model", step, names if own in copies else ())
        stops = action == "stop" or (action == "heal" and not verdict.good)
        if stops or own == first:
            self._checks.found(text, first, stops=stops)
        if action == "heal":
            self._refill(int(verdict.good[0].partition(":")[2]), wrong=own in verdict.wrong)

    def _refill(self, source: int, *, wrong: bool) -> None:
        """Gives those that are wrong the values and the optimizer's state of one that is not."""
        held, mine = [tensor for _, tensor in self._held()], None
        if self._group.rank == source:
            mine = msgspec.msgpack.encode([as_bytes(t.cpu().contiguous()) for t in held])
        found = msgspec.msgpack.decode(self._group.broadcast(mine, source), type=list[bytearray])
        for tensor, data in zip(held, found, strict=True) if wrong else ():
            if tensor.numel():
                tensor.copy_(torch.frombuffer(data, dtype=tensor.dtype).reshape(tensor.shape))

    def _held(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields this process's part of each parameter, and of the optimizer's state of it."""
        setup = self._worker.setup
        states: dict[Any, Mapping[str, Any]] = {}
        for each in members(setup.optimizer):
            states |= each.state
        for name, parameter in setup.trained.parameters.items():
            yield repr(name), to_local(parameter.detach())
            for key, value in states.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    yield f"{key} of {name!r}", to_local(value.detach())

    def _part(self) -> str:
        """Returns which part of the model this process holds: those of one hold the same."""
        return repr([(n, _place(p)) for n, p in self._worker.setup.trained.parameters.items()])


def _place(parameter: Any) -> list[int]:
    if not is_dtensor(parameter):
        return []
    at = zip(parameter.device_mesh.get_coordinate() or (), parameter.placements, strict=True)
    return [where for where, placement in at if not placement.is_replicate()]
