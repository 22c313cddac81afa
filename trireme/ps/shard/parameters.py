"""The values that one server holds, with all that changes with them: optimizer and average."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import torch

from trireme.errors import Rejected
from trireme.ps.flat import PartBuffer, dtype_of
from trireme.ps.layout import Layout, Part
from trireme.ps.messages import GroupSpec, OptimizerSpec, TensorSpec
from trireme.ps.rule import Average
from trireme.ps.shard.segment_optimizer import PartOptimizer, SegmentOptimizer

__all__ = [
    "PUBLISHED",
    "Contribution",
    "Tensors",
    "Total",
    "Values",
    "ValuesFactory",
    "fill",
    "make_values",
    "mean_of",
    "ranges",
    "squared_norm",
    "tensors_from",
    "total_of",
]

Tensors = Sequence[tuple[TensorSpec, torch.Tensor]]
"""What a snapshot's payload holds, in order."""

PUBLISHED = "state/published"
"""The values that workers have, where those are others: see `trireme.ps.published_values`. In
snapshots and checkpoints they go where the optimizer's state goes."""


class Contribution(msgspec.Struct, frozen=True):
    """What one update brings to a mean.

    Attributes:
        weight: how much it counts; above zero.
        gradients: the gradient.
    """

    weight: float
    gradients: PartBuffer


class Total(msgspec.Struct, frozen=True):
    """A weighted sum of gradients, and what to divide it by for their mean.

    Attributes:
        gradients: the sum, in memory that may be written to; where `divisor` is 1 it may be a
            gradient itself, to which nobody writes.
        divisor: the sum of the weights.
        absent: the positions of the parameters that none of the gradients has; see `Push`.
    """

    gradients: PartBuffer
    divisor: float = 1.0
    absent: tuple[int, ...] = ()


class Values:
    """One server's part of the parameters.

    Args:
        layout: what lies where.
        server: whose part.
        buffer: the parameters' memory.
        optimizer: what updates `buffer`.
        average: keep a moving average of the values by this rule.
    """

    def __init__(
        self,
        layout: Layout,
        server: int,
        buffer: PartBuffer,
        optimizer: PartOptimizer,
        average: Average | None,
    ) -> None:
        self.buffer = buffer
        self.optimizer = optimizer
        self._parts: tuple[Part, ...] = layout.parts(server)
        self._average_rule = average
        self._average = PartBuffer(layout, server) if average else None

    def apply(
        self,
        update: Total | None,
        hyper: Sequence[GroupSpec] | None,
        step: int,
        steps: int = 1,
    ) -> None:
        """Updates the values in place.

        Args:
            update: by the mean of which gradients; None if nothing weighs anything: the values
                stay as they are.
            hyper: the optimizer's hyper-parameters from now on, where they have changed.
            step: the global step that this makes.
            steps: how many steps it makes at once; the moving average decays once for each.
        """
        if hyper is not None:
            self.optimizer.set_hyper(hyper)
        if update is None:
            return
        self.optimizer.step(update.gradients, update.divisor, update.absent)
        if self._average_rule is not None and self._average is not None:
            weight = 1 - self._average_rule.decay_at(step) ** steps
            for average, value in zip(self._average.vectors, self.buffer.vectors, strict=True):
                average.lerp_(value, weight)

    def copy(self, *, state: bool) -> list[tuple[TensorSpec, torch.Tensor]]:
        """Returns copies of the values and the average, with `state` of the optimizer's too."""
        live = ranges("values", self._parts, self.buffer)
        if self._average is not None:
            live += ranges("average", self._parts, self._average)
        if state:
            live += self.optimizer.export()
        return [(spec, tensor.detach().clone()) for spec, tensor in live]

    def load(self, tensors: Tensors) -> None:
        """Replaces the values, and the average and the optimizer's state where they are given.

        Raises:
            Rejected: the values do not cover this part exactly.
        """
        covered = fill(self.buffer, self._parts, tensors, "values")
        if covered != sum(part.length for part in self._parts):
            raise Rejected(f"the values to load cover {covered} elements of this server's part")
        averages = self._average
        if averages is not None and not fill(averages, self._parts, tensors, "average"):
            for average, value in zip(averages.vectors, self.buffer.vectors, strict=True):
                average.copy_(value)
        state = [
            (spec, tensor)
            for spec, tensor in tensors
            if spec.key.startswith("state/") and spec.key != PUBLISHED
        ]
        if state:
            self.optimizer.restore(state)


