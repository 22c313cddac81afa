"""JSON in which no object has a name twice, so that all readers understand it in the same way."""

from __future__ import annotations

import json
from typing import Any


def decode(content: bytes) -> Any:
    """Returns a JSON value.

    Raises:
        ValueError: the bytes are no JSON, or an object in them has a name twice; says where.
        RecursionError: the value is nested too deeply.
    """
    return json.loads(content, object_pairs_hook=_fields)


def _fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} is there twice")
    return fields
