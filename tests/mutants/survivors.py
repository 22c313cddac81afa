"""The mutants that are known to survive, each with the reason: `survivors.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("survivors.toml")


@dataclass(frozen=True)
class Survivor:
    """Why a mutant survives.

    Attributes:
        equivalent: whether no test could catch it: the program does the same.
        reason: why, or why it is let be.
    """

    equivalent: bool
    reason: str


def read_survivors(file: Path = FILE) -> Mapping[tuple[str, str, str, str], Survivor]:
    """Returns the known survivors by file, function, and the lines before and after the change.

    Raises:
        ValueError: an entry has no reason, or stands there twice.
    """
    entries = tomllib.loads(file.read_text(encoding="utf-8")).get("mutant", [])
    known: dict[tuple[str, str, str, str], Survivor] = {}
    for entry in entries:
        key = (entry["file"], entry["function"], entry["before"], entry["after"])
        if not entry["reason"].strip() or key in known:
            raise ValueError(f"{file}: no reason, or twice there: {key}")
        known[key] = Survivor(entry["equivalent"], entry["reason"])
    return known
