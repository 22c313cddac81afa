"""Codecs that compress payloads of numbers: half precision, 8-bit blocks, the largest entries.

A codec is a pure function of a flat tensor. The sender adds the rounding error of one message to
the next message (`ErrorFeedback`), so that errors are delayed and do not accumulate.

Sources: Seide et al., 1-Bit Stochastic Gradient Descent (Interspeech 2014), section 3, for error
feedback; Dettmers, 8-Bit Approximations for Parallelism in Deep Learning (ICLR 2016), for blocks
with a scale each; Lin et al., Deep Gradient Compression (ICLR 2018), section 3, for the largest
entries.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping

import torch

from trireme.errors import ConfigurationError, suggestion

_BLOCK = 256
LARGEST_HALF = 65504.0  # the largest number in `fp16`. Larger ones are sent as this one


class Codec(ABC):
    """Encodes flat float tensors in fewer bytes, and decodes them."""

    @abstractmethod
    def nbytes(self, count: int) -> int:
        """Returns the encoded length of `count` numbers in bytes, whatever their values."""

    @abstractmethod
    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Writes finite numbers to uint8 `out` of `nbytes(len(values))`, aligned to 4 bytes."""

    @abstractmethod
    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Reads numbers into `out`; raises `ValueError` for bytes that `encode` never writes."""


class Half(Codec):
    """Each number in two bytes: `fp16` has 10 bits of fraction, `bf16` has 7 and no overflow."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def nbytes(self, count: int) -> int:
        return 2 * count

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        if self._dtype == torch.float16:  # the excess goes into the next message
            values = values.clamp(-LARGEST_HALF, LARGEST_HALF)
        out.view(self._dtype).copy_(values)

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(data.view(self._dtype))


class BlockInt8(Codec):
    """Each number in one byte: a multiple of the block's largest magnitude divided by 127.

    The scales (float32), one for each block of 256 numbers, precede the numbers.
    """

    def nbytes(self, count: int) -> int:
        return 4 * -(-count // _BLOCK) + count

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        count = values.numel()
        blocks = torch.nn.functional.pad(values, (0, -count % _BLOCK)).view(-1, _BLOCK)
        scales = blocks.abs().amax(dim=1).div_(127.0)
        head = 4 * blocks.shape[0]
        out[:head].view(torch.float32).copy_(scales)
        # The scale as the decoder will use it, rounded to float32.
        scales = out[:head].view(torch.float32).to(values.dtype)
        steps = blocks / scales.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(1)
        rounded = steps.round_().clamp_(-127, 127).reshape(-1)[:count]
        out[head:].view(torch.int8).copy_(rounded)

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        count = out.numel()
        head = 4 * -(-count // _BLOCK)
        scales = data[:head].view(torch.float32).to(out.dtype)
        numbers = data[head:].view(torch.int8)
        whole = count // _BLOCK
        if whole:
            edge = whole * _BLOCK
            torch.mul(
                numbers[:edge].view(whole, _BLOCK),
                scales[:whole].unsqueeze(1),
                out=out[:edge].view(whole, _BLOCK),
            )
        if count % _BLOCK:
            torch.mul(numbers[whole * _BLOCK :], scales[whole], out=out[whole * _BLOCK :])


class TopK(Codec):
    """Only the entries of largest magnitude, with their indices; the others decode to zero."""

    def __init__(self, share: float = 0.01) -> None:
        if not 0 < share <= 1:
            raise ConfigurationError(f"topk:{share}: the share that is sent must be in (0, 1]")
        self._share = share

    def nbytes(self, count: int) -> int:
        return 8 * self._kept(count)

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        kept = self._kept(values.numel())
        indices = values.abs().topk(kept, sorted=False).indices.sort().values
        out[: 4 * kept].view(torch.int32).copy_(indices)
        out[4 * kept :].view(torch.float32).copy_(values[indices])

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        kept = self._kept(out.numel())
        indices = data[: 4 * kept].view(torch.int32).long()
        out.zero_()
        if kept and not 0 <= int(indices.min()) <= int(indices.max()) < out.numel():
            raise ValueError(f"an index is outside the {out.numel()} numbers")
        out[indices] = data[4 * kept :].view(torch.float32).to(out.dtype)

    def _kept(self, count: int) -> int:
        return min(count, max(1, int(count * self._share))) if count else 0


class ErrorFeedback:
    """Error feedback for one sender's codec: the error is added to the next message."""

    def __init__(self, codec: Codec, count: int) -> None:
        self._codec = codec
        self.residual = torch.zeros(count, dtype=torch.float32)
        self._sent = torch.zeros(count, dtype=torch.float32)

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Encodes the values plus the residual, and updates the residual.

        Errors that are not finite are dropped from the residual: they would stay in it forever.
        """
        self.residual.add_(values)
        self._codec.encode(self.residual, out)
        self._codec.decode(out, self._sent)
        self.residual.sub_(self._sent).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


CODECS: Mapping[str, Callable[[], Codec]] = {
    "fp16": lambda: Half(torch.float16),
    "bf16": lambda: Half(torch.bfloat16),
    "int8": BlockInt8,
    "topk": TopK,
}
"""Every codec by the name that `--compress` gives it. `topk:0.001` gives the share."""


def make_codec(name: str) -> Codec | None:
    """Returns the codec of a name; None for `none`."""
    if name == "none":
        return None
    kind, colon, argument = name.partition(":")
    if kind == "topk" and colon:
        try:
            return TopK(float(argument))
        except ValueError:
            raise ConfigurationError(f"{name}: {argument!r} is not a number") from None
    if kind in CODECS and not colon:
        return CODECS[kind]()
    raise ConfigurationError(
        f"unknown codec {name!r}{suggestion(kind, CODECS)}: the codecs are none, "
        f"{', '.join(CODECS)} and topk:SHARE"
    )


# Lossless compression ---------------------------------------------------------------------------

# The 8-bit codes are far from equally frequent: most are small, and zero where a model does not
# change. Deflate (RFC 1951) limited to runs compresses them at some 150 MB/s on one core. That is
# twice as fast as its fastest general level, and as small as its best (measured on deltas of
# MNIST).


def deflated(data: Iterable[memoryview]) -> bytes:
    """Returns the views, one after the other, as one zlib stream, which may be longer."""
    engine = zlib.compressobj(1, zlib.DEFLATED, zlib.MAX_WBITS, 9, zlib.Z_RLE)
    return b"".join([*map(engine.compress, data), engine.flush()])


def inflated(data: memoryview, length: int) -> bytes:
    """Returns the bytes, which must be `length`; else raises `ValueError`."""
    engine = zlib.decompressobj()
    try:
        found = engine.decompress(data, length + 1)
    except zlib.error as error:
        raise ValueError(f"the deflated bytes cannot be read: {error}") from error
    if len(found) != length or not engine.eof or engine.unused_data:
        raise ValueError(f"the deflated bytes are not one whole stream of {length} bytes")
    return found
