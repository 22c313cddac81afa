"""Where reading a stream may begin: states of its data set, by position.

A state says how to go on reading after so many examples; it depends on the data set alone, not on
what was trained. So it may be older than a checkpoint, or come from another worker: reading begins
at the last state before the position that is wanted, and goes on from there.

With each state the digest of the example that followed is kept. A data set whose state leaves
something out, such as the buffer in which it shuffles, goes on with another example, and is read
from the beginning instead.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right, insort
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import torch

_MOST_OF_PART = 32
_MOST_PARTS = 256


class Bookmark(msgspec.Struct, frozen=True, order=True, array_like=True):
    """A state of a data set."""

    index: int  # the number of examples of the part that were read before
    state: bytes  # the state, as msgpack
    follows: bytes  # the digest of the next example

    def load(self) -> Any:
        """Returns the state as the data set has given it."""
        return msgspec.msgpack.decode(self.state)


class Bookmarks:
    """The last bookmarks of each part of a stream."""

    def __init__(self) -> None:
        self._parts: dict[int, list[Bookmark]] = {}

    def add(self, part: int, bookmark: Bookmark) -> None:
        """Adds a bookmark; where there are too many, the oldest are dropped."""
        known = self._parts.setdefault(part, [])
        place = bisect_right(known, bookmark.index, key=lambda each: each.index)
        if place and known[place - 1].index == bookmark.index:
            return
        insort(known, bookmark)
        del known[:-_MOST_OF_PART]
        while len(self._parts) > _MOST_PARTS:
            del self._parts[min(self._parts)]

    def before(self, part: int, index: int) -> Bookmark | None:
        """Returns the last bookmark of a part at or before a place; None where there is none."""
        known = self._parts.get(part, [])
        place = bisect_right(known, index, key=lambda each: each.index)
        return known[place - 1] if place else None

    def clear(self) -> None:
        self._parts.clear()

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self._parts)

    def merge(self, data: bytes) -> None:
        """Adds bookmarks that were encoded; what is none of these is left out."""
        try:
            parts = msgspec.msgpack.decode(data, type=dict[int, list[Bookmark]])
        except (msgspec.MsgspecError, RecursionError):
            return
        for part, known in parts.items():
            for bookmark in known:
                self.add(part, bookmark)


def packed(state: Any) -> bytes | None:
    """Returns a state as msgpack; None where it holds more than plain values."""
    try:
        return msgspec.msgpack.encode(state)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None


def digest(example: Any) -> bytes:
    """Returns a digest of an example; empty where it cannot be told from others."""
    found = hashlib.blake2b(digest_size=16)
    try:
        _add(found, example)
    except Exception:
        return b""
    return found.digest()


def _add(found: hashlib.blake2b, value: Any) -> None:
    """Adds a value to a digest: equal values add the same, whichever objects they are."""
    if isinstance(value, torch.Tensor):
        found.update(f"tensor {value.dtype} {tuple(value.shape)}".encode())
        value = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    if isinstance(value, np.ndarray):
        found.update(f"array {value.dtype} {value.shape}".encode())
        found.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, Mapping):
        found.update(f"mapping {len(value)}".encode())
        for key, item in value.items():
            _add(found, key)
            _add(found, item)
    elif isinstance(value, list | tuple):
        found.update(f"sequence {len(value)}".encode())
        for item in value:
            _add(found, item)
    elif isinstance(value, str | bytes | int | float | None):
        found.update(f"{type(value).__name__} {value!r};".encode())
    elif callable(getattr(value, "tobytes", None)):  # a picture, or a number of NumPy
        found.update(f"{type(value).__name__} ".encode() + value.tobytes())
    elif attributes := vars(value):
        _add(found, attributes)
    else:
        raise TypeError(f"a {type(value).__name__} cannot be told from another")
