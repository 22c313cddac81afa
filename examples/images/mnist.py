"""MNIST: 70,000 handwritten digits, 28x28 grey, and data sets packed the same way, as IDX files."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import TensorDataset

from trireme.errors import DataError

FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
"""The four files' names, without the `.gz` that they may or may not have."""

_CLASSES = 10
_DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_GZIP_MAGIC = b"\x1f\x8b"
_CHUNK = 1 << 20
_AGAIN = "Get the file again."


def load(
    directory: str | Path, *, flat: bool = True, validation: int = 5000
) -> tuple[TensorDataset, TensorDataset, TensorDataset]:
    """Reads the four files in `directory`.

    Args:
        directory: the directory of the files, which may be gzipped.
        flat: whether images have the shape (N, 784), instead of (N, 1, 28, 28).
        validation: the number of examples of the validation set, from the beginning of the training
            file.

    Returns:
        Training, validation and test set, 55,000, 5,000 and 10,000 examples, in the files' order.
        Images are float32 in [0, 1]; labels int64 of shape (N,).

    Raises:
        DataError: a file is missing, damaged, or does not fit its sibling.
        ValueError: the training file has no more than `validation` examples.
    """
    directory = Path(directory)
    images, labels = _pair(directory, FILES[0], FILES[1])
    if not 0 <= validation < len(images):
        raise ValueError(
            f"validation is {validation}: the training file has {len(images)} examples"
        )
    train = _dataset(images[validation:], labels[validation:], flat)
    held_out = _dataset(images[:validation], labels[:validation], flat)
    return train, held_out, _dataset(*_pair(directory, FILES[2], FILES[3]), flat)


def _pair(directory: Path, *names: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    image_file, label_file = (_find(directory, name) for name in names)
    images, labels = read_idx(image_file), read_idx(label_file)
    for path, array, rank in ((image_file, images, 3), (label_file, labels, 1)):
        if array.dtype != np.uint8 or array.ndim != rank:
            raise DataError(
                f"{path} holds {array.dtype} of shape {array.shape}: MNIST has uint8 with "
                f"{rank} dimension{'s' if rank > 1 else ''} there. Is it the right file?"
            )
    if len(images) != len(labels):
        raise DataError(
            f"{image_file} holds {len(images)} images and {label_file.name} {len(labels)} labels: "
            "they do not belong together. Get both again."
        )
    if len(labels) and labels.max() >= _CLASSES:
        raise DataError(f"{label_file} holds label {labels.max()}: MNIST's are 0 to 9")
    return images, labels


def _find(directory: Path, name: str) -> Path:
    for candidate in (directory / name, directory / f"{name}.gz"):
        if candidate.is_file():
            return candidate
    raise DataError(
        f"{directory} has neither {name} nor {name}.gz. Fetch MNIST with "
        f"images.download.mnist({str(directory)!r}), or put the four files there by hand."
    )


def _dataset(images: npt.NDArray[Any], labels: npt.NDArray[Any], flat: bool) -> TensorDataset:
    pixels = torch.from_numpy(images).to(torch.float32).div_(255)
    shaped = pixels.flatten(1) if flat else pixels.unsqueeze(1)
    return TensorDataset(shaped, torch.from_numpy(labels).to(torch.int64))


def read_idx(path: str | Path) -> npt.NDArray[Any]:
    """Reads an array with its shape and dtype from an IDX file, gzipped or not, whatever its name.

    IDX is: two zero bytes, a byte for the dtype, a byte for the number of dimensions, each of these
    as a big-endian 32-bit number, then the values, big-endian, last dimension fastest.

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
