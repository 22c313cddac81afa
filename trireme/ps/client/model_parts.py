"""The parts of a worker's model by shard: what pushes carry, and where values are received."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from trireme.errors import FrameError
from trireme.ps.client.lanes import Answer
from trireme.ps.extra import bytes_in
from trireme.ps.flat import FlatModel, PartBuffer
from trireme.ps.messages import PulledExtra, PullReply, Push, PushReply
from trireme.ps.packing import PACKING, Packer, Residuals
from trireme.ps.rule import Rule
from trireme.wire.message import Message


class ModelParts:
    """The parts of a worker's model."""

    def __init__(self, flat: FlatModel) -> None:
        self.flat = flat
        self.layout = flat.layout
        self.values: list[PartBuffer] = []
        self.gradients: list[PartBuffer] = []
        self.packers: list[Packer] = []  # one a shard, where pushes are packed
        self._rule = Rule()
        self._packed = False  # whether a push is under way that was packed
        # The payload of a push to each shard where nothing is packed, and its size.
        self._carried: list[tuple[Sequence[memoryview], int]] = []

    def divide(self, bounds: tuple[int, ...]) -> None:
        """Divides the model into shards that begin at these slots."""
        residuals = None
        if self.packers:
            if self._packed:  # a push under way is packed once more, for the new shards
                for packer in self.packers:
                    packer.take_back()
            residuals = self.residuals.export()
        self._packed = False
        flat, shards = self.flat, range(len(bounds) - 1)
        flat.divide(bounds)
        self.layout, self.packers = flat.layout, []
        self.values = [flat.part_values(shard) for shard in shards]
        self.gradients = [flat.part_gradients(shard) for shard in shards]
        self._carried = [(part.views, part.nbytes) for part in self.gradients]
        if residuals is not None:
            self.pack_by(self._rule)
            self.residuals.restore(residuals)

    def pack_by(self, rule: Rule) -> None:
        self._rule = rule
        if rule.codec != "none" and not self.packers:
            packing = PACKING.load("codecs")
            self.packers = [packing.packer(rule.codec, g, rule.deflates) for g in self.gradients]

    @property
    def residuals(self) -> Residuals:
        return PACKING.load("codecs").residuals(self.layout, self.packers)

    def payload_of(self, shard: int, message: Push) -> tuple[Sequence[memoryview], int]:
        """Returns the gradients that a push carries to a shard, and its size in bytes."""
        payload, nbytes = self._carried[shard]
        if self.packers:
            packer = self.packers[shard]
            if message.weight > 0:
                self._packed = True
                packer.pack(self.layout.ranges(message.absent, shard) if message.absent else ())
            payload = packer.views
            nbytes = sum(view.nbytes for view in payload)
        return payload, nbytes + sum(map(len, bytes_in(message.extra)))

    def place(self, shard: int, message: Message, length: int, task: str) -> Sequence[memoryview]:
        """Returns the memory for a payload from a server's task: that of the model for values."""
        if not isinstance(message, (PushReply, PullReply)):
            return [np.empty(length, np.uint8).data]  # a `bytearray` would be zeroed first
        buffer = self.values[shard]
        if length != buffer.nbytes:
            raise FrameError(
                f"{task} sent {length} bytes of values where its part has {buffer.nbytes}"
            )
        return buffer.views

    def received(self, answers: Mapping[int, Answer]) -> int:
        """Takes answers; returns the bytes of the values that they have brought."""
        total, self._packed = 0, False
        for shard, (message, _) in answers.items():
            if isinstance(message, PushReply | PulledExtra):
                total += sum(map(len, bytes_in(message.extra)))
            if isinstance(message, (PushReply, PullReply)):
                total += self.values[shard].nbytes
        return total