def ranges(
    key: str, parts: Sequence[Part], buffer: PartBuffer
) -> list[tuple[TensorSpec, torch.Tensor]]:
    """Returns a buffer's vectors, with what they are."""
    return [
        (TensorSpec(key, part.vector.dtype, part.vector.dtype, part.start, part.stop), tensor)
        for part, tensor in zip(parts, buffer.vectors, strict=True)
    ]


def fill(buffer: PartBuffer, parts: Sequence[Part], tensors: Tensors, key: str) -> int:
    """Copies the ranges of `key` that lie in a buffer's parts; returns how many elements."""
    covered = 0
    for spec, tensor in tensors:
        for part, target in zip(parts, buffer.vectors, strict=True):
            low, high = max(spec.start, part.start), min(spec.stop, part.stop)
            if spec.key == key and spec.vector == part.vector.dtype and low < high:
                source = tensor[low - spec.start : high - spec.start]
                target[low - part.start : high - part.start] = source
                covered += high - low
    return covered


def make_values(
    layout: Layout,
    server: int,
    optimizer: OptimizerSpec,
    average: Average | None,
    kind: type[Values] = Values,
) -> Values:
    """Returns a server's values in memory of its own, zero until they are loaded."""
    buffer = PartBuffer(layout, server)
    return kind(
        layout, server, buffer, SegmentOptimizer(optimizer, layout, server, buffer), average
    )


ValuesFactory = Callable[[Layout, int, OptimizerSpec, Average | None], Values]


def mean_of(contributions: Sequence[Contribution], out: PartBuffer) -> PartBuffer:
    """Returns the weighted mean of gradients, added in the given order.

    Equal weights are added as they are and divided once, so that integers stay exact. A single
    gradient is returned itself, without a copy; else the mean is written to `out`.

    Args:
        contributions: at least one.
        out: where the mean goes.
    """
    total = total_of(contributions, out)
    if total.divisor != 1.0:
        for target in total.gradients.vectors:
            target.div_(total.divisor)
    return total.gradients


def total_of(
    contributions: Sequence[Contribution], out: PartBuffer, absent: tuple[int, ...] = ()
) -> Total:
    """Returns what `mean_of` returns, but not divided yet: an optimizer can do that on its way.

    Args:
        contributions: as for `mean_of`.
        out: where the sum goes.
        absent: the parameters of which none of them has a gradient.
    """
    if len(contributions) == 1:
        return Total(contributions[0].gradients, absent=absent)
    weights = [each.weight for each in contributions]
    equal = len(set(weights)) == 1
    factors = [1.0] * len(weights) if equal else weights
    for position, target in enumerate(out.vectors):
        first, second, *others = [each.gradients.vectors[position] for each in contributions]
        if factors[0] == 1.0:  # one pass over the first two
            torch.add(first, second, alpha=factors[1], out=target)
        else:
            torch.mul(first, factors[0], out=target)
            target.add_(second, alpha=factors[1])
        for vector, factor in zip(others, factors[2:], strict=True):
            target.add_(vector, alpha=factor)
    return Total(out, float(len(weights)) if equal else sum(weights), absent)


def squared_norm(buffer: PartBuffer) -> float:
    """Returns the sum of the squares of all elements, in float64."""
    total = 0.0
    for vector in buffer.vectors:
        if vector.numel():
            total += float(torch.linalg.vector_norm(vector, dtype=torch.float64)) ** 2
    return total


def tensors_from(specs: Sequence[TensorSpec], payload: Sequence[memoryview]) -> Tensors:
    """Returns the tensors of a snapshot's or load's payload, as views into it.

    Raises:
        Rejected: the payload's size is not what the specs say, or a spec makes no sense.
    """
    joined = payload[0] if len(payload) == 1 else memoryview(bytearray().join(payload))
    tensors: list[tuple[TensorSpec, torch.Tensor]] = []
    offset = 0
    for spec in specs:
        known = isinstance(getattr(torch, spec.dtype, None), torch.dtype)
        if spec.stop < spec.start or not known:
            raise Rejected(f"a tensor of the payload makes no sense: {spec}")
        dtype = dtype_of(spec.dtype)
        count = 1 if spec.group >= 0 else spec.stop - spec.start
        size = count * dtype.itemsize
        if offset + size > joined.nbytes:
            raise Rejected(f"the payload ends at {joined.nbytes} bytes, inside {spec.key}")
        piece = joined[offset : offset + size]
        tensor = torch.frombuffer(piece, dtype=dtype) if size else torch.empty(0, dtype=dtype)
        tensors.append((spec, tensor.reshape(()) if spec.group >= 0 else tensor))
        offset += size
    if offset != joined.nbytes:
        raise Rejected(f"the payload has {joined.nbytes} bytes and its tensors {offset}")
    return tensors
