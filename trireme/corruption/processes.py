"""Processes that train together compare what they hold alike.

Each shares the digests of a step without waiting. They are compared after the next step: all have
shared theirs before its collectives. So every process comes to the same verdict at the same step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from trireme.corruption.digests import digest
from trireme.corruption.findings import Findings, differing
from trireme.corruption.judge import Verdict, judge
from trireme.corruption.settings import Settings
from trireme.ps.optimizers import members
from trireme.tensors import is_dtensor, to_local


class _Shared(msgspec.Struct, frozen=True, array_like=True):
    step: int
    part: str  # which part of the model the process holds: those of one part hold the same
    digests: tuple[int, ...]


class Processes:
    """Compares the values of one process with those of the others of its group."""

    def __init__(self, worker: Any, settings: Settings, findings: Findings) -> None:
        self._worker, self._settings, self._findings = worker, settings, findings
        self._group = worker.backend.group
        self._shared: int | None = None  # the step of the digests that are to be compared
        self._warned = False

    def look(self, before: int, step: int) -> None:
        """Compares what was shared at the last step, and shares what is due now."""
        if self._shared is not None:
            self._compare(self._shared)
            self._shared = None
        if self._settings.due(before, step):
            held = self._held()
            digests = tuple(digest([tensor]) for tensor in held.values())
            data = msgspec.msgpack.encode(_Shared(step, self._part(), digests))
            self._worker.backend.share(self._topic(step), data)
            self._shared = step

    def _topic(self, step: int) -> str:
        """Returns one of two topics: one process may share while another reads what was before."""
        return f"corruption/{step // self._settings.every % 2}"

    def _compare(self, step: int) -> None:
        found = self._worker.backend.collect(self._topic(step))
        told = {rank: msgspec.msgpack.decode(data, type=_Shared) for rank, data in found.items()}
        parts: dict[str, dict[str, Sequence[int]]] = {}
        for rank, shared in sorted(told.items()):
            if shared.step == step:
                parts.setdefault(shared.part, {})[f"worker:{rank}"] = shared.digests
        if all(len(copies) == 1 for copies in parts.values()) and not self._warned:
            self._warned = True
            self._worker.warn_as_chief(
                "--check-every: no two processes hold the same values, so none can be compared; "
                "with replicas of the shards (--mesh dp=2,fsdp=2) they can"
            )
        for copies in parts.values():
            if (verdict := judge(copies)) is not None:
                self._found(step, [*copies], verdict)
            else:
                self._findings.settled(min(copies))

    def _found(self, step: int, tasks: Sequence[str], verdict: Verdict) -> None:
        action, own = self._settings.action, f"worker:{self._group.rank}"
        names = [*self._held()] if own in tasks else []
        text = differing(verdict, tasks, "the model", step, names)
        stops = action == "stop" or (action == "heal" and not verdict.decided)
        if stops or own == tasks[0]:
            self._findings.add(text, min(tasks), stops=stops)
        if action == "heal":
            source = int(verdict.good[0].partition(":")[2])
            self._refill(source, wrong=own in verdict.wrong)

    def _refill(self, source: int, *, wrong: bool) -> None:
        """Gives those that are wrong the values and the optimizer's state of one that is not."""
        held = [tensor.detach() for tensor in self._held().values()]
        mine = b""
        if self._group.rank == source:
            flat = [t.cpu().contiguous().reshape(-1).view(torch.uint8) for t in held]
            mine = torch.cat(flat).numpy().tobytes()
        data = bytearray(self._group.broadcast(mine or None, source))
        if not wrong:
            return
        at = 0
        for tensor in held:
            size = tensor.numel() * tensor.element_size()
            taken = torch.frombuffer(data, dtype=torch.uint8, count=size, offset=at)
            tensor.copy_(taken.view(tensor.dtype).reshape(tensor.shape))
            at += size

    def _held(self) -> dict[str, torch.Tensor]:
        """Returns this process's part of each parameter, and of the optimizer's state of it."""
        setup = self._worker.setup
        states: dict[Any, Mapping[str, Any]] = {}
        for each in members(setup.optimizer):
            states |= each.state
        held: dict[str, torch.Tensor] = {}
        for name, parameter in setup.trained.parameters.items():
            held[repr(name)] = to_local(parameter.detach())
            for key, value in states.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    held[f"{key} of {name!r}"] = to_local(value.detach())
        return {name: tensor for name, tensor in held.items() if tensor.numel()}

    def _part(self) -> str:
        """Returns which part of the model this process holds."""
        named = []
        for name, parameter in self._worker.setup.trained.parameters.items():
            place: tuple[int, ...] = ()
            if is_dtensor(parameter):
                at: Sequence[int] = parameter.device_mesh.get_coordinate() or ()
                place = tuple(
                    where
                    for where, placement in zip(at, parameter.placements, strict=True)
                    if not placement.is_replicate()
                )
            named.append((name, place))
        return f"{digest([torch.tensor([*repr(named).encode()])]):x}"
