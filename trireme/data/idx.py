"""Reads IDX files, the format of MNIST: an array with its shape and dtype, gzipped or not.

Two zero bytes, a byte for the dtype, a byte for the number of dimensions, each dimension as a
big-endian 32-bit number, then the values, big-endian, last dimension fastest.
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from trireme.errors import DataError

__all__ = ["read"]

_DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_GZIP_MAGIC = b"\x1f\x8b"
_CHUNK = 1 << 20
_AGAIN = "Get the file again."


def read(path: str | Path) -> npt.NDArray[Any]:
    """Reads one IDX file; whether it is gzipped is seen from its first bytes, not its name.

    Returns:
        The array, in this machine's byte order: uint8, int8, int16, int32, float32 or float64.

    Raises:
        DataError: the file is missing, no IDX file, damaged, or shorter or longer than its header
            says; names the file.
    """
    path = Path(path)
    try:
        with path.open("rb") as raw:
            zipped = raw.read(2) == _GZIP_MAGIC
            raw.seek(0)
            if not zipped:
                return _parse(raw, path)
            with gzip.GzipFile(fileobj=raw) as stream:
                return _parse(stream, path)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is a damaged gzip file ({error}). {_AGAIN}") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def _parse(stream: BinaryIO | gzip.GzipFile, path: Path) -> npt.NDArray[Any]:
    dtype, shape = _header(stream, path)
    # Before 0 dimensions there is one value: math.prod(()) is 1.
    wanted = math.prod(shape) * dtype.itemsize
    content = _read_up_to(stream, wanted + 1)
    if len(content) != wanted:
        what = f"only {len(content)} follow" if len(content) < wanted else "more follow"
        raise DataError(
            f"{path} is damaged: its header says shape {shape} of {dtype.name}, {wanted} bytes, "
            f"and {what}. {_AGAIN}"
        )
    values = np.frombuffer(content, dtype).reshape(shape)
    return values.astype(dtype.newbyteorder("="), copy=False)


def _header(stream: BinaryIO | gzip.GzipFile, path: Path) -> tuple[np.dtype[Any], tuple[int, ...]]:
    magic = stream.read(4)
    if len(magic) < 4 or magic[:2] != b"\x00\x00" or magic[2] not in _DTYPES:
        raise DataError(
            f"{path} is not an IDX file: it begins with {magic.hex(' ') or 'nothing'}, and should "
            f"with 00 00, a dtype (08, 09, 0b to 0e) and the number of dimensions. {_AGAIN}"
        )
    lengths = stream.read(4 * magic[3])
    if len(lengths) < 4 * magic[3]:
        raise DataError(f"{path} is cut off inside its header. {_AGAIN}")
    shape = tuple(int(length) for length in np.frombuffer(lengths, ">u4"))
    return np.dtype(_DTYPES[magic[2]]), shape


def _read_up_to(stream: BinaryIO | gzip.GzipFile, limit: int) -> bytearray:
    """Reads piece by piece: a damaged header must not make us allocate what it asks for."""
    content = bytearray()
    while piece := stream.read(min(_CHUNK, limit - len(content))):
        content += piece
    return content
