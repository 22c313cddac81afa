"""Values above what a store takes at once: in chunks, also while the next value is put."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import TCPStore

from trireme.parallel.processes.large_values import CHUNK_BYTES, LargeValues


class Recording:
    """A store in this process; `meanwhile` is called once, before the first chunk is read."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.meanwhile: Callable[[], None] | None = None

    def put(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes | None:
        if key != "key" and self.meanwhile is not None:
            called, self.meanwhile = self.meanwhile, None
            called()
        return self.values.get(key)


def value_of(chunks: float, letter: bytes) -> bytes:
    return letter * int(chunks * CHUNK_BYTES)


@pytest.mark.parametrize("chunks", [0, 0.1, 1, 1.5, 2, 2.1])
def test_a_value_of_any_size_comes_back_and_no_piece_is_larger_than_a_chunk(chunks: float) -> None:
    store = Recording()
    values = LargeValues(store.put, store.get)
    assert values.get("key") is None
    for letter in (b"a", b"b", b"c"):
        values.put("key", value_of(chunks, letter))
        assert LargeValues(store.put, store.get).get("key") == value_of(chunks, letter)
    values.put("key", b"short")
    assert values.get("key") == b"short"
    assert max(map(len, store.values.values())) <= CHUNK_BYTES + 64


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_value_that_is_replaced_while_it_is_read_is_the_old_or_a_new_one(times: int) -> None:
    store = Recording()
    writer, reader = (LargeValues(store.put, store.get) for _ in range(2))
    writer.put("key", value_of(1.5, b"0"))

    def replace() -> None:
        for number in range(1, times + 1):
            writer.put("key", value_of(1.5, b"%d" % number))

    store.meanwhile = replace
    found = reader.get("key")
    assert found in [value_of(1.5, b"%d" % number) for number in (0, times)]
    assert reader.get("key") == value_of(1.5, b"%d" % times)


def test_what_a_store_has_lost_is_not_returned() -> None:
    store = Recording()
    values = LargeValues(store.put, store.get)
    values.put("key", value_of(2, b"a"))
    del store.values["key/0/1"]
    with pytest.raises(ValueError, match="the value under 'key' is damaged"):
        values.get("key")


def test_the_store_of_process_groups_takes_a_chunk() -> None:
    store = TCPStore(
        "127.0.0.1", 0, 1, is_master=True, timeout=timedelta(seconds=30), use_libuv=True
    )
    values = LargeValues(
        store.set,  # type: ignore[arg-type]
        lambda key: bytes(store.get(key)) if store.check([key]) else None,
    )
    values.put("key", value_of(2.5, b"x"))
    assert values.get("key") == value_of(2.5, b"x")
