"""Updates of rows in fewer bytes: each row is packed by itself, so that rows can be divided.

A row in `fp16` or `bf16` has two bytes for each column. In `int8` it has one for each, after a
scale of its own (float32): the largest magnitude of the row divided by 127. What rounding loses is
lost: a worker keeps no residuals for rows, as it would need memory for every row that it has seen.

Source: Guan et al., Post-Training 4-bit Quantization on Embedding Tables (2019), section 3.1, for a
scale for each row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trireme.ps.row_messages import RowCodec
from trireme.ps.table_spec import Add, TableSpec

_HALVES: Mapping[str, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16}
_SCALE_BYTES = 4


def row_codec(codec: str, spec: TableSpec) -> RowCodec:
    """Returns how updates of a table's rows are packed.

    Rows stay as they are where they are not gradients in float32, where `int8` would save less than
    a half, and where only the largest entries are sent (`topk`): most rows are left out already.

    Args:
        codec: the codec of the job's pushes, by its name in `trireme.compression.codec`.
    """
    if spec.dtype != "float32" or isinstance(spec.optimizer, Add):
        return "none"
    if codec == "fp16":
        return "fp16"
    if codec == "bf16":
        return "bf16"
    if codec == "int8" and row_bytes("int8", spec) <= spec.width * spec.item_size // 2:
        return "int8"
    return "none"


def packs(codec: RowCodec, spec: TableSpec) -> bool:
    """Returns whether updates of a table's rows can be packed in this way."""
    return codec == "none" or spec.dtype == "float32"


def row_bytes(codec: RowCodec, spec: TableSpec) -> int:
    """Returns the bytes of one row of an update."""
    if codec == "none":
        return spec.width * spec.item_size
    return _SCALE_BYTES + spec.width if codec == "int8" else 2 * spec.width


def pack(rows: npt.NDArray[np.float32], codec: RowCodec) -> npt.NDArray[np.uint8]:
    """Returns rows packed: uint8 of shape (n, `row_bytes`)."""
    values = torch.from_numpy(rows)
    if codec == "int8":
        scales = values.abs().amax(dim=1, keepdim=True).div_(127.0)
        numbers = values.div(scales.clamp_min(torch.finfo(torch.float32).tiny))
        numbers = numbers.round_().clamp_(-127.0, 127.0).to(torch.int8)
        parts = scales.numpy().view(np.uint8), numbers.numpy().view(np.uint8)
        return np.concatenate(parts, axis=1)
    if codec == "fp16":
        most = torch.finfo(torch.float16).max
        values = values.clamp(-most, most)
    halves: npt.NDArray[np.int16] = values.to(_HALVES[codec]).view(torch.int16).numpy()
    return halves.view(np.uint8)


def unpack(data: npt.NDArray[np.uint8], codec: RowCodec) -> npt.NDArray[Any]:
    """Returns the rows that `pack` has packed: float32 of shape (n, width).

    Args:
        data: uint8 of shape (n, `row_bytes`); any bytes make rows, perhaps not finite ones.
    """
    if codec == "int8":
        scales = np.ascontiguousarray(data[:, :_SCALE_BYTES]).view(np.float32)
        with np.errstate(all="ignore"):  # a gradient that is not finite is the worker's to report
            return data[:, _SCALE_BYTES:].view(np.int8).astype(np.float32) * scales
    halves = np.ascontiguousarray(data).view(np.uint16)
    if codec == "fp16":
        return halves.view(np.float16).astype(np.float32)
    return (halves.astype(np.uint32) << 16).view(np.float32)  # the first half of a float32
