"""A checkpoint of a run, as commands and reports list it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """One checkpoint: its directory's name, when it was saved, its bytes, its damage if any.

    `chain` has the steps of the saves that its tables are of, where they are of several.
    """

    name: str
    saved_at: str
    nbytes: int
    damage: str = ""
    chain: tuple[int, ...] = ()
