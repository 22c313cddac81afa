"""Values of any size in a store (`TCPStore`) that closes its connection at one above 8 MiB."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import msgspec

CHUNK_BYTES = 4 << 20


class _Head(msgspec.Struct, frozen=True, array_like=True):
    """What is stored under the key itself."""

    version: int  # how many values its process had put before this one
    chunks: int  # the number of chunks under keys of their own; 0 where `data` is the value
    checksum: int  # the CRC-32 of the value
    data: bytes  # a value that fits


class LargeValues:
    """Puts and gets values in chunks. One process puts under a key, and any process gets.

    Two sets of chunks take turns, so that a value stays whole while the next one is put.
    """

    def __init__(
        self, put: Callable[[str, bytes], None], get: Callable[[str], bytes | None]
    ) -> None:
        self._put = put
        self._get = get
        self._versions: dict[str, int] = {}

    def put(self, key: str, value: bytes) -> None:
        """Stores a value, in place of an earlier one."""
        version = self._versions.get(key, 0)
        self._versions[key] = version + 1
        starts = range(0, len(value), CHUNK_BYTES) if len(value) > CHUNK_BYTES else range(0)
        for number, start in enumerate(starts):
            self._put(_chunk(key, version, number), value[start : start + CHUNK_BYTES])
        head = _Head(version, len(starts), zlib.crc32(value), b"" if starts else value)
        self._put(key, msgspec.msgpack.encode(head))

    def get(self, key: str) -> bytes | None:
        """Returns the value under a key; None while there is none."""
        read: bytes | None = None
        while (data := self._get(key)) is not None:
            head = msgspec.msgpack.decode(data, type=_Head)
            value = head.data
            if head.chunks:
                chunks = (self._get(_chunk(key, head.version, n)) for n in range(head.chunks))
                value = b"".join(chunk or b"" for chunk in chunks)
            if zlib.crc32(value) == head.checksum:
                return value
            if data == read:  # else later values took its chunks meanwhile
                raise ValueError(f"the value under {key!r} is damaged")
            read = data
        return None


def _chunk(key: str, version: int, number: int) -> str:
    return f"{key}/{version % 2}/{number}"
