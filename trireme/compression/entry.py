"""What this part adds to Trireme, as its entry points name it."""

from __future__ import annotations

from trireme.compression.codec import Codec, make_codec
from trireme.compression.packing import Packed, Packer, Residuals
from trireme.ps.flat import PartBuffer
from trireme.ps.packing import Packing


def _codec(name: str) -> Codec:
    codec = make_codec(name)
    assert codec is not None  # else nobody asks
    return codec


def _packer(codec: str, gradients: PartBuffer, deflates: bool) -> Packer:
    return Packer(_codec(codec), gradients, deflates=deflates)


def _packed(codec: str, gradients: PartBuffer, deflates: bool) -> Packed:
    return Packed(_codec(codec), gradients, deflates=deflates)


PACKING = Packing(make_codec, _packer, _packed, Residuals)
