"""Gradients packed by a codec on the worker, and unpacked on the server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from trireme.errors import FrameError
from trireme.ps.flat import PartBuffer, as_bytes
from trireme.ps.layout import Range
from trireme.wire.codec import Codec, ErrorFeedback
from trireme.wire.deflate import deflated, inflated

__all__ = ["Packed", "Packer"]


class Packed:
    """The packed form of one server's part of every vector, as one side writes and one reads it.

    Where it deflates, what is sent is the deflated form if that is shorter, and else the packed
    bytes as they are. Which of the two came its length tells.

    Args:
        codec: how it is packed.
        buffer: what is packed or unpacked.
        deflates: whether a deflated form may be sent.

    Attributes:
        vectors: the buffer's that are not empty.
        packed: the packed form of each of them.
        nbytes: how many bytes that is.
        views: what is sent, or where it is received.
    """

    def __init__(self, codec: Codec, buffer: PartBuffer, *, deflates: bool = False) -> None:
        self.vectors = tuple(vector for vector in buffer.vectors if vector.numel())
        self.packed = tuple(
            torch.zeros(codec.nbytes(vector.numel()), dtype=torch.uint8) for vector in self.vectors
        )
        self.nbytes = sum(packed.numel() for packed in self.packed)
        self._codec = codec
        self._deflates = deflates
        self._whole = tuple(as_bytes(packed) for packed in self.packed)
        self.views: Sequence[memoryview] = self._whole

    def seal(self) -> None:
        """Makes what is sent of the packed form as it is now."""
        if self._deflates:
            short = deflated(self._whole)
            self.views = (memoryview(short),) if len(short) < self.nbytes else self._whole

    def fits(self, length: int) -> bool:
        """Returns whether something of so many bytes can be a packed form."""
        return length == self.nbytes or (self._deflates and 0 < length < self.nbytes)

    def place(self, length: int) -> Sequence[memoryview]:
        """Returns where a packed form of so many bytes, which fits, is received."""
        whole = length == self.nbytes
        self.views = self._whole if whole else (memoryview(bytearray(length)),)
        return self.views

    def open(self) -> None:
        """Reads what was received.

        Raises:
            ValueError: it is nothing that `seal` makes.
        """
        if self.views is self._whole:
            return
        found = memoryview(inflated(self.views[0], self.nbytes))
        for whole in self._whole:
            whole[:] = found[: whole.nbytes]
            found = found[whole.nbytes :]

    def unpack(self) -> None:
        """Writes what was received to the vectors.

        Raises:
            FrameError: the bytes are not something that the codec writes.
        """
        try:
            self.open()
            for vector, packed in zip(self.vectors, self.packed, strict=True):
                self._codec.decode(packed, vector)
        except ValueError as error:
            raise FrameError(f"a packed gradient makes no sense: {error}") from error


class Packer:
    """Packs one worker's gradients for one server.

    Args:
        codec: how.
        gradients: what.
        deflates: whether what is sent may be deflated.

    Attributes:
        residuals: what packing has lost so far, for each vector that is not empty.
    """

    def __init__(self, codec: Codec, gradients: PartBuffer, *, deflates: bool = False) -> None:
        self._memory = Packed(codec, gradients, deflates=deflates)
        self._gradients = gradients
        self._feedback = [ErrorFeedback(codec, v.numel()) for v in self._memory.vectors]
        self.residuals = tuple(feedback.residual for feedback in self._feedback)

    @property
    def views(self) -> Sequence[memoryview]:
        """The packed bytes, to be sent; `pack` replaces them."""
        return self._memory.views

    def pack(self, absent: Sequence[Range] = ()) -> None:
        """Packs the gradients as they are now, with what earlier packings lost of theirs.

        Args:
            absent: elements of this part that have no gradient: nothing is packed there, and what
                was lost of them before waits.
        """
        kept = [(piece, piece.clone()) for piece in self._residuals(absent)]
        for piece, _ in kept:
            piece.zero_()
        self._pack()
        for piece, waiting in kept:
            piece.copy_(waiting)

    def _residuals(self, ranges: Sequence[Range]) -> Iterator[torch.Tensor]:
        """Yields what was lost of some elements of this part."""
        for number, start, stop in ranges:
            at, begin = self._gradients.place(number)
            yield self.residuals[at][start - begin : stop - begin]

    def _pack(self) -> None:
        memory = self._memory
        for feedback, vector, packed in zip(
            self._feedback, memory.vectors, memory.packed, strict=True
        ):
            feedback.encode(vector, packed)
        memory.seal()
