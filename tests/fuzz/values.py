"""Random values of the types that messages are made of, valid ones, from the types themselves."""

from __future__ import annotations

import random
from typing import Any

from msgspec import inspect

from trireme.wire.message import Message

_LARGEST = (1 << 62) - 1
_ALPHABET = "abz09:/._- \u00e9\u4e2d\U0001f600\0"
_MOST_ITEMS = 3


def message_of(kind: type[Message], random_: random.Random) -> Message:
    """Returns a valid message of a type."""
    made: Message = value_of(inspect.type_info(kind), random_)
    return made


def value_of(kind: inspect.Type, random_: random.Random) -> Any:
    """Returns a valid value of a type.

    Raises:
        NotImplementedError: no message has had a field of this type so far.
    """
    draw = random_
    match kind:
        case inspect.NoneType():
            return None
        case inspect.BoolType():
            return draw.random() < 0.5
        case inspect.IntType():
            return _integer(kind, draw)
        case inspect.FloatType():
            return draw.choice((0.0, -0.0, 1.5, -1e300, 5e-324, float("inf"), draw.random()))
        case inspect.StrType():
            size = min(kind.max_length or 1 << 30, draw.choice((0, 1, 5, 40)))
            return "".join(draw.choices(_ALPHABET, k=size))
        case inspect.BytesType():
            return draw.randbytes(draw.choice((0, 1, 32, 100)))
        case inspect.LiteralType():
            return draw.choice(kind.values)
        case inspect.UnionType():
            return value_of(draw.choice(kind.types), draw)
        case inspect.TupleType():
            return tuple(value_of(item, draw) for item in kind.item_types)
        case inspect.VarTupleType() | inspect.ListType():
            items = [value_of(kind.item_type, draw) for _ in range(draw.randint(0, _MOST_ITEMS))]
            return tuple(items) if isinstance(kind, inspect.VarTupleType) else items
        case inspect.DictType():
            pairs = range(draw.randint(0, _MOST_ITEMS))
            return {value_of(kind.key_type, draw): value_of(kind.value_type, draw) for _ in pairs}
        case inspect.StructType():
            fields = kind.fields
            return kind.cls(**{field.name: value_of(field.type, draw) for field in fields})
    raise NotImplementedError(f"a value of {kind}")


def _integer(kind: inspect.IntType, draw: random.Random) -> int:
    low = kind.ge if kind.ge is not None else -_LARGEST
    high = kind.le if kind.le is not None else _LARGEST
    if kind.lt is not None:
        high = kind.lt - 1
    low, high = int(low), int(high)
    some = draw.choice((low, high, 0, 1, draw.randint(0, 100), draw.randint(low, high)))
    return min(max(some, low), high)
