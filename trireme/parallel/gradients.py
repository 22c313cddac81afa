"""The mean of gradients over the replicas of a gang, begun while backward still runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from trireme.errors import ConfigurationError
from trireme.parallel.gang import Gang, lost_peer
from trireme.parallel.local import local
from trireme.ps.dense import FlatModel

__all__ = ["BucketedMean", "EqualShares", "ListMean", "ShardedMean"]

BUCKET_BYTES = 4 << 20


class _Shares:
    """How much each replica's gradient counts."""

    def __init__(self, gang: Gang) -> None:
        self._gang = gang

    def share(self, examples: float) -> Callable[[], float]:
        # Each replica is held by several processes where a stage or a tensor is shared.
        per_replica = self._gang.size // self._gang.mesh.replicas
        total = self._gang.count(examples)

        def factor() -> float:
            everything = total() / per_replica
            return examples * self._gang.mesh.replicas / everything if everything else 0.0

        return factor


class ShardedMean(_Shares):
    """FSDP makes the means itself; it is told how much each replica counts, and when.

    Args:
        gang: whose replicas.
        modules: with shards, whose gradients are to be averaged after the last pass of a step only.
    """

    def __init__(self, gang: Gang, modules: Sequence[nn.Module] = ()) -> None:
        super().__init__(gang)
        from torch.distributed.fsdp import FSDPModule  # loads slowly: only who has shards needs it

        self._modules = [module for module in modules if isinstance(module, FSDPModule)]

    def share(self, examples: float) -> Callable[[], float]:
        self._average(False)
        return super().share(examples)

    def begin(self) -> None:
        self._average(True)

    def _average(self, now: bool) -> None:
        for module in self._modules:
            module.set_requires_gradient_sync(now)

    def finish(self) -> None:
        pass


class EqualShares:
    """FSDP makes the means itself, at every backward pass of a loop that is the program's own.

    Args:
        gang: whose replicas.
    """

    def __init__(self, gang: Gang) -> None:
        self._gang = gang

    def share(self, examples: float) -> Callable[[], float]:
        """As `Reducer.share`; the factor is always 1.

        Raises:
            ConfigurationError: another replica has another number of examples, when it is waited.
        """
        total = self._gang.count(examples)

        def factor() -> float:
            if abs(total() - examples * self._gang.size) > 1e-9 * abs(total()):
                raise ConfigurationError(
                    f"rank {self._gang.rank} made a step of {examples:g} examples, and others of "
                    "other numbers: fsdp averages gradients while backward runs, and each counts "
                    "alike; give every process batches of one size, or use --strategy allreduce"
                )
            return 1.0

        return factor

    def begin(self) -> None:
        pass

    def finish(self) -> None:
        pass


class BucketedMean(_Shares):
    """Gradients that lie one after the other in flat vectors: summed in place, bucket by bucket.

    A bucket leaves when backward has made the last of its gradients. Buckets leave in the same
    order everywhere, from the end of each vector to its begin; a parameter that took no part
    counts as a gradient of zero, so the processes need not use the same ones. What took no part in
    any of them has no gradient then: with the last bucket goes how many have one.

    Args:
        gang: whose replicas.
        flat: the gradients, with room for `presence`.
    """

    def __init__(self, gang: Gang, flat: FlatModel) -> None:
        super().__init__(gang)
        self._flat = flat
        # With versions of their own: sums of what backward made are no writes to the gradients.
        self._vectors = [vector.data for vector in flat.gradients]
        self._buckets: list[torch.Tensor] = []
        self._sizes: list[int] = []  # parameters a bucket
        self._missing: list[int] = []  # of them not yet there
        self._next = 0
        self._armed = False
        self._works: list[dist.Work] = []
        for vector, parameters in zip(self._vectors, flat.placed, strict=True):
            self._cut(vector, parameters)
        # The last to leave, which begins where the last vector does.
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
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda _: self._made(index)
            )

    def begin(self) -> None:
        self._armed = True
        self._works.clear()  # now, not when they are done: see `Gang.__init__`
        self._missing = list(self._sizes)
        self._next = 0

    def _made(self, index: int) -> None:
        if not self._armed:
            return
        self._missing[index] -= 1
        # The last one waits until it is known what has no gradient.
        while self._next < len(self._buckets) - 1 and self._missing[self._next] == 0:
            self._send()

    def _send(self) -> None:
        with lost_peer():
            work = dist.all_reduce(
                self._buckets[self._next], group=self._gang.replicas, async_op=True
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
            vector.div_(self._gang.mesh.replicas)
        if absent:  # here; what another process has a gradient for has one here too
            counts = flat.presence.tolist()
            flat.restore_gradients([position for position in absent if not counts[position]])


class ListMean(_Shares):
    """Gradients that lie anywhere, or are shards of tensors: joined, summed, put back.

    Args:
        gang: whose replicas along dp.
        parameters: what has the gradients; the same ones in each replica.
    """

    def __init__(self, gang: Gang, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(gang)
        self._parameters = parameters

    def begin(self) -> None:
        pass

    def finish(self) -> None:
        kinds: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in self._parameters:
            kinds.setdefault(parameter.dtype, []).append(parameter)
        for parameters in kinds.values():
            self._add_up(parameters)

    def _add_up(self, parameters: Sequence[nn.Parameter]) -> None:
        """Makes the means of the gradients of one dtype; what has none anywhere is left without."""
        present = [float(parameter.grad is not None) for parameter in parameters]
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [local(p.grad) for p in parameters if p.grad is not None]
        counts = torch.tensor(present, dtype=gradients[0].dtype, device=gradients[0].device)
        joined = torch.cat([*(gradient.reshape(-1) for gradient in gradients), counts])
        with lost_peer():
            dist.all_reduce(joined, group=self._gang.group("dp"))
        joined.div_(self._gang.mesh.dp)
        *pieces, counts = torch.split(joined, [*(g.numel() for g in gradients), len(parameters)])
        torch._foreach_copy_(
            gradients,
            [p.view(g.shape) for p, g in zip(pieces, gradients, strict=True)],
        )
        if not all(present):
            for parameter, count in zip(parameters, counts.tolist(), strict=True):
                if not count:
                    parameter.grad = None
