"""Gradients packed by a codec on the worker, and unpacked on the server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from trireme.compression.codec import ErrorFeedback, deflated, inflated, make_codec
from trireme.errors import FrameError
from trireme.ps.flat import PartBuffer, as_bytes
from trireme.ps.layout import Layout, Range, Vector


class Packed:
    """The packed form of one server's part of every vector; one side writes it, one reads it.

    If it deflates, the deflated form is sent where that is shorter, and else the packed bytes as
    they are. The length of what was received tells which of the two it is.
    """

    def __init__(self, codec: str, buffer: PartBuffer, deflates: bool = False) -> None:
        made = make_codec(codec)
        assert made is not None  # else nobody asks
        self._codec = made
        # the buffer's vectors that are not empty
        self.vectors = tuple(vector for vector in buffer.vectors if vector.numel())
        # the packed form of each of them
        self.packed = tuple(
            torch.zeros(made.nbytes(vector.numel()), dtype=torch.uint8) for vector in self.vectors
        )
        # the size of the packed form in bytes
        self.nbytes = sum(packed.numel() for packed in self.packed)
        self._deflates = deflates
        self._whole = tuple(as_bytes(packed) for packed in self.packed)
        self.views: Sequence[memoryview] = self._whole  # the memory to send, or to receive into

    def seal(self) -> None:
        if self._deflates:
            short = deflated(self._whole)
            self.views = (memoryview(short),) if len(short) < self.nbytes else self._whole

    def fits(self, length: int) -> bool:
        return length == self.nbytes or (self._deflates and 0 < length < self.nbytes)

    def place(self, length: int) -> Sequence[memoryview]:
        whole = length == self.nbytes
        self.views = self._whole if whole else (memoryview(bytearray(length)),)
        return self.views

    def open(self) -> None:
        if self.views is self._whole:
            return
        found = memoryview(inflated(self.views[0], self.nbytes))
        for whole in self._whole:
            whole[:] = found[: whole.nbytes]
            found = found[whole.nbytes :]

    def unpack(self) -> None:
        try:
            self.open()
            for vector, packed in zip(self.vectors, self.packed, strict=True):
                self._codec.decode(packed, vector)
        except ValueError as error:
            raise FrameError(f"a packed gradient makes no sense: {error}") from error


class Packer(Packed):
    """Packs one worker's gradients for one server."""

    def __init__(self, codec: str, gradients: PartBuffer, deflates: bool = False) -> None:
        super().__init__(codec, gradients, deflates)
        self._gradients = gradients
        self._feedback = [ErrorFeedback(self._codec, v.numel()) for v in self.vectors]
        # what packing has lost so far, for each vector that is not empty
        self.residuals = tuple(feedback.residual for feedback in self._feedback)

    def pack(self, absent: Sequence[Range] = ()) -> None:
        """Packs gradients and residuals; absent elements keep their residuals for later."""
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        for number, start, stop in absent:
            at, begin = self._gradients.place(number)
            piece = self.residuals[at][start - begin : stop - begin]
            kept.append((piece, piece.clone()))
            piece.zero_()
        for feedback, vector, packed in zip(self._feedback, self.vectors, self.packed, strict=True):
            feedback.encode(vector, packed)
        self.seal()
        for piece, waiting in kept:
            piece.copy_(waiting)

    def take_back(self) -> None:
        """Takes back what the last `pack` has changed in the residuals, but for rounding."""
        for feedback, vector, packed in zip(self._feedback, self.vectors, self.packed, strict=True):
            sent = torch.empty_like(feedback.residual)
            self._codec.decode(packed, sent)
            feedback.residual.add_(sent).sub_(vector)


class Residuals:
    """The residuals of a worker's packers by parameter, whatever the number of servers."""

    def __init__(self, layout: Layout, packers: Sequence[Packer]) -> None:
        self._layout = layout
        self._packers = packers

    def export(self) -> dict[str, torch.Tensor]:
        """Returns copies, by parameter, in the parameters' shapes."""
        named: dict[str, torch.Tensor] = {}
        for vector in self._layout.vectors:
            whole = torch.zeros(vector.length)
            for start, residual in self._of(vector):
                whole[start : start + residual.numel()] = residual
            for placed in vector.placed:
                piece = whole[placed.start : placed.stop].clone()
                named[placed.parameter.name] = piece.view(placed.parameter.shape)
        return named

    def restore(self, named: Mapping[str, torch.Tensor]) -> None:
        """Replaces the residuals; those of parameters that are not named become zero."""
        for vector in self._layout.vectors:
            whole = torch.zeros(vector.length)
            for placed in vector.placed:
                name = placed.parameter.name
                if name in named:
                    whole[placed.start : placed.stop] = named[name].reshape(-1)
            for start, residual in self._of(vector):
                residual.copy_(whole[start : start + residual.numel()])

    def _of(self, vector: Vector) -> Iterator[tuple[int, torch.Tensor]]:
        for server, packer in enumerate(self._packers):
            parts = [part for part in self._layout.parts(server) if part.length]
            for part, residual in zip(parts, packer.residuals, strict=True):
                if part.vector is vector:
                    yield part.start, residual
