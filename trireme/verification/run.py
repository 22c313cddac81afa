"""What a run has recorded, which is compared with another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from trireme.verification.record import Record, joined, read_records

_WARNS = " | warning: "
_FAILED = ". First "  # begins the cause in the launcher's report


@dataclass(frozen=True)
class Run:
    """What a run has recorded."""

    directory: Path
    status: int  # of its processes; 0 where it has made all steps
    output: Sequence[str]  # the lines that they printed

    @cached_property
    def records(self) -> dict[int, list[Record]]:
        """By step, of each worker."""
        return read_records(self.directory)

    @cached_property
    def steps(self) -> dict[int, Record]:
        """The same, joined into those of one process."""
        return joined(self.records)

    def notes(self) -> set[str]:
        """Returns what was changed for the comparison, and what the job has warned of."""
        noted = {each for step in self.records.values() for one in step for each in one.notes}
        warned = {line.partition(_WARNS)[2] for line in self.output if _WARNS in line}
        return noted | {f"the job warns: {text}" for text in warned}

    def cause(self) -> str:
        """Returns why it has failed: as the launcher says it, or as the last traceback ends."""
        told = [line.partition(_FAILED)[2] for line in self.output if _FAILED in line]
        *_, last = "\n".join(self.output).rpartition("Traceback (most recent call last)")
        errors = [line for line in last.splitlines()[1:] if line[:1].strip()]
        return (told or errors or [*self.output[-1:], "it made no step"])[0]
