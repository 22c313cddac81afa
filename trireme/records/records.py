"""The records of tasks, as lines of JSON under `RUN/records/`, for `trireme top` and `report`.

A task appends to `worker-0.jsonl` or `ps-0.jsonl`. Each start begins with a line that identifies
the process (`Begin`), followed by lines with its status and its sums so far (`Record`). The
interval between lines grows from half a second to a thousandth of the elapsed time: a day's file
has about 6,000 lines.
Monitoring does not end a job: a failure is logged. Readers skip a line that is cut short.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import platform
import socket
import time
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import IO

import msgspec

from trireme.cluster.messages import StatusValue
from trireme.errors import ConfigurationError
from trireme.files import open_at_once, open_regular
from trireme.monitor.recording import records_directory
from trireme.version import __version__

_log = logging.getLogger(__name__)

_FIRST_SECONDS = 0.5
_SHARE = 0.001


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag="begin", tag_field="line"):
    """The first line of a start of a task."""

    task: str
    job: str
    time: float
    host: str
    pid: int
    run_dir: str = ""
    about: dict[str, StatusValue] = {}


class Record(msgspec.Struct, frozen=True, kw_only=True, tag="record", tag_field="line"):
    """The status of a task at one time."""

    time: float
    status: dict[str, StatusValue]
    seconds: dict[str, float] = {}


_Line = Begin | Record


class Start(msgspec.Struct):
    """One start of a task, with what it recorded."""

    begin: Begin
    records: list[Record]


class RecordWriter:
    """Appends one task's records to its file."""

    def __init__(self, directory: Path, begin: Begin) -> None:
        self._path = directory / f"{begin.task.replace(':', '-').replace('/', '-')}.jsonl"
        self._begin = begin
        self._file: IO[bytes] | None = None
        self._begun = False  # whether the first line is there
        self._missed = 0  # records since the last one that was written
        self._next = 0.0

    def write(self, record: Record, *, due: bool = False) -> None:
        """Appends a record if one is due, or it is to be written in any case, as the last."""
        if record.time < self._next and not due:
            return
        passed = record.time - self._begin.time
        self._next = record.time + max(_FIRST_SECONDS * 0.9, _SHARE * passed)
        safe = _json_safe(record)
        lines: list[_Line] = [safe] if self._begun else [self._begin, safe]
        try:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                # Unbuffered: `close` writes nothing.
                self._file = FileIO(self._path, "a", opener=open_at_once)
            for line in lines:
                # On a new line, if the last write failed.
                data = b"\n" * bool(self._missed) + msgspec.json.encode(line) + b"\n"
                if self._file.write(data) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._begun = True
        except OSError as error:
            if not self._missed:
                _log.warning("%s records nothing for now: %s", self._begin.task, error)
            self._missed += 1
            self.close()
        else:
            if self._missed:
                _log.warning("%s records again; %d were lost", self._begin.task, self._missed)
            self._missed = 0

    def close(self) -> None:
        """Closes the file. May be called again."""
        if self._file is not None:
            with suppress(OSError):  # some file systems tell of a write that failed only now
                self._file.close()
            self._file = None


def read_starts(run_dir: Path, job: str | None = None) -> list[Start]:
    """Returns the records of a job, or of the newest, by task and time.

    Raises:
        ConfigurationError: a file of records cannot be read.
    """
    starts = [
        start
        for path in sorted(records_directory(run_dir).glob("*.jsonl"))
        if path.is_file()
        for start in _starts_of(path)
    ]
    if job is None and starts:
        job = max(starts, key=lambda start: start.begin.time).begin.job
    ours = [start for start in starts if start.begin.job == job]
    return sorted(ours, key=lambda start: (_order(start.begin.task), start.begin.time))


def _json_safe(record: Record) -> Record:
    """Returns the record with NaN and infinities as text, which JSON can hold."""
    status = {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in record.status.items()
    }
    return msgspec.structs.replace(record, status=status)


def begin_here(task: str, job: str, run_dir: Path | None) -> Begin:
    """Returns the first line of this process, with its versions, machine and cores."""
    import torch

    return Begin(
        task=task,
        job=job,
        time=time.time(),
        host=socket.gethostname(),
        pid=os.getpid(),
        run_dir="" if run_dir is None else str(run_dir.resolve()),
        about={
            "trireme": __version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "system": platform.platform(),
            "cores": os.cpu_count() or 0,
            "threads": torch.get_num_threads(),
        },
    )


def _starts_of(path: Path) -> list[Start]:
    decoder = msgspec.json.Decoder(_Line)
    starts: list[Start] = []
    try:
        with open_regular(path) as file:
            lines = file.read().splitlines()
    except OSError as error:
        raise ConfigurationError(f"the records {path} cannot be read: {error}") from error
    for line in lines:
        try:
            item = decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeError):
            continue
        if isinstance(item, Begin):
            starts.append(Start(item, []))
        elif starts:
            starts[-1].records.append(item)
    return starts


def _order(task: str) -> tuple[bool, str, int]:
    role, _, index = task.partition(":")
    number = index.partition("/")[0]
    return role != "ps", role, int(number) if number.isdecimal() and len(number) < 10 else 0
