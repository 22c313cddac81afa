"""The batches that a program's own loop gives to its model: how many examples, and which."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from trireme.errors import ConfigurationError, Fenced
from trireme.session.model.module_names import called_modules
from trireme.session.worker.worker import Worker
from trireme.tensors import digest, tensors_in

_COMPARED = 2  # batches at the beginning whose digests are kept, to compare those of workers
_TOPIC = "first batches"
_LAST_STEP = 1 << 12  # a worker that has begun none by then is not waited for


class BatchWatch:
    """Looks at what a model in training mode is called with, except inside `torch.compile`.

    Processes that step together exchange the digests of their first batches. Workers of servers
    leave theirs there, and the chief looks for those of the others, ever less often. The model's
    hooks are copied with it: this object holds nothing of the job.
    """

    def __init__(self, model: nn.Module) -> None:
        self.digests: list[bytes] = []  # of the first batches, each with its size behind
        self.sizes: set[int] = set()  # of batches of all workers, once they were compared
        self._examples: dict[nn.Module, int] = {}
        self._handles: list[RemovableHandle] = []
        self._steps = 0
        self._compared = False  # with all other workers
        for module in called_modules(model):
            # A LightningModule is not called itself, but its children are.
            children = [
                each.register_forward_pre_hook(self._called, with_kwargs=True)
                for each in module.children()
            ]
            own = module.register_forward_pre_hook(partial(_remove, children))
            called = module.register_forward_pre_hook(self._called, with_kwargs=True)
            self._handles += [*children, own, called]

    def _called(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or not (module.training and torch.is_grad_enabled()):
            return
        given = list(tensors_in((args, kwargs)))
        first = next(iter(given), None)
        if first is None or not first.dim():
            return
        self._examples[module] = self._examples.get(module, 0) + first.size(0)
        # Batches with sparse or nested tensors are not compared: those have no single buffer.
        plain = all(each.layout is torch.strided and not each.is_nested for each in given)
        if plain and len(self.digests) < _COMPARED:
            self.digests.append(digest(given) + first.size(0).to_bytes(8))

    def examples(self) -> int:
        """Returns the examples of the step, of the module that has seen the fewest."""
        return min(self._examples.values(), default=0)

    def take_examples(self) -> int:
        """Returns the examples of the step, and begins the next one."""
        fewest = self.examples()
        self._examples.clear()
        return fewest

    def compare(self, worker: Worker) -> None:
        """Counts a step, in all processes that make it; warns, once, of the same first batches."""
        self._steps += 1
        if self._compared or self._steps < _COMPARED:
            return
        digests = b"".join(self.digests) if len(self.digests) == _COMPARED else b""
        group, several = worker.setup.process_group, worker.task.workers > 1
        if group is not None and self._steps == _COMPARED:
            found = group.exchange(digests)
            for rank, other in enumerate(found):
                mine = group.mesh.replica(rank) == group.replica
                if mine and other != digests:
                    raise ConfigurationError(
                        f"rank {group.rank} and rank {rank} hold one replica together, and were "
                        "given different batches: feed all processes of a replica the same "
                        "(`optimizer.replica` and `.replicas` number the batches)"
                    )
            if group.is_chief:
                name = "rank" if worker.task.servers else "worker"
                ranks = group.reporting_ranks
                if self._warn(worker, {f"{name}:{rank}": found[rank] for rank in ranks}):
                    return
        if not (worker.task.servers and several):
            return
        with suppress(Fenced):  # the next update tells
            if digests and self._steps == _COMPARED:
                worker.backend.share(_TOPIC, digests)
            if worker.lifecycle.is_chief and not self._steps & (self._steps - 1):
                shared = worker.backend.collect(_TOPIC)
                self._compared = len(shared) == worker.task.workers or self._steps >= _LAST_STEP
                self._warn(worker, {f"worker:{i}": data for i, data in sorted(shared.items())})

    def _warn(self, worker: Worker, found: Mapping[str, bytes]) -> bool:
        self.sizes |= {int.from_bytes(each[-8:]) for each in found.values() if each}
        named: dict[bytes, list[str]] = {}
        for name, digests in found.items():
            named.setdefault(digests, []).append(name)
        same = next((names for each, names in named.items() if each and len(names) > 1), None)
        if same is not None:
            self._compared = True
            worker.progress.warn(
                f"{', '.join(same)} were given the same batches at the beginning: they compute the "
                "same gradients, and train no faster than one. Give all the whole data by "
                "optimizer.epochs(loader, count) or optimizer.prepare(loader), which deal it, or "
                "each its own part (optimizer.replica of optimizer.replicas)"
            )
        return same is not None

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


def _remove(handles: list[RemovableHandle], module: nn.Module, args: Any) -> None:
    if not torch.compiler.is_compiling():
        while handles:
            handles.pop().remove()
