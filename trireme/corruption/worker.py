"""What a worker checks: what it receives and saves, its memory, and what processes hold alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch

from trireme.corruption.checks import Checks
from trireme.corruption.digests import Seal, digest
from trireme.errors import CheckpointError
from trireme.location import Location
from trireme.ps.flat import PartBuffer, as_bytes
from trireme.ps.messages import Span
from trireme.ps.optimizers import members
from trireme.session.backends.servers import ServerBackend
from trireme.session.checkpoint import CheckpointData, load
from trireme.session.worker.observer import Observer
from trireme.tensors import is_dtensor, to_local

_SAVED = ("model", "optimizer", "average", "local", "tables")


class WorkerChecks(Observer):
    """Checks one worker's values, and those that it shares with the processes of its group."""

    def __init__(self, worker: Any, checks: Checks) -> None:
        super().__init__(worker)
        self._checks = checks
        # what the last update has left, and how often it was written to; None where not looked at
        self._kept: tuple[Seal, int] | None = None
        self._step = 0
        self._seen: Sequence[int] = ()  # digests of values that were compared
        self._shares = False  # whether other processes may hold the same values

    def on_start(self) -> None:
        worker = self.worker
        self._step = worker.global_step
        if worker.lifecycle.servers is not None:
            worker.lifecycle.servers.seal = self._seal
        if not worker.backend.streams:
            worker.storage.seal_by(self._seal_checkpoint)
        self._shares = worker.backend.together and worker.backend.group.size > 1

    def before_gradient(self, computation: Any, batch: Any) -> None:
        if self.worker.setup.process_group is not None:
            self.is_sound()  # what these compute goes to others meanwhile

    def is_sound(self) -> bool:
        """Looks at the memory; returns whether a gradient of the values counts.

        Else they were mended just now. Where more than a bit has changed, the program has written
        through `.data`, which nobody counts.
        """
        kept, self._kept = self._kept, None
        if kept is None or kept[1] != self._writes():
            return True
        with self._checks.spending():
            change = kept[0].changed()
        if change is None or change.bits.bit_count() != 1:
            return True
        task, heals = self.worker.task.name, self._checks.action == "heal"
        text = f"memory of {task} has changed by itself after step {self._step}: {change}"
        self._checks.found(text)
        if heals:
            change.mend()
            self._keep()
        self.worker.remember()  # or it would count as written by the program
        return not heals or self.worker.setup.process_group is not None

    def before_update(self, weight: float, examples: Sequence[Span]) -> None:
        self.is_sound()
        if self._checks.error is not None:  # found by the thread that saves
            raise self._checks.error

    def after_update(self) -> None:
        before, self._step, self._kept = self._step, self.worker.global_step, None
        if self._checks.wants(before, self._step):
            with self._checks.spending():
                self._check_received()
                self._keep()
        if self._shares and self._checks.due(before, self._step):
            self._shares = compare_processes(self.worker, self._checks)

    def status(self) -> Mapping[str, float | str]:
        return self._checks.status()

    def _seal(self, gradient: PartBuffer) -> int:
        if not self._checks.wants(self._step, self._step + max(1, self.worker.task.workers)):
            return 0
        with self._checks.spending():
            return digest(gradient.vectors)

    def _check_received(self) -> None:
        """Compares the values that have come with the digests that came with them."""
        servers: ServerBackend | None = self.worker.lifecycle.servers
        if servers is None or servers.trains_locally:
            return
        task, flat = self.worker.task.name, self.worker.setup.flat
        while servers.digests is not self._seen:
            self._seen = servers.digests
            for shard, sent in enumerate(self._seen):
                # Not where they arrive: further ones may come there meanwhile.
                parts = zip(flat.layout.parts(shard), flat.values, strict=True)
                if sent and digest([v[part.start : part.stop] for part, v in parts]) != sent:
                    self._checks.found(
                        f"values on their way from ps:{servers.server(shard)} to {task} have "
                        f"changed, of step {self._step}"
                    )
                    if self._checks.action == "heal":
                        servers.pull(train=False)
                        break

    def _seal_checkpoint(self, data: CheckpointData) -> Callable[[Location], bool]:
        """Returns what tells, once a checkpoint is written, whether it need not be written again.

        It is read back, and compared with the data as it is now.
        """
        seal, checks, name = Seal(_tensors(data)), self._checks, self.worker.task.name

        def is_good(path: Location) -> bool:
            if wrong := _wrong(seal, path):
                checks.found(f"what {name} has saved is not what it was to save: {wrong}")
            return not wrong or checks.action != "heal"

        return is_good

    def _keep(self) -> None:
        named = self.worker.setup.trained.parameters.items()
        self._kept = Seal((repr(name), tensor) for name, tensor in named), self._writes()

    def _writes(self) -> int:
        """Returns how often the program, or PyTorch, has written to the values."""
        return sum([each._version for each in self.worker.setup.trained.parameters.values()])


