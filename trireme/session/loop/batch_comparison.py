"""Finds workers that a program gives the same data: their steps compute the same gradients."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from trireme.errors import Fenced
from trireme.session.loop.batch_watch import COMPARED, BatchWatch
from trireme.session.worker.worker import Worker

if TYPE_CHECKING:
    from trireme.parallel.processes.process_group import ProcessGroup

_TOPIC = "first batches"
_LAST_STEP = 1 << 12  # a worker that has begun none by then is not waited for


class BatchComparison:
    """Compares the first batches of all workers, and warns, once, of those that have the same.

    Processes that step together exchange digests at a step that all of them make. Workers of
    servers leave theirs there, and the chief looks for those of the others, ever less often.
    """

    def __init__(self, worker: Worker, batches: BatchWatch) -> None:
        self._worker = worker
        self._batches = batches
        self._steps = 0
        self._left = self._over = worker.setup.replicas == 1

    def step_made(self) -> None:
        """Notes a step. All processes that make it together must call it."""
        self._steps += 1
        group = self._worker.setup.process_group
        if group is not None and group.mesh.replicas > 1 and self._steps == COMPARED:
            self._compare_together(group)
        if self._over or not self._worker.task.servers or self._steps < COMPARED:
            return
        with suppress(Fenced):  # the next update tells
            self._compare_by_servers()

    def _compare_by_servers(self) -> None:
        backend = self._worker.backend
        if not self._left and (digests := self._digests):
            self._left = True
            backend.share(_TOPIC, digests)
        if not self._worker.lifecycle.is_chief or self._steps & (self._steps - 1):
            return
        found = backend.collect(_TOPIC)
        everybody = len(found) == self._worker.task.workers
        self._over = everybody or self._steps >= _LAST_STEP
        self._warn({f"worker:{index}": data for index, data in sorted(found.items())})

    @property
    def _digests(self) -> bytes:
        """The digests of the first batches; empty where fewer were seen."""
        digests = self._batches.digests
        return b"".join(digests) if len(digests) == COMPARED else b""

    def _compare_together(self, group: ProcessGroup) -> None:
        found = group.exchange(self._digests)
        ranks = group.reporting_ranks
        if group.is_chief:
            name = "rank" if self._worker.task.servers else "worker"
            self._warn({f"{name}:{rank}": found[rank] for rank in ranks if found[rank]})

    def _warn(self, found: Mapping[str, bytes]) -> None:
        named: dict[bytes, list[str]] = {}
        for name, digests in found.items():
            named.setdefault(digests, []).append(name)
        same = next((names for names in named.values() if len(names) > 1), None)
        if same is None:
            return
        self._over = True
        self._worker.progress.warn(
            f"{', '.join(same)} were given the same batches at the beginning: they compute the "
            "same gradients, and train no faster than one. Give all the whole data by "
            "optimizer.epochs(loader, count) or optimizer.prepare(loader), which deal it, or each "
            "its own part (optimizer.replica of optimizer.replicas)"
        )
