"""The IDX reader: every dtype, and every way in which a file can be wrong."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from images import mnist

from trireme.errors import DataError

TYPES = {
    "uint8": (0x08, ">B"),
    "int8": (0x09, ">b"),
    "int16": (0x0B, ">h"),
    "int32": (0x0C, ">i"),
    "float32": (0x0D, ">f"),
    "float64": (0x0E, ">d"),
}


def header(code: int, *shape: int) -> bytes:
    return struct.pack(f">BBBB{len(shape)}I", 0, 0, code, len(shape), *shape)


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("name", TYPES)
def test_every_type(tmp_path: Path, name: str, zipped: bool) -> None:
    code, packing = TYPES[name]
    values = [0, 1, 2, 100, 7, 5]
    content = header(code, 2, 3) + b"".join(struct.pack(packing, value) for value in values)
    path = tmp_path / "values"
    path.write_bytes(gzip.compress(content) if zipped else content)
    array = mnist.read_idx(path)
    assert array.dtype == np.dtype(name)
    assert array.dtype.isnative
    assert array.tolist() == [[0, 1, 2], [100, 7, 5]]


def test_negative_numbers(tmp_path: Path) -> None:
    path = tmp_path / "values"
    path.write_bytes(header(0x0B, 2) + struct.pack(">hh", -2, -30000))
    assert mnist.read_idx(path).tolist() == [-2, -30000]


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2)])
def test_one_value_and_none(tmp_path: Path, shape: tuple[int, ...]) -> None:
    path = tmp_path / "values"
    path.write_bytes(header(0x08, *shape) + b"\x05" * (not shape))
    array = mnist.read_idx(path)
    assert array.shape == shape
    assert array.tolist() == (5 if not shape else np.empty(shape).tolist())


WRONG = {
    "nothing": (b"", "is not an IDX file: it begins with nothing"),
    "text": (b"hello", "is not an IDX file: it begins with 68 65 6c 6c"),
    "unknown dtype": (header(0x0A, 1) + b"\0", "is not an IDX file: it begins with 00 00 0a 01"),
    "header cut off": (header(0x08, 1)[:-1], "is cut off inside its header"),
    "too short": (header(0x0C, 2) + b"\0" * 7, r"shape \(2,\) of int32, 8 bytes, and only 7"),
    "too long": (header(0x0C, 2) + b"\0" * 9, r"shape \(2,\) of int32, 8 bytes, and more follow"),
    "absurd shape": (header(0x08, *[2**32 - 1] * 8) + b"\0" * 9, "and only 9 follow"),
}


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said(tmp_path: Path, case: str, zipped: bool) -> None:
    content, message = WRONG[case]
    path = tmp_path / "train-images"
    path.write_bytes(gzip.compress(content) if zipped else content)
    with pytest.raises(DataError, match=message) as raised:
        mnist.read_idx(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("damage", ["cut", "checksum", "stream"])
def test_damaged_gzip(tmp_path: Path, damage: str) -> None:
    whole = bytearray(gzip.compress(header(0x08, 5000) + np.random.default_rng(0).bytes(5000)))
    if damage == "cut":
        del whole[2000:]
    elif damage == "checksum":
        whole[-6] ^= 1
    else:
        whole[10] = 0xFF  # a block type that does not exist
    path = tmp_path / "images.gz"
    path.write_bytes(whole)
    with pytest.raises(DataError, match="is a damaged gzip file"):
        mnist.read_idx(path)


def test_a_missing_file_and_a_directory(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(DataError, match="cannot be read"):
            mnist.read_idx(path)


@given(content=st.binary(max_size=64), zipped=st.booleans())
def test_nothing_but_data_errors(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, zipped: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed"
    content = b"\0\0\x08" + content
    path.write_bytes(gzip.compress(content) if zipped else content)
    try:
        array = mnist.read_idx(path)
    except DataError:
        return
    assert len(header(0x08, *array.shape)) + array.nbytes == len(content)
