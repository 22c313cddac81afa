"""The mean of gradients over the replicas of a process group, begun while backward still runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from trireme.errors import ConfigurationError
from trireme.parallel.processes.lost_peers import lost_peer
from trireme.parallel.processes.process_group import TorchProcessGroup
from trireme.ps.flat import FlatModel
from trireme.session.model.reducer import Reducer
from trireme.tensors import to_local

BUCKET_BYTES = 4 << 20
_NONE = 1e-6


class _WeightedMean(Reducer):
    """Weights the gradient of each replica by its number of examples."""

    def __init__(self, process_group: TorchProcessGroup) -> None:
        self._process_group = process_group

    def scale_factor(self, examples: float) -> Callable[[], float]:
        # Several processes hold one replica where it is split into stages or tensor shards.
        per_replica = self._process_group.size // self._process_group.mesh.replicas
        total = self._process_group.count(examples)

        def factor() -> float:
            everything = total() / per_replica
            return examples * self._process_group.mesh.replicas / everything if everything else 0.0

        return factor


class ShardedMean(_WeightedMean):
    """The mean that FSDP computes during backward, weighted by each replica's examples.

    That of parameters that are `whole` in each replica is computed after backward.
    """

    def __init__(
        self,
        process_group: TorchProcessGroup,
        whole: Sequence[nn.Parameter],
        modules: Sequence[nn.Module] = (),
    ) -> None:
        super().__init__(process_group)
        self._whole = whole
        from torch.distributed.fsdp import FSDPModule  # slow import, needed for shards only

        self._modules = [module for module in modules if isinstance(module, FSDPModule)]

    def scale_factor(self, examples: float) -> Callable[[], float]:
        self._sync(False)
        return super().scale_factor(examples)

    def begin(self) -> None:
        self._sync(True)

    def finish(self) -> None:
        _average(self._whole, self._process_group.replicas, self._process_group.mesh.replicas)

    def _sync(self, now: bool) -> None:
        for module in self._modules:
            module.set_requires_gradient_sync(now)


class EqualBatchMean(ShardedMean):
    """The unweighted mean that FSDP computes in each backward pass of a program's own loop."""

    def scale_factor(self, examples: float) -> Callable[[], float]:
        """As `Reducer.scale_factor`; the factor is always 1."""
        total = self._process_group.count(examples)

        def factor() -> float:
            if abs(total() - examples * self._process_group.size) > 1e-9 * abs(total()):
                # A step that only takes part has a number of examples that is hardly above 0.
                mine = f"of {examples:g} examples" if examples > _NONE else "without examples"
                raise ConfigurationError(
                    f"rank {self._process_group.rank} made a step {mine}, and "
                    "others of other numbers: fsdp averages gradients while backward runs, "
                    "all with the same weight; give every process batches of one size "
                    "(drop_last=True), or use --strategy allreduce"
                )
            return 1.0

        return factor


class BucketedMean(_WeightedMean):
    """The mean of gradients in flat vectors, reduced in place and bucket by bucket.

    A bucket is reduced as soon as backward has computed the last of its gradients. All processes
    reduce the buckets in the same order, from the end of each vector to its beginning. A parameter
    that a process did not use counts as a gradient of zero, so the processes need not use the same
    parameters. The last bucket also carries the number of processes that have a gradient of each
    parameter: a parameter without a gradient in all processes has none afterwards.
    """

    def __init__(self, process_group: TorchProcessGroup, flat: FlatModel) -> None:
        super().__init__(process_group)
        self._flat = flat
        self._missing: list[int] = []  # how many gradients of each bucket are not computed yet
        self._next = 0
        self._armed = False
        self._works: list[dist.Work] = []
        self._handles: list[RemovableHandle] = []
        self.lay_out()

    def lay_out(self) -> None:
        flat = self._flat
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        # `.data` has its own version counter: the reductions must not count as writes to gradients.
        self._vectors = [vector.data for vector in flat.gradients]
        self._buckets: list[torch.Tensor] = []
        self._sizes: list[int] = []  # the number of parameters in each bucket
        for vector, parameters in zip(self._vectors, flat.placed, strict=True):
            self._cut(vector, parameters)
        # The bucket that is reduced last lies at the beginning of the last vector, behind
        # `presence`.
        head, lead = self._buckets[-1], flat.presence.numel()
        self._buckets[-1] = head.as_strided(
            (lead + head.numel(),), (1,), head.storage_offset() - lead
        )

    def _cut(self, vector: torch.Tensor, placed: Sequence[tuple[nn.Parameter, int, int]]) -> None:
        members: list[nn.Parameter] = []
        stop = vector.numel()
        for parameter, start, _ in reversed(placed):
            members.append(parameter)
            if (stop - start) * vector.element_size() >= BUCKET_BYTES:
                self._add(vector[start:stop], members)
                members, stop = [], start
        if stop:
            self._add(vector[:stop], members)

    def _add(self, bucket: torch.Tensor, members: Sequence[nn.Parameter]) -> None:
        index = len(self._buckets)
        self._buckets.append(bucket)
        self._sizes.append(len(members))
        for parameter in members:
            handle = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda _: self._made(index)
            )
            self._handles.append(handle)

    def begin(self) -> None:
        self._armed = True
        self._works.clear()  # released here: see `TorchProcessGroup.__init__`
        self._missing = list(self._sizes)
        self._next = 0

    def _made(self, index: int) -> None:
        if not self._armed:
            return
        self._missing[index] -= 1
        # The last bucket waits until all absent gradients are known.
        while self._next < len(self._buckets) - 1 and self._missing[self._next] == 0:
            self._send()

    def _send(self) -> None:
        with lost_peer():
            work = dist.all_reduce(
                self._buckets[self._next], group=self._process_group.replicas, async_op=True
            )
        assert work is not None
        self._works.append(work)
        self._next += 1

    def finish(self) -> None:
        self._armed = False
        flat = self._flat
        absent = flat.absent
        flat.presence.fill_(1.0)
        for position in absent:
            flat.presence[position] = 0.0
        while self._next < len(self._buckets):
            self._send()
        with lost_peer():
            for work in self._works:
                work.wait()
        for vector in self._vectors:
            vector.div_(self._process_group.mesh.replicas)
        if absent:  # a parameter keeps a gradient if any process has one
            counts = flat.presence.tolist()
            flat.restore_gradients([position for position in absent if not counts[position]])


def _average(
    parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None, replicas: int
) -> None:
    """Averages separate gradients; a parameter without a gradient in all replicas keeps none."""
    kinds: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault(parameter.dtype, []).append(parameter)
    for alike in kinds.values():
        present = [float(parameter.grad is not None) for parameter in alike]
        for parameter in alike:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [to_local(p.grad) for p in alike if p.grad is not None]
        counts = torch.tensor(present, dtype=gradients[0].dtype, device=gradients[0].device)
        joined = torch.cat([*(gradient.reshape(-1) for gradient in gradients), counts])
        with lost_peer():
            dist.all_reduce(joined, group=group)
        joined.div_(replicas)
        sizes = [*(gradient.numel() for gradient in gradients), len(alike)]
        *means, counts = torch.split(joined, sizes)
        shaped = [mean.view(g.shape) for mean, g in zip(means, gradients, strict=True)]
        torch._foreach_copy_(gradients, shaped)
        if not all(present):
            for parameter, count in zip(alike, counts.tolist(), strict=True):
                if not count:
                    parameter.grad = None
