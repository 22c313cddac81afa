"""Published values: the values that workers have, where a server packs the changes that it sends.

Besides the true values a server keeps the *published* ones, which every worker has. After a round
it packs the difference, values - published, and adds the unpacked difference to the published
values. A worker that has the published values of the round before gets the packed difference and
adds the same; any other gets the published values whole. What packing loses stays in the
difference, and so is part of the next one. Source: Tang et al., DoubleSqueeze (ICML 2019),
algorithm 1, the server's side.

Both sides add by `add_packed`, in numbers of the same width: their published values are equal bit
by bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trireme.ps.compression import Packed
from trireme.ps.flat import PartBuffer
from trireme.ps.layout import Layout
from trireme.ps.shard.values.snapshot_tensors import PUBLISHED, Tensors, fill
from trireme.wire.codec import Codec


class Publication:
    """One server's published values.

    Args:
        codec: packs the differences.
        layout: the model's layout.
        server: the server's index.
        values: the true values.

    Attributes:
        published: the values that workers have.
        step: the global step of the true values that they come from.
    """

    def __init__(self, codec: Codec, layout: Layout, server: int, values: PartBuffer) -> None:
        self.published = PartBuffer(layout, server)
        self.step = 0
        self._codec = codec
        self._values = values
        self._parts = layout.parts(server)
        self._packed = Packed(codec, self.published, deflates=True)
        self._before: int | None = None  # the step of the published values before the change
        self._change: tuple[torch.Tensor, ...] = ()

    def begin(self, step: int, tensors: Tensors) -> None:
        """Begins with loaded values: with the published ones, where they were loaded too.

        Args:
            step: the global step of the values.
            tensors: the tensors that were loaded.
        """
        self._take_over()
        fill(self.published, self._parts, tensors, PUBLISHED)
        self.step, self._before = step, None

    def publish(self, step: int) -> None:
        """Publishes a change of the values, as much of it as packing keeps.

        Values that are not finite cannot be packed: then all are published whole.

        Args:
            step: the global step of the values now.
        """
        before, self.step = self.step, step
        if not self._pack():
            self._take_over()
            self._before = None
            return
        self._packed.seal()
        self._before = before
        # Copies: the next packing must not change an answer.
        copies = [bytearray(view) for view in self._packed.views]
        self._change = tuple(torch.frombuffer(copy, dtype=torch.uint8) for copy in copies)

    def since(self, step: int) -> tuple[int | None, Sequence[torch.Tensor]]:
        """Returns the payload for a worker that has the published values of a step.

        Returns:
            That step and the packed change since then; or None and the published values, where it
            takes more than one change.
        """
        if step == self._before:
            return step, self._change
        return None, self.published.vectors

    def _pack(self) -> bool:
        """Packs the difference and publishes it; returns False, doing neither, if it cannot."""
        values = [vector for vector in self._values.vectors if vector.numel()]
        changes = [
            value.to(wide_of(value)) - published
            for value, published in zip(values, self._packed.vectors, strict=True)
        ]
        if not all(bool(change.isfinite().all()) for change in changes):
            return False
        for change, packed, published in zip(
            changes, self._packed.packed, self._packed.vectors, strict=True
        ):
            self._codec.encode(change, packed)
            add_packed(self._codec, packed, published)
        return True

    def _take_over(self) -> None:
        for published, value in zip(self.published.vectors, self._values.vectors, strict=True):
            published.copy_(value)


def add_packed(codec: Codec, packed: torch.Tensor, published: torch.Tensor) -> None:
    """Adds a packed change to published values, with the same numbers on servers and workers.

    Raises:
        ValueError: the codec does not write such bytes.
    """
    change = torch.empty(published.numel(), dtype=wide_of(published))
    codec.decode(packed, change)
    published.add_(change)


def wide_of(vector: torch.Tensor) -> torch.dtype:
    """Returns the dtype of differences: codecs pack float32 and float64."""
    return torch.float64 if vector.dtype == torch.float64 else torch.float32
