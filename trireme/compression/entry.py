"""What this part adds to Trireme, as its entry points name it."""

from __future__ import annotations

from trireme.compression.codec import make_codec
from trireme.compression.packing import Packed, Packer, Residuals
from trireme.ps.packing import Packing

PACKING = Packing(make_codec, Packer, Packed, Residuals)
