"""How a payload of numbers is made smaller: half precision, 8-bit blocks, the largest few.

A codec is a pure function of a flat tensor; what it loses at one step the sender adds to the next
(`ErrorFeedback`), so that over time nothing is lost but delayed. Sources: Seide et al., 1-Bit
Stochastic Gradient Descent (Interspeech 2014), section 3, for error feedback; Dettmers, 8-Bit
Approximations for Parallelism in Deep Learning (ICLR 2016), for blocks with a scale each; Lin et
al., Deep Gradient Compression (ICLR 2018), section 3, for the largest entries.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import ClassVar

import torch

from trireme.errors import ConfigurationError

__all__ = ["CODECS", "BlockInt8", "Codec", "ErrorFeedback", "Half", "TopK", "make_codec"]

_BLOCK = 256
_LARGEST_HALF = 65504.0


class Codec(ABC):
    """Turns flat float tensors into fewer bytes and back.

    Attributes:
        name: what the command line calls it.
    """

    name: ClassVar[str]

    @abstractmethod
    def nbytes(self, count: int) -> int:
        """Returns how many bytes `count` numbers take: known before they are."""

    @abstractmethod
    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Writes numbers as bytes.

        Args:
            values: 1-D, float32 or float64, finite.
            out: 1-D uint8 of `nbytes(len(values))`, aligned to 4 bytes.
        """

    @abstractmethod
    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Reads back what `encode` wrote.

        Args:
            data: the bytes.
            out: 1-D, of the numbers' count and dtype; overwritten.

        Raises:
            ValueError: the bytes are not something that `encode` writes.
        """


class Half(Codec):
    """Each number in two bytes: `fp16` (10 bits of fraction) or `bf16` (7, and no overflow)."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    name = "half"

    def nbytes(self, count: int) -> int:
        return 2 * count

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        if self._dtype == torch.float16:  # what does not fit goes into the next step
            values = values.clamp(-_LARGEST_HALF, _LARGEST_HALF)
        out.view(self._dtype).copy_(values)

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(data.view(self._dtype))


class BlockInt8(Codec):
    """Each number in one byte, as a multiple of its block's largest divided by 127.

    The scales, float32, come first: one for each 256 numbers.
    """

    name = "int8"

    def nbytes(self, count: int) -> int:
        return 4 * -(-count // _BLOCK) + count

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        count = values.numel()
        blocks = _blocks(values)
        scales = blocks.abs().amax(dim=1).div_(127.0)
        head = 4 * blocks.shape[0]
        out[:head].view(torch.float32).copy_(scales)
        # The scale that the other side will use, rounded to float32 as it is.
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
    """Only the largest share of the numbers, with their places; the rest is zero.

    Places (int32) come first, in ascending order, then the numbers (float32).

    Args:
        share: of the numbers that is sent, in (0, 1].

    Raises:
        ConfigurationError: the share is out of range.
    """

    name = "topk"

    def __init__(self, share: float = 0.01) -> None:
        if not 0 < share <= 1:
            raise ConfigurationError(f"topk:{share}: the share that is sent must be in (0, 1]")
        self._share = share

    def nbytes(self, count: int) -> int:
        return 8 * self._kept(count)

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        kept = self._kept(values.numel())
        places = values.abs().topk(kept, sorted=False).indices.sort().values
        out[: 4 * kept].view(torch.int32).copy_(places)
        out[4 * kept :].view(torch.float32).copy_(values[places])

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        kept = self._kept(out.numel())
        places = data[: 4 * kept].view(torch.int32).long()
        out.zero_()
        if kept and not 0 <= int(places.min()) <= int(places.max()) < out.numel():
            raise ValueError(f"a place is outside the {out.numel()} numbers that there are")
        out[places] = data[4 * kept :].view(torch.float32).to(out.dtype)

    def _kept(self, count: int) -> int:
        return min(count, max(1, int(count * self._share))) if count else 0


class ErrorFeedback:
    """One sender's codec with its memory of what was lost.

    Args:
        codec: what is lossy.
        count: how many numbers each message has.
        dtype: theirs.

    Attributes:
        residual: what was lost so far, and goes with the next message.
    """

    def __init__(self, codec: Codec, count: int, dtype: torch.dtype = torch.float32) -> None:
        self._codec = codec
        self.residual = torch.zeros(count, dtype=dtype)
        self._sent = torch.zeros(count, dtype=dtype)

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Writes the values plus what earlier messages lost, and remembers what this one loses.

        Of what is not finite nothing is remembered: it would never end.
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
    """Returns the codec of a name; None for `none`.

    Raises:
        ConfigurationError: there is no such codec, with a suggestion.
    """
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
    close = get_close_matches(kind, CODECS, 1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise ConfigurationError(
        f"unknown codec {name!r}: {hint}there are none, {', '.join(CODECS)} and topk:SHARE"
    )


def _blocks(values: torch.Tensor) -> torch.Tensor:
    """Returns the values as rows of a block each, the last one padded with zeros."""
    missing = -values.numel() % _BLOCK
    if missing:
        values = torch.nn.functional.pad(values, (0, missing))
    return values.view(-1, _BLOCK)
