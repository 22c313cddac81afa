"""Records one task's status, as the core asks for it."""

from __future__ import annotations

from pathlib import Path

from trireme.monitor.recording import Recording, Seconds, Status
from trireme.records.records import Record, RecordWriter, begin_here


class TaskRecords(Recording):
    """Records one task's status in a directory."""

    def __init__(self, directory: Path, task: str, job: str, run_dir: Path | None) -> None:
        self._writer = RecordWriter(directory, begin_here(task, job, run_dir))

    def write(self, now: float, status: Status, seconds: Seconds, *, last: bool) -> None:
        record = Record(time=now, status=dict(status), seconds=dict(seconds))
        self._writer.write(record, due=last)

    def close(self) -> None:
        self._writer.close()
