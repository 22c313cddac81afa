"""The values that one shard holds, with the optimizer and the moving average."""

from __future__ import annotations

from collections.abc import Callable

import torch

from trireme.errors import Rejected
from trireme.ps.flat import PartBuffer
from trireme.ps.layout import Layout, Part
from trireme.ps.messages import OptimizerSpec
from trireme.ps.rule import Rule
from trireme.ps.shard.values.segment_optimizer import SegmentOptimizer
from trireme.ps.shard.values.snapshot_tensors import Tensors, fill, ranges
from trireme.ps.snapshot_messages import TensorSpec


class Values:
    """One shard's part of the parameters.

    Args:
        rule: whether to keep a moving average of the values.
    """

    def __init__(self, layout: Layout, shard: int, optimizer: OptimizerSpec, rule: Rule) -> None:
        # the values, in new memory, zero until they are loaded
        self.buffer = PartBuffer(layout, shard)
        self.changes = 0  # counts the calls that may have changed the values
        # updates `buffer`
        self.optimizer = SegmentOptimizer(optimizer, layout, shard, self.buffer)
        self._parts: tuple[Part, ...] = layout.parts(shard)
        self._average_rule = rule.average
        self._average = PartBuffer(layout, shard) if rule.average else None

    def average(self, step: int, steps: int = 1) -> None:
        """Brings the average up to an update, which has made so many steps: it decays with each."""
        if self._average_rule is not None and self._average is not None:
            weight = 1 - self._average_rule.decay_at(step) ** steps
            vectors = zip(self._average.vectors, self.buffer.vectors, strict=True)
            for average, value in vectors:
                average.lerp_(value, weight)

    def copy(self, *, state: bool) -> list[tuple[TensorSpec, torch.Tensor]]:
        """Returns copies of the values and the average, with `state` of the optimizer's too."""
        return [(spec, tensor.detach().clone()) for spec, tensor in self.live(state=state)]

    def live(self, *, state: bool) -> list[tuple[TensorSpec, torch.Tensor]]:
        """Returns what `copy` copies: the next update changes it."""
        live = ranges("values", self._parts, self.buffer)
        if self._average is not None:
            live += ranges("average", self._parts, self._average)
        if state:
            live += self.optimizer.export()
        return live

    def named(self) -> list[tuple[str, torch.Tensor]]:
        """Returns the part of each parameter, and of its state, with the padding behind, by name.

        They are sorted, as copies of a shard may divide the optimizer's state otherwise. Numbers of
        a parameter group have one name, for each range that they hold for.
        """
        vectors, found = {vector.name: vector for vector in self.buffer.layout.vectors}, []
        for spec, tensor in self.live(state=True):
            if spec.group >= 0:
                found.append((f"{spec.key} of parameter group {spec.group}", tensor))
                continue
            for placed in vectors[spec.vector].placed:
                if part := placed.within(spec.start, spec.stop):
                    name = f"{spec.key} of {placed.parameter.name!r}"
                    found.append((name, tensor[part[0] - spec.start : part[1] - spec.start]))
        return sorted(found, key=lambda each: each[0])

    def load(self, step: int, tensors: Tensors) -> None:
        """Replaces the values, and the average and the optimizer's state where they are given."""
        self.changes += 1
        covered = fill(self.buffer, self._parts, tensors, "values")
        if covered != sum(part.length for part in self._parts):
            raise Rejected(f"the values to load cover {covered} elements of this shard's part")
        averages = self._average
        if averages is not None and not fill(averages, self._parts, tensors, "average"):
            for average, value in zip(averages.vectors, self.buffer.vectors, strict=True):
                average.copy_(value)
        state = [(spec, tensor) for spec, tensor in tensors if spec.key.startswith("state/")]
        if state:
            self.optimizer.restore(state)

    def write(self, tensors: Tensors) -> None:
        """Replaces values that a program has written itself; all else stays as it is."""
        self.changes += 1
        fill(self.buffer, self._parts, tensors, "values")


ValuesFactory = Callable[[Layout, int, OptimizerSpec, Rule], Values]  # makes a shard's values
