"""Updates of rows that are packed: what they decode to, and that each row stands by itself."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

pytest.importorskip("numba", reason="tables are not tested: pip install 'trireme-train[tables]'")

from trireme.ps.row_messages import RowCodec, RowUpdates, raw
from trireme.ps.table_spec import SGD, Add, TableSpec
from trireme.tables.job.packed_rows import pack, row_bytes, row_codec, unpack
from trireme.tables.job.requests import (
    Parts,
    keys_of,
    mean_of,
    mismatch,
    packed_for,
    square,
    updates_of,
)

CODECS: tuple[RowCodec, ...] = ("fp16", "bf16", "int8")
SPECS = (
    TableSpec("words", 6, SGD(lr=0.5)),
    TableSpec("totals", 6, Add()),
    TableSpec("counts", 6, Add(), "int64"),
    TableSpec("double", 6, SGD(lr=0.5), "float64"),
    TableSpec("weights", 3, SGD(lr=0.5)),
)


def rows_like(count: int, width: int = 6) -> npt.NDArray[np.float32]:
    numbers = np.random.default_rng(count)
    # Rows of very different magnitudes: each has a scale of its own.
    scales = 10.0 ** numbers.integers(-4, 4, (count, 1))
    return (numbers.standard_normal((count, width)) * scales).astype(np.float32)


def updates_for(rows: npt.NDArray[np.float32], codec: str) -> RowUpdates:
    keys = np.arange(len(rows)) * 7919 - 1000
    return packed_for(RowUpdates(0, raw(keys), raw(rows), 0.25), SPECS[0], codec)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("count", [0, 1, 300])
def test_rows_decode_to_what_was_packed_up_to_rounding(codec: RowCodec, count: int) -> None:
    rows = rows_like(count)
    packed = pack(rows, codec)
    assert packed.shape == (count, row_bytes(codec, SPECS[0])) and packed.dtype == np.uint8
    found = unpack(packed, codec)
    assert found.shape == rows.shape and found.dtype == np.float32
    largest = np.abs(rows).max(axis=1, keepdims=True)
    exact = {"fp16": np.abs(rows) * 2**-11 + 2**-25, "bf16": np.abs(rows) * 2**-8}
    bound = exact.get(codec, largest / 254 * 1.001)
    assert (np.abs(found - rows) <= bound).all()


@pytest.mark.parametrize("codec", CODECS)
def test_rows_that_the_codec_can_hold_are_exact(codec: RowCodec) -> None:
    rows = np.array([[0, 0, 0, 0], [127, -3, 64, 1], [-127, 127, 0, 5]], np.float32) / 4
    np.testing.assert_array_equal(unpack(pack(rows, codec), codec), rows)


def test_halves_are_those_of_torch_and_do_not_overflow() -> None:
    rows = rows_like(50)
    expected = torch.from_numpy(rows).bfloat16().float().numpy()
    np.testing.assert_array_equal(unpack(pack(rows, "bf16"), "bf16"), expected)
    large = np.array([[1e30, -1e30]], np.float32)
    np.testing.assert_array_equal(unpack(pack(large, "fp16"), "fp16"), [[65504.0, -65504.0]])
    assert np.isnan(unpack(pack(large * np.float32(np.nan), "int8"), "int8")).all()


def test_only_gradients_in_float32_are_packed() -> None:
    chosen = {spec.name: [row_codec(codec, spec) for codec in CODECS] for spec in SPECS}
    assert chosen == {
        "words": ["fp16", "bf16", "int8"],
        "weights": ["fp16", "bf16", "none"],  # a scale of 4 bytes saves too little
        "totals": ["none"] * 3,
        "counts": ["none"] * 3,
        "double": ["none"] * 3,
    }
    assert row_codec("topk", SPECS[0]) == row_codec("none", SPECS[0]) == "none"
    plain = updates_for(rows_like(4), "topk:0.1")
    assert plain.codec == "none" and len(plain.rows) == 4 * 6 * 4  # type: ignore[arg-type]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("bounds", [(0, 256), (0, 128, 256), (0, 1, 250, 251, 256)], ids=str)
def test_every_shard_has_the_same_rows_whatever_their_number(
    codec: RowCodec, bounds: tuple[int, ...]
) -> None:
    whole = updates_for(rows_like(200), codec)
    expected = dict(zip(keys_of(whole.keys), updates_of(whole, SPECS[0]), strict=True))
    parts, seen = Parts((whole,), (), SPECS, bounds), 0
    for shard in range(len(bounds) - 1):
        (mine,), _ = parts.of_shard(shard)
        assert (mine.codec, mine.lr) == (codec, 0.25) and mismatch(SPECS, (mine,)) is None
        keys, rows = keys_of(mine.keys), updates_of(mine, SPECS[0])
        assert parts.nbytes(shard) == keys.size * (8 + row_bytes(codec, SPECS[0]))
        for key, row in zip(keys, rows, strict=True):
            np.testing.assert_array_equal(row, expected[key])
        seen += keys.size
    assert seen == 200


@pytest.mark.parametrize("codec", CODECS)
def test_means_and_norms_are_those_of_the_unpacked_rows(codec: RowCodec) -> None:
    packed = [updates_for(rows_like(count), codec) for count in (30, 40)]
    plain = [RowUpdates(0, each.keys, raw(updates_of(each, SPECS[0])), each.lr) for each in packed]
    for weights in ((1.0, 1.0), (1.0, 3.0)):
        (one,), (other,) = (
            mean_of([(w, [each]) for w, each in zip(weights, several, strict=True)], SPECS)
            for several in (packed, plain)
        )
        assert one == other and one.codec == "none"
    assert square(packed, SPECS) == square(plain, SPECS)
    none = RowUpdates(0, b"", b"", 0.25, codec)  # a shard's part of a batch without its keys
    assert updates_of(none, SPECS[0]).shape == (0, 6) and mismatch(SPECS, (none,)) is None
    assert mean_of([(1.0, [none]), (1.0, [none])], SPECS)[0].rows == b""


def test_packed_rows_that_make_no_sense_are_refused() -> None:
    keys = bytes(16)
    for updates, reason in (
        (RowUpdates(0, keys, bytes(19), None, "int8"), "take 20 bytes, and the push has 19"),
        (RowUpdates(0, keys, bytes(48), None, "int8"), "take 20 bytes, and the push has 48"),
        (RowUpdates(0, keys, bytes(48), None, "fp16"), "take 24 bytes, and the push has 48"),
        (RowUpdates(2, keys, bytes(24), None, "fp16"), "table 'counts' of int64 came in fp16"),
        (RowUpdates(3, keys, bytes(24), None, "bf16"), "table 'double' of float64 came in bf16"),
    ):
        assert reason in str(mismatch(SPECS, (updates,)))
