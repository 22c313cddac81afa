"""Deflated bytes: nothing is lost, and whatever a peer sends makes no more than was asked for."""

from __future__ import annotations

import os
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trireme.compression.codec import deflated, inflated


@given(st.lists(st.binary(max_size=300), max_size=4))
def test_what_was_deflated_comes_back_to_the_bit(pieces: list[bytes]) -> None:
    data = deflated([memoryview(piece) for piece in pieces])
    whole = b"".join(pieces)
    assert inflated(memoryview(data), len(whole)) == whole


def test_small_codes_and_runs_take_less() -> None:
    codes = bytes(b % 8 for b in os.urandom(10_000)) + bytes(10_000)
    assert len(deflated([memoryview(codes)])) < 5_000


@given(data=st.binary(max_size=200), length=st.integers(0, 300))
def test_bytes_of_anything_are_read_whole_or_refused(data: bytes, length: int) -> None:
    try:
        found = inflated(memoryview(data), length)
    except ValueError:
        return
    assert len(found) == length


@given(st.binary(min_size=1, max_size=300), st.data())
def test_a_stream_that_is_cut_or_goes_on_is_refused(data: bytes, draw: st.DataObject) -> None:
    stream = deflated([memoryview(data)])
    cut = draw.draw(st.integers(0, len(stream) - 1))
    with pytest.raises(ValueError, match="deflated"):
        inflated(memoryview(stream[:cut]), len(data))
    with pytest.raises(ValueError, match="deflated"):
        inflated(memoryview(stream + b"x"), len(data))


@given(st.binary(max_size=300), st.integers(0, 300))
def test_another_length_than_announced_is_refused(data: bytes, length: int) -> None:
    stream = memoryview(deflated([memoryview(data)]))
    if length != len(data):
        with pytest.raises(ValueError, match=f"not one whole stream of {length} bytes"):
            inflated(stream, length)


def test_a_small_stream_of_very_many_bytes_is_not_unpacked() -> None:
    bomb = memoryview(zlib.compress(bytes(1 << 28), 9))
    assert bomb.nbytes < 1 << 19
    tracemalloc.start()
    with pytest.raises(ValueError, match="not one whole stream"):
        inflated(bomb, 1000)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 1 << 20
