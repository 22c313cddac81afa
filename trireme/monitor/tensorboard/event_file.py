"""The event file of one run, and a `SummaryWriter` that writes to it in the thread that calls.

TensorBoard's own writer has a thread for each file, which ends with a traceback on standard error
when the disk is full. Here the caller gets the error.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from itertools import count
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.writer import FileWriter

FLUSH_SECONDS = 10.0
"""How long an event may wait for later ones before it is written."""

_VERSION = "brain.Event:2"
_numbers = count()


class EventFile:
    """A new event file. Any thread may use it.

    Args:
        directory: the run's directory; made if it is not there.

    Raises:
        OSError: the file cannot be written; so does every method.
    """

    def __init__(self, directory: str | Path) -> None:
        Path(directory).mkdir(parents=True, exist_ok=True)
        self._directory = str(directory)
        name = f"{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        path = Path(directory) / f"events.out.tfevents.{name}"
        self._lock = threading.Lock()
        self._pending = bytearray()
        self._flush_at = 0.0
        self._records = RecordWriter(_Pieces(self._pending))
        self._file = path.open("wb", buffering=0)  # closing it writes nothing
        self.add_event(Event(wall_time=time.time(), file_version=_VERSION))

    def get_logdir(self) -> str:
        """Returns the run's directory."""
        return self._directory

    def add_event(self, event: Event) -> None:
        """Appends an event."""
        with self._lock:
            self._records.write(event.SerializeToString())
            now = time.monotonic()
            if now >= self._flush_at:
                self._flush_at = now + FLUSH_SECONDS
                self._flush()

    def flush(self) -> None:
        """Writes all events to the file."""
        with self._lock:
            self._flush()

    def close(self) -> None:
        """Writes all events and closes the file."""
        with self._lock, self._file:
            self._flush()

    def _flush(self) -> None:
        while self._pending:
            del self._pending[: self._file.write(self._pending)]


class _Pieces:
    """What `RecordWriter` takes for a file: keeps what is written to it."""

    def __init__(self, content: bytearray) -> None:
        self._content = content

    def write(self, data: bytes) -> None:
        self._content += data


class _EventFileWriter(FileWriter):
    """Torch's writer of summaries, over an `EventFile`."""

    def __init__(self, directory: str) -> None:
        self.event_writer = EventFile(directory)


class RunWriter(SummaryWriter):
    """A `SummaryWriter` over an `EventFile`.

    Args:
        directory: the run's directory.
        purge_step: earlier processes' events of this step and later ones are hidden; None for none.
    """

    def __init__(self, directory: str, purge_step: int | None = None) -> None:
        super().__init__(directory, purge_step=purge_step)

    def _get_file_writer(self) -> Any:
        untyped: Any = self
        if untyped.file_writer is None:
            untyped.file_writer = _EventFileWriter(self.log_dir)
            untyped.all_writers = {self.log_dir: untyped.file_writer}
            if self.purge_step is not None:
                step, untyped.purge_step = self.purge_step, None
                start = SessionLog(status=SessionLog.START)
                untyped.file_writer.add_event(Event(step=step, file_version=_VERSION))
                untyped.file_writer.add_event(Event(step=step, session_log=start))
        return untyped.file_writer
