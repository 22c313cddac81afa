"""Gradients packed by a codec on the worker, and unpacked on the server."""

from __future__ import annotations

import torch

from trireme.errors import FrameError
from trireme.ps.dense import PartBuffer, as_bytes
from trireme.wire.codec import Codec, ErrorFeedback

__all__ = ["Packer", "Unpacker"]


class _Packed:
    """Memory for the packed form of one server's part of every vector.

    Args:
        codec: how it is packed.
        buffer: what is packed or unpacked.
    """

    def __init__(self, codec: Codec, buffer: PartBuffer) -> None:
        self.vectors = tuple(vector for vector in buffer.vectors if vector.numel())
        self.packed = tuple(
            torch.zeros(codec.nbytes(vector.numel()), dtype=torch.uint8) for vector in self.vectors
        )
        self.views = tuple(as_bytes(packed) for packed in self.packed)
        self.nbytes = sum(packed.numel() for packed in self.packed)


class Packer:
    """Packs one worker's gradients for one server.

    Attributes:
        views: the packed bytes, to be sent; `pack` overwrites them.
    """

    def __init__(self, codec: Codec, gradients: PartBuffer) -> None:
        self._memory = _Packed(codec, gradients)
        self._feedback = [ErrorFeedback(codec, v.numel()) for v in self._memory.vectors]
        self.views = self._memory.views

    def pack(self) -> None:
        """Packs the gradients as they are now, with what earlier packings lost of theirs."""
        memory = self._memory
        for feedback, vector, packed in zip(
            self._feedback, memory.vectors, memory.packed, strict=True
        ):
            feedback.encode(vector, packed)


class Unpacker:
    """Unpacks what one worker sends to one server.

    Attributes:
        views: where the packed bytes are received.
        nbytes: how many they are.
    """

    def __init__(self, codec: Codec, gradients: PartBuffer) -> None:
        self._codec = codec
        self._memory = _Packed(codec, gradients)
        self.views = self._memory.views
        self.nbytes = self._memory.nbytes

    def unpack(self) -> None:
        """Writes the gradients.

        Raises:
            FrameError: the bytes are not something that the codec writes.
        """
        try:
            for vector, packed in zip(self._memory.vectors, self._memory.packed, strict=True):
                self._codec.decode(packed, vector)
        except ValueError as error:
            raise FrameError(f"a packed gradient makes no sense: {error}") from error
