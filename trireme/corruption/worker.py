"""What a worker checks: what it receives and saves, its memory, and what processes hold alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes

from trireme.corruption.checks import Checks
from trireme.corruption.digests import Seal, digest
from trireme.errors import CheckpointError
from trireme.location import Location
from trireme.ps.flat import PartBuffer
from trireme.ps.messages import Span
from trireme.ps.optimizers import named_state
from trireme.session.backends.servers import ServerBackend
from trireme.session.checkpoint import CheckpointData, load
from trireme.session.worker.observer import Observer

_SAVED = ("model", "optimizer", "average", "local", "tables")


class WorkerChecks(Observer):
    """Checks one worker's values, and those that it shares with the processes of its group."""

    def __init__(self, worker: Any, checks: Checks) -> None:
        super().__init__(worker)
        self._checks = checks
        self._kept: Seal | None = None  # what the last update has left; None where not looked at
        self._step = 0
        self._seen: Sequence[int] = ()  # digests of values that were compared
        self._shares = False  # whether other processes hold the same values

    def on_start(self) -> None:
        worker, backend = self.worker, self.worker.backend
        self._step = worker.global_step
        if worker.lifecycle.servers is not None:
            worker.lifecycle.servers.seal = self._seal
        if not backend.streams:
            worker.storage.seal_by(self._seal_checkpoint)
        self._shares = backend.together and backend.group.mesh.dp > 1
        if backend.together and backend.group.size > 1 and not self._shares:
            worker.warn_as_chief(
                "--check-every: no two processes hold the same values; give --mesh dp=2,fsdp=2"
            )

        if worker.task.servers and worker.task.config.tasks.replicas < 2 <= self._checks.every:
            worker.warn_as_chief(
                "--check-every N finds few flips in servers without copies: give --replicas 2"
            )

    def before_gradient(self, computation: Any, batch: Any) -> None:
        if self.worker.setup.process_group is not None:
            self.is_sound()  # what these compute goes to others meanwhile

    def is_sound(self) -> bool:
        """Looks for a flipped bit; returns False where the gradient must be computed anew."""
        kept, self._kept = self._kept, None  # most steps keep nothing, and look at nothing
        change = None if kept is None else self._checks.changed(kept, self._writes())
        if change is None or change.bits.bit_count() != 1:  # more: written through `.data`
            return True
        text = f"has changed by itself after step {self._step}: {change}"
        self._checks.found(f"memory of {self.worker.task.name} {text}")
        if self._checks.heals:
            change.mend()
            self._keep()
        self.worker.remember()  # or it would count as written by the program, which one worker has
        return not self._checks.heals or self.worker.setup.process_group is not None

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
            self._compare_processes()

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
                    way = f"on their way from ps:{servers.server(shard)} to {task}"
                    self._checks.found(f"values {way} have changed, of step {self._step}")
                    if self._checks.heals:
                        servers.pull(train=False)
                        break

    def _seal_checkpoint(self, data: CheckpointData) -> Callable[[Location], bool]:
        """Returns what reads a checkpoint back, once it is written, and says whether it is good."""
        seal, checks, name = Seal(_tensors(data)), self._checks, self.worker.task.name

        def is_good(path: Location) -> bool:
            try:
                read = Seal(_tensors(load(path, streamed=True))).digests
                wrong = [each for each, taken in seal.digests.items() if read.get(each) != taken]
            except CheckpointError as error:
                wrong = [f"{error}"]
            if not wrong:
                return True
            where, change = "on its way to the disk", seal.changed()
            if change is not None:
                change.mend()
                where = f"in memory: {change}"
            checks.found(f"{wrong[0]} of {path.name}, which {name} has saved, has changed {where}")
            return not checks.heals

        return is_good

    def _keep(self) -> None:
        named = self.worker.setup.trained.parameters.items()
        self._kept = Seal(((repr(name), tensor) for name, tensor in named), self._writes())

    def _writes(self) -> int:
        """Returns how often the program, or PyTorch, has written to the values."""
        return sum([each._version for each in self.worker.setup.trained.parameters.values()])

    def _compare_processes(self) -> None:
        """Compares what all processes hold; those that are wrong take it from one that is not."""
        group, setup = self.worker.backend.group, self.worker.setup
        parameters, own = setup.trained.parameters, f"worker:{group.rank}"
        seal = Seal({**parameters, **named_state(setup.optimizer, parameters)}.items())
        parts: dict[str, dict[str, dict[str, int]]] = {}
        for rank, data in enumerate(group.exchange(msgspec.msgpack.encode(seal.digests))):
            part = str(group.mesh.coordinates(rank) | {"dp": 0})  # of the model
            parts.setdefault(part, {})[f"worker:{rank}"] = msgspec.msgpack.decode(data)
        for copies in parts.values():
            good, wrong = self._checks.compare("the model", self._step, copies, own)
            if wrong:
                mine = {name: each.cpu().clone() for name, each in seal.named if own == good[0]}
                source = int(good[0].partition(":")[2])
                whole = load_bytes(group.broadcast(save_bytes(mine) if mine else None, source))
                for name, tensor in seal.named if own in wrong else ():
                    tensor.copy_(whole[name])


def _tensors(data: CheckpointData) -> Iterator[tuple[str, torch.Tensor]]:
    for group in _SAVED:
        for name, tensor in getattr(data, group).items():
            yield f"{group}/{name}", tensor


def checks_of(worker: Any) -> Observer:
    """Returns what checks a worker; what does nothing, where the job compares nothing."""
    checks = Checks(worker.task.config, worker.progress.warn)
    return WorkerChecks(worker, checks) if checks.every else Observer(worker)