def _wrong(seal: Seal, path: Location) -> str:
    """Returns what is wrong with a checkpoint, and puts back what has changed in memory."""
    try:
        written = dict(_tensors(load(path, streamed=True)))
    except CheckpointError as error:
        return f"{error}"
    for name, expected in seal.digests.items():
        if name not in written or Seal([(name, written[name])]).digests[name] != expected:
            where = "on its way to the disk"
            if (change := seal.changed()) is not None:
                change.mend()
                where = f"in memory: {change}"
            return f"{name} of {path.name} has changed {where}"
    return ""


def _tensors(data: CheckpointData) -> Iterator[tuple[str, torch.Tensor]]:
    for group in _SAVED:
        for name, tensor in getattr(data, group).items():
            yield f"{group}/{name}", tensor


def compare_processes(worker: Any, checks: Checks) -> bool:
    """Compares the values of all processes; returns whether any two hold the same.

    Those that are wrong get the values, and the optimizer's state, of one that is not.
    """
    group = worker.backend.group
    seal, own = Seal(_held(worker.setup)), f"worker:{group.rank}"
    part = repr([(n, _place(each)) for n, each in worker.setup.trained.parameters.items()])
    parts: dict[str, dict[str, dict[str, int]]] = {}
    for rank, data in enumerate(group.exchange(msgspec.msgpack.encode((part, seal.digests)))):
        part, taken = msgspec.msgpack.decode(data)
        parts.setdefault(part, {})[f"worker:{rank}"] = taken
    for copies in parts.values():
        good, wrong = checks.compare("the model", worker.global_step, copies, own)
        if not wrong:
            continue
        mine = [as_bytes(t.cpu().contiguous()) for _, t in seal.named] if own == good[0] else None
        sent = group.broadcast(msgspec.msgpack.encode(mine), int(good[0].partition(":")[2]))
        whole = msgspec.msgpack.decode(sent, type=list[bytearray])
        for (_, tensor), its in zip(seal.named, whole, strict=True) if own in wrong else ():
            if its:
                tensor.copy_(torch.frombuffer(its, dtype=tensor.dtype).reshape(tensor.shape))
    comparable = any(len(copies) > 1 for copies in parts.values())
    if not comparable:
        worker.warn_as_chief(
            "--check-every: no two processes hold the same values, so none can be compared; with "
            "replicas of the shards (--mesh dp=2,fsdp=2) they can"
        )
    return comparable


def _held(setup: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields this process's part of each parameter, and of the optimizer's state of it."""
    states: dict[Any, Mapping[str, Any]] = {}
    for each in members(setup.optimizer):
        states |= each.state
    for name, parameter in setup.trained.parameters.items():
        yield repr(name), to_local(parameter.detach())
        for key, value in states.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                yield f"{key} of {name!r}", to_local(value.detach())


def _place(parameter: torch.Tensor) -> list[int]:
    """Returns where in the mesh the part of a parameter lies: those of one place are alike."""
    if not is_dtensor(parameter):
        return []
    at = zip(parameter.device_mesh.get_coordinate() or (), parameter.placements, strict=True)
    return [where for where, placement in at if not placement.is_replicate()]


def checks_of(worker: Any) -> Observer:
    """Returns what checks a worker; what does nothing, where the job compares nothing."""
    checks = Checks(worker.task.config, worker.progress.warn)
    return WorkerChecks(worker, checks) if checks.every else Observer(worker)
