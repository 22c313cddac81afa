"""What a worker checks: the values that it receives, and its memory between two updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from trireme.corruption.checkpoints import sealed
from trireme.corruption.checks import Checks
from trireme.corruption.digests import Change, Seal, digest
from trireme.corruption.naming import by_parameter
from trireme.corruption.processes import Processes
from trireme.errors import CorruptedValues
from trireme.ps.flat import FlatModel, PartBuffer
from trireme.ps.messages import Span
from trireme.ps.snapshot_messages import TensorSpec
from trireme.session.backends.servers import ServerBackend
from trireme.session.worker.observer import Observer

_MOST_PULLS = 3


class WorkerChecks(Observer):
    """Checks one worker's values, and those that it shares with the processes of its group."""

    def __init__(self, worker: Any, checks: Checks) -> None:
        super().__init__(worker)
        self._checks = checks
        # Of what the last update has left, and how often it was written to; None where nothing can
        # be compared.
        self._kept: tuple[Seal, int] | None = None
        self._step = 0
        self._seen: Sequence[int] = ()  # digests of values that were compared
        self._processes: Processes | None = None

    @property
    def _servers(self) -> ServerBackend | None:
        servers: ServerBackend | None = self.worker.lifecycle.servers
        return servers

    # -- events ----------------------------------------------------------------------------------

    def on_start(self) -> None:
        worker = self.worker
        self._step = worker.global_step
        if self._servers is not None:
            self._servers.seal = self._seal
        if not worker.backend.streams:
            worker.storage.seal_by(partial(sealed, task=worker.task.name, checks=self._checks))
        if worker.backend.together and worker.backend.group.size > 1:
            self._processes = Processes(worker, self._checks)

    def before_gradient(self, computation: Any, batch: Any) -> None:
        if self.worker.setup.process_group is not None:
            self._look()  # what these compute goes to others meanwhile

    def is_sound(self) -> bool:
        return self._look() or self.worker.setup.process_group is not None

    def before_update(self, weight: float, examples: Sequence[Span]) -> None:
        self._look()
        self._checks.raise_found()

    def after_update(self) -> None:
        before, self._step, self._kept = self._step, self.worker.global_step, None
        if self._checks.wants(before, self._step):
            with self._checks.spending():
                self._check_received()
                self._keep()
        if self._processes is not None:
            self._processes.compare(before, self._step)

    def status(self) -> Mapping[str, float | str]:
        return self._checks.status()

    def on_fail(self, error: BaseException) -> None:
        """Adds what has changed in memory to the error, which may follow from it."""
        if (change := self._changed()) is not None:
            self._kept = None
            error.add_note(self._checks.found(self._said(change), stops=False))

    # -- what it sends and receives --------------------------------------------------------------

    def _seal(self, gradient: PartBuffer) -> int:
        if not self._checks.wants(self._step, self._step + max(1, self.worker.task.workers)):
            return 0
        with self._checks.spending():
            return digest(gradient.vectors)

    def _check_received(self) -> None:
        """Compares the values that have come with the digests that came with them."""
        servers = self._servers
        if servers is None or servers.trains_locally or servers.digests is self._seen:
            return
        for _ in range(_MOST_PULLS):
            self._seen = servers.digests
            if all([self._has_come(servers, shard) for shard in range(len(self._seen))]):
                return
            servers.pull(train=False)
        raise CorruptedValues(
            f"values have come otherwise than they were sent to {self.worker.task.name}, "
            f"{_MOST_PULLS} times: its memory, or its network, is bad"
        )

    def _has_come(self, servers: ServerBackend, shard: int) -> bool:
        expected, flat = self._seen[shard], self.worker.setup.flat
        parts = flat.layout.parts(shard)
        tensors = [v[p.start : p.stop] for p, v in zip(parts, flat.values, strict=True)]
        if not expected or digest(tensors) == expected:
            return True
        self._checks.found(
            f"values on their way from ps:{servers.server(shard)} to {self.worker.task.name} have "
            f"changed, of step {self._step}"
        )
        return self._checks.action != "heal"

    # -- its memory ------------------------------------------------------------------------------

    def _look(self) -> bool:
        """Returns whether a gradient of the values counts: else they were mended just now."""
        change, self._kept = self._changed(), None
        if change is None:
            return True
        self._checks.found(self._said(change))
        if self._checks.action == "heal":
            change.mend()
            self._keep()
            return False
        self.worker.remember()  # or it would count as written by the program
        return True

    def _changed(self) -> Change | None:
        """Returns the bit that has changed in memory since the last update; None for none.

        Where more has changed, the program has written through `.data`, which nobody counts.
        """
        if self._kept is None or self._kept[1] != self._writes():
            return None
        with self._checks.spending():
            change = self._kept[0].changed()
        return change if change is not None and change.bits.bit_count() == 1 else None

    def _said(self, change: Change) -> str:
        task = self.worker.task.name
        return f"memory of {task} has changed by itself after step {self._step}: {change}"

    def _keep(self) -> None:
        trained = self.worker.setup.trained
        named = [(repr(name), tensor) for name, tensor in trained.parameters.items()]
        if isinstance(trained, FlatModel):
            specs = [
                TensorSpec("values", v.dtype, v.name, 0, v.length) for v in trained.layout.vectors
            ]
            named = by_parameter(trained.layout, [*zip(specs, trained.values, strict=True)])
        self._kept = Seal(named), self._writes()

    def _writes(self) -> int:
        """Returns how often the program, or PyTorch, has written to the values."""
        trained = self.worker.setup.trained
        vectors: Sequence[torch.Tensor] = ()
        if isinstance(trained, FlatModel):
            vectors = trained.values
        return sum([tensor._version for tensor in (*trained.parameters.values(), *vectors)])


def checks_of(worker: Any) -> Observer:
    """Returns what checks a worker; what does nothing, where the job compares nothing."""
    checks = Checks(worker.task.config, worker.progress.warn)
    return WorkerChecks(worker, checks) if checks.every else Observer(worker)
