"""`torch.optim` over the flat segments of one server, instead of over the model's tensors.

Element-wise arithmetic does not see the difference. Fused kernels are used where torch has them for
the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trireme.errors import ConfigurationError
from trireme.ps.flat import PartBuffer
from trireme.ps.layout import Layout
from trireme.ps.messages import GroupSpec, OptimizerSpec
from trireme.ps.shard.values.snapshot_tensors import Tensors
from trireme.ps.shard.values.torch_optimizer import TorchOptimizer
from trireme.ps.snapshot_messages import TensorSpec


def load_optimizers() -> None:
    """Imports what torch imports when the first optimizer of a process is made.

    It takes seconds, and ten times as many on a busy machine. A server that did it when the first
    worker shows its model would answer nobody meanwhile, and be given up.
    """
    torch.optim.SGD([torch.zeros(1)], lr=0.0)


class SegmentOptimizer:
    """The optimizers of one server's part: each updates the segments of its parameter groups."""

    def __init__(
        self, spec: OptimizerSpec, layout: Layout, server: int, values: PartBuffer
    ) -> None:
        self._layout, self._server = layout, server
        names = dict.fromkeys(spec.names or (spec.name,))
        made = [TorchOptimizer(name, spec, layout, server, values) for name in names]
        beyond = [s.group for s in layout.segments(server) if s.group >= len(spec.groups)]
        if beyond:
            raise ConfigurationError(
                f"a parameter is of group {beyond[0]}, and the optimizer has {len(spec.groups)}"
            )
        self._optimizers = [each for each in made if each.pieces]
        self._flushes = self._may_flush()

    def step(
        self, gradients: PartBuffer, divisor: float = 1.0, absent: tuple[int, ...] = ()
    ) -> None:
        """Updates the values in place by gradients, divided by `divisor`.

        A divisor other than 1 divides the gradients themselves: in the fused kernel, which spares a
        pass over memory, where that is as precise. Only quotients too small to be normal count as
        zero there.

        Once there is state to work on, the fused kernel is called without the bookkeeping of
        `Optimizer.step`, which takes longer than the kernel does for a small model.

        Where a gradient has become zero, moments decay into denormal numbers, for which kernels
        take nearly twice as long on many processors. They count as zero here, which moves no value
        by more than 1e-30.

        Args:
            absent: the positions of the parameters that have no gradient and are left out: neither
                their values nor their state change.
        """
        gone = self._layout.ranges(absent, self._server) if absent else ()
        torch.set_flush_denormal(self._flushes)
        try:
            for optimizer in self._optimizers:
                optimizer.step(gradients, divisor, gone)
        finally:
            torch.set_flush_denormal(False)

    def set_hyper(self, groups: Sequence[GroupSpec]) -> None:
        """Takes new hyper-parameters, group by group."""
        for optimizer in self._optimizers:
            optimizer.set_hyper(groups)
        self._flushes = self._may_flush()

    def export(self) -> list[tuple[TensorSpec, torch.Tensor]]:
        """Returns the state: live tensors, to be copied by whoever keeps them.

        Tensors of a piece's length are ranges of a flat vector. Anything of one element (a step
        counter) is a scalar of its group, for the same range.
        """
        return [entry for optimizer in self._optimizers for entry in optimizer.export()]

    def restore(self, state: Tensors) -> None:
        """Replaces the state by ranges of flat vectors, however they are cut."""
        for optimizer in self._optimizers:
            optimizer.restore(state)

    def _may_flush(self) -> bool:
        """Returns whether denormal numbers may count as zero: not if one may be a divisor."""
        return all(optimizer.may_flush for optimizer in self._optimizers)
