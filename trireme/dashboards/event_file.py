"""A `SummaryWriter` that writes in the thread that calls.

TensorBoard's own writer has a thread for each file, which ends with a traceback on standard error
when the disk is full. Here the caller gets the error.
"""

from __future__ import annotations

import os
import socket
import time
from io import FileIO
from itertools import count
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.writer import FileWriter

_VERSION = "brain.Event:2"
_numbers = count()


class _WholeWrites(FileIO):
    """A file without a buffer, so that closing it writes nothing."""

    def write(self, data: Any) -> int:
        done = 0
        while done < len(data):
            done += super().write(data[done:])
        return done


class _EventFile:
    """What `FileWriter` takes for TensorBoard's writer: writes each event to the file at once."""

    def __init__(self, directory: str) -> None:
        Path(directory).mkdir(parents=True, exist_ok=True)
        self.get_logdir = lambda: directory
        name = f"{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        file = _WholeWrites(f"{directory}/events.out.tfevents.{name}", "w")
        self._records = RecordWriter(file)
        self.flush, self.close = file.flush, file.close
        self.add_event(Event(wall_time=time.time(), file_version=_VERSION))

    def add_event(self, event: Event) -> None:
        self._records.write(event.SerializeToString())


class _FileWriter(FileWriter):
    def __init__(self, directory: str) -> None:
        self.event_writer = _EventFile(directory)


class RunWriter(SummaryWriter):
    """A `SummaryWriter` whose methods raise the `OSError` of the disk.

    Args:
        directory: the run's directory.
        purge_step: earlier processes' events of this step and later ones are hidden; None for none.
    """

    def __init__(self, directory: str, purge_step: int | None = None) -> None:
        super().__init__(directory, purge_step=purge_step)

    def _get_file_writer(self) -> Any:
        untyped: Any = self
        if untyped.file_writer is None:
            untyped.file_writer = _FileWriter(self.log_dir)
            untyped.all_writers = {self.log_dir: untyped.file_writer}
            step, untyped.purge_step = self.purge_step, None
            if step is not None:
                start = SessionLog(status=SessionLog.START)
                untyped.file_writer.add_event(Event(step=step, file_version=_VERSION))
                untyped.file_writer.add_event(Event(step=step, session_log=start))
        return untyped.file_writer
