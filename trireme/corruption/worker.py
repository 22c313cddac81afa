"""What a worker checks: the values that it receives, and its memory between two updates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from trireme.corruption.checkpoints import SealedCheckpoints
from trireme.corruption.digests import Flip, Seal, digest, mend
from trireme.corruption.findings import Findings
from trireme.corruption.naming import described, values_of
from trireme.corruption.processes import Processes
from trireme.corruption.settings import Budget, Settings
from trireme.errors import CorruptedValues
from trireme.ps.flat import FlatModel, PartBuffer
from trireme.ps.messages import Span
from trireme.session.backends.servers import ServerBackend
from trireme.session.worker.observer import Observer

_MOST_PULLS = 3


class WorkerChecks(Observer):
    """Checks one worker's values, and those that it shares with the processes of its group."""

    def __init__(self, worker: Any) -> None:
        super().__init__(worker)
        self._settings = Settings.of(worker.task.config)
        self._budget = Budget()
        self._findings = Findings(worker.progress.warn)
        # Of what the last update has left, and how often it was written to; None where nothing can
        # be compared.
        self._kept: tuple[Seal, int] | None = None
        self._step = 0
        self._looks = False  # whether the update under way is sealed
        self._looked = False  # whether memory was looked at since the gradient was computed
        self._seen: Sequence[int] = ()  # digests of values that were compared
        self._begun = False
        self._processes: Processes | None = None
        self._checkpoints: SealedCheckpoints | None = None

    @property
    def _servers(self) -> ServerBackend | None:
        servers: ServerBackend | None = self.worker.lifecycle.servers
        return servers

    @property
    def _heals(self) -> bool:
        return self._settings.action == "heal"

    def _begin(self) -> None:
        self._begun = True
        worker, settings = self.worker, self._settings
        self._step = worker.global_step
        if self._servers is not None:
            self._servers.seal = self._seal
        if not worker.backend.streams:
            self._checkpoints = SealedCheckpoints(worker.task.name, settings.action, self._findings)
            worker.storage.seal_by(self._checkpoints.seal)
        if worker.backend.together and worker.backend.group.size > 1:
            self._processes = Processes(worker, settings, self._findings)

    # -- events ----------------------------------------------------------------------------------

    def before_gradient(self, computation: Any, batch: Any) -> None:
        if self._settings.every and self._begun and self.worker.setup.process_group is not None:
            self._look()  # what these compute goes to others meanwhile

    def is_sound(self) -> bool:
        if not self._settings.every or not self._begun:
            return True
        self._looked = True
        alone = self.worker.setup.process_group is None
        return self._look() or not alone

    def before_update(self, weight: float, examples: Sequence[Span]) -> None:
        if not self._settings.every:
            return
        if not self._begun:
            self._begin()
        if not self._looked:
            self._look()
        self._looked = False
        if self._checkpoints is not None:
            self._checkpoints.check()
        step, workers = self._step, max(1, self.worker.task.workers)
        self._looks = self._settings.due(step, step + workers) or self._budget.allows()

    def after_update(self) -> None:
        if not self._settings.every:
            return
        before, self._step = self._step, self.worker.global_step
        due = self._settings.due(before, self._step)
        self._kept = None
        if due or self._budget.allows():
            with self._budget.spending():
                self._check_received()
                self._keep()
        if self._processes is not None:
            self._processes.look(before, self._step)

    def status(self) -> dict[str, float | str]:
        return {**self._findings.status()} if self._settings.every else {}

    def on_fail(self, error: BaseException) -> None:
        """Adds what has changed in memory to the error, which may follow from it."""
        if self._settings.every and (flip := self._changed()) is not None:
            self._kept = None
            error.add_note(self._findings.add(self._said(flip)))

    # -- what it sends and receives --------------------------------------------------------------

    def _seal(self, gradient: PartBuffer) -> int:
        if not self._looks:
            return 0
        with self._budget.spending():
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
        if not expected:
            return True
        parts = flat.layout.parts(shard)
        tensors = [v[p.start : p.stop] for p, v in zip(parts, flat.values, strict=True)]
        if digest(tensors) == expected:
            return True
        self._found(
            f"values on their way from ps:{servers.server(shard)} to {self.worker.task.name} have "
            f"changed, of step {self._step}"
        )
        return not self._heals

    # -- its memory ------------------------------------------------------------------------------

    def _look(self) -> bool:
        """Returns whether the values are as the last update has left them; mends them if not."""
        flip = self._changed()
        self._kept = None
        if flip is None:
            return True
        self._found(self._said(flip))
        if self._heals:
            mend(self._tensors(), flip)
            self._keep()
        else:
            self.worker.remember()  # or it would count as written by the program
        return not self._heals

    def _changed(self) -> Flip | None:
        """Returns the bit that has changed in memory since the last update; None for none.

        Where more has changed, the program has written through `.data`, which nobody counts.
        """
        if self._kept is None or self._kept[1] != self._writes():
            return None
        seal, tensors = self._kept[0], self._tensors()
        with self._budget.spending():
            if digest(tensors) == seal.digest:
                return None
        flip = seal.find(tensors)
        return flip if flip is not None and flip.bits.bit_count() == 1 else None

    def _said(self, flip: Flip) -> str:
        trained = self.worker.setup.trained
        if isinstance(trained, FlatModel):
            held = values_of(trained.layout, trained.values)
            what = described(trained.layout, held, flip, "its values")
        else:
            name, tensor = [*trained.parameters.items()][flip.tensor]
            element, bit = flip.within(tensor.element_size())
            what = f"bit {bit} of element {element} of {name!r}"
        return (
            f"memory of {self.worker.task.name} has changed by itself after step {self._step}: "
            f"{what}"
        )

    def _keep(self) -> None:
        self._kept = Seal(self._tensors()), self._writes()

    def _tensors(self) -> Sequence[torch.Tensor]:
        trained = self.worker.setup.trained
        if isinstance(trained, FlatModel):
            return trained.values
        return [parameter.detach() for parameter in trained.parameters.values()]

    def _writes(self) -> int:
        """Returns how often the program, or PyTorch, has written to the values."""
        every = (*self.worker.setup.trained.parameters.values(), *self._tensors())
        return sum([tensor._version for tensor in every])

    def _found(self, text: str) -> None:
        self._findings.add(text, stops=self._settings.action == "stop")
