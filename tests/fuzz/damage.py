"""Damage: to values, and to bytes. What may be said instead, and what could come of a mistake."""

from __future__ import annotations

import random
from typing import Any

NUMBERS = (
    *(0, 1, -1, 2, 127, 128, 255, 256, 65535, 65536),
    *((1 << bits) + more for bits in (31, 32, 53, 62, 63) for more in (-1, 0, 1)),
    *(-(1 << 63), (1 << 64) - 1, -(1 << 31)),
)
"""Integers at the edges of what fields and formats hold."""

FLOATS = (0.5, 1.0, float("nan"), float("inf"), float("-inf"), 1e308)

LENGTHS = (  # how msgpack announces what is longer than all memory
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x01",
    b"\xdc\xff\xff",
)


def odd_value(draw: random.Random, *, binary: bool = True) -> Any:
    """Returns a value that hardly any field has: an edge of its type, or of another type."""
    kind = draw.randrange(8)
    if kind <= 2:
        return draw.choice(NUMBERS)
    if kind == 3:
        return draw.choice(FLOATS)
    if kind == 4:
        return draw.choice(("", "x", "worker:0", "../x", "\0", "x" * 2000, "\u0661", "applied"))
    if kind == 5:
        return draw.choice((None, True, False))
    if kind == 6:
        return draw.choice(([], [[]], {}, {"x": 1}, [1, 2, 3], _nested(draw.choice((3, 2000)))))
    return draw.choice((b"", b"\xff\xfe", bytes(32))) if binary else draw.choice(NUMBERS)


def _nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(min(depth, 400)):
        value = [value]
    return value


def damaged_value(value: Any, draw: random.Random, *, binary: bool = True) -> Any:
    """Returns a copy of a plain value, of lists and dicts, in which one place is another.

    Args:
        value: the value; it stays as it is.
        draw: chooses the place and what happens there.
        binary: whether bytes may come in.
    """
    if isinstance(value, list) and value and draw.random() < 0.85:
        place = draw.randrange(len(value))
        action = draw.randrange(10)
        if action == 0:
            return [*value[:place], *value[place + 1 :]]
        if action == 1:
            return [*value[:place], value[place], *value[place:]]
        if action == 2:
            return [*value, odd_value(draw, binary=binary)]
        changed = damaged_value(value[place], draw, binary=binary)
        return [*value[:place], changed, *value[place + 1 :]]
    if isinstance(value, dict) and value and draw.random() < 0.85:
        name = draw.choice(list(value))
        action = draw.randrange(8)
        if action == 0:
            return {key: item for key, item in value.items() if key != name}
        if action == 1:
            return {**value, draw.choice(("x", "", name + "x", name[:-1])): value[name]}
        if action == 2:
            return {**value, name: value[draw.choice(list(value))]}
        return {**value, name: damaged_value(value[name], draw, binary=binary)}
    if isinstance(value, str) and draw.random() < 0.5:
        return damaged_bytes(value.encode(), draw).decode("utf-8", "ignore")
    if isinstance(value, int) and not isinstance(value, bool) and draw.random() < 0.3:
        return value + draw.choice((-1, 1, -value, value))
    return odd_value(draw, binary=binary)


def damaged_bytes(data: bytes, draw: random.Random) -> bytes:
    """Returns bytes of which one to three places are others."""
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        start = draw.randrange(len(changed) + 1)
        stop = min(len(changed), start + draw.choice((1, 1, 2, 4, 8, 30)))
        action = draw.randrange(8)
        if action <= 2 and start < len(changed):
            changed[start] ^= 1 << draw.randrange(8)
        elif action == 3 and start < len(changed):
            changed[start] = draw.choice((0, 1, 0x7F, 0x80, 0x90, 0xC0, 0xFF, draw.randrange(256)))
        elif action == 4:
            del changed[start:stop]
        elif action == 5:
            changed[start:start] = draw.randbytes(draw.choice((1, 2, 8)))
        elif action == 6:
            changed[start:start] = changed[start:stop]
        else:
            changed[start:stop] = draw.choice(LENGTHS)
    return bytes(changed)
