"""What records a task's status in the run directory: nothing, unless a plug-in does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trireme.cluster.messages import StatusValue
from trireme.plugins import Plugins

UNSAVED = "unsaved"  # the field of a worker's status that says why its last checkpoint is not saved
CORRUPTED = "corrupted"  # that of a task's status that says which values changed by themselves

Status = Mapping[str, StatusValue]  # values by name
Seconds = Mapping[str, float]  # those spent since the start, by phase


class Recording:
    """Records nothing. Times are those of `time.time`."""

    def write(self, now: float, status: Status, seconds: Seconds, *, last: bool) -> None:
        """Records a status if one is due, or if it is the last."""

    def close(self) -> None:
        """Closes what is open. May be called again."""


@dataclass(frozen=True, slots=True)
class RecordsType:
    """A kind of records."""

    # The function from the directory, the task's name, the job, and the run directory if there is
    # one, to a `Recording`, as `package.module:function`.
    open: str


def records_directory(run_dir: Path) -> Path:
    """Returns the directory of the records in a run directory."""
    return run_dir / "records"


def recording_of(directory: Path, task: str, job: str, run_dir: Path | None = None) -> Recording:
    """Returns what records a task's status."""
    kinds = Plugins("trireme.records", "kind of records", RecordsType)
    make: Any = kinds.imported("jsonl", "open") if "jsonl" in kinds else lambda *_: Recording()
    recording: Recording = make(directory, task, job, run_dir)
    return recording
