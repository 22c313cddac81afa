"""The lock of a run directory: decides which process may write checkpoints and records there.

A run directory has one numbered entry for each claim, `writers/000003/writer.json`, which names the
writer in JSON. An entry is made whole, in one atomic step, and only if no entry has its number; it
is never replaced or deleted. The newest one names the present writer. While that lives, other jobs
are refused; a chief that takes over within the same job adds the next entry without waiting,
whether its predecessor has ended or is only stopped. Of two processes that decide at once, one
finds the number taken, and decides again.

Nobody checks anything when a checkpoint is published: it is named by its writer's number (see
`place`). Whether a process may take over is decided by the job's epoch, which no other job has, and
by the numbers of the views in which the two processes were chief.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import socket
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Annotated, Self

import msgspec
import psutil

from trireme.errors import ConfigurationError
from trireme.files import open_lock, open_regular, sync_directory, try_lock
from trireme.host import Moment, process_birth
from trireme.location import Location

WRITERS = "writers"

LAST_NUMBER = 999_999_999  # of an entry: names of checkpoints have nine digits for it

_FILE = "writer.json"
_DYING_SECONDS = 5.0
_POLL_SECONDS = 0.05


class Writer(msgspec.Struct, frozen=True, kw_only=True):
    """A process that writes to a run directory."""

    task: str
    job: str
    epoch: str  # of the job, which no other job has
    view: int = 0  # in which the task is chief; 0 where there are no views
    host: str
    pid: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    birth: str = ""  # what no other process of this id has; see `process_birth`
    since: Moment  # when it took the lock
    stop: str  # the command that stops it
    released: bool = False

    @property
    def words(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"{self.task} (process {self.pid} on {self.host}, since {since})"

    @property
    def here(self) -> bool:
        return self.host == socket.gethostname()

    @property
    def gone(self) -> bool:
        """Whether the process is known to have ended; False for other hosts."""
        if not self.here:
            return False
        try:
            status = psutil.Process(self.pid).status()
        except psutil.Error as error:
            return isinstance(error, psutil.NoSuchProcess)
        birth = process_birth(self.pid)
        another = self.birth and birth and birth != self.birth  # the id is another process's now
        return bool(another) or status == psutil.STATUS_ZOMBIE


WRITER_DECODER = msgspec.json.Decoder(Writer)  # made at import: threads that make one at once crash


def writer_here(task: str, job: str, *, epoch: str, view: int = 0, stop: str = "") -> Writer:
    """Returns this process as a writer."""
    return Writer(
        task=task,
        job=job,
        epoch=epoch,
        view=view,
        host=socket.gethostname(),
        pid=os.getpid(),
        birth=process_birth(os.getpid()),
        since=time.time(),
        stop=stop or f"kill {os.getpid()}",
    )


class RunLock(ABC):
    """The right to write to a run directory, from `claim` to `release` or the process's end."""

    run_dir: Location
    number = 0  # of this process's entry; 0 while it has none

    def claim(self, writer: Writer, *, first: bool = True, above: int = 0) -> Self:
        """Takes the run directory for this process, by an entry of a number above `above`.

        Unless it is the `first` claim of its job, it takes nothing back from another job. Raises
        `ConfigurationError` with the name of another process, or a later chief, that writes there.
        """
        while True:
            number, holder = self.newest()
            if holder is not None and _succeeds(holder, writer):
                raise ConfigurationError(
                    f"{holder.words} has taken over the run directory {self.run_dir} as chief of "
                    f"view {holder.view} of this job: {writer.task}, which was chief of view "
                    f"{writer.view}, may write there no more"
                )
            if holder is None or not _succeeds(writer, holder):
                other = holder is not None and holder.epoch != writer.epoch
                if number and (not self.ended(number, holder) or (other and not first)):
                    raise ConfigurationError(_refusal(self.run_dir, holder))
            number = max(number, above) + 1
            if number > LAST_NUMBER:
                raise ConfigurationError(
                    f"{writer.task} cannot take {self.run_dir}: an entry of {WRITERS} or a "
                    f"checkpoint there has the last number, {LAST_NUMBER}: rename what was copied "
                    "there, or choose another directory (run_dir= or --run-dir)"
                )
            if self.add(number, writer):
                self.number = number
                return self

    @property
    def held(self) -> bool:
        """Whether this process may write: nobody else has claimed the directory since."""
        return bool(self.number) and self.is_newest()

    def release(self) -> None:
        if self.number:
            self.end()
            self.number = 0

    @abstractmethod
    def newest(self) -> tuple[int, Writer | None]:
        """Returns the newest entry's number, or 0, and its writer, if that can be read."""

    @abstractmethod
    def add(self, number: int, writer: Writer) -> bool:
        """Adds an entry, as that of a living writer; returns False where there is one already."""

    @abstractmethod
    def ended(self, number: int, writer: Writer | None) -> bool:
        """Returns whether the writer of an entry writes no more; waits where that is not known."""

    @abstractmethod
    def is_newest(self) -> bool:
        """Returns whether this process's entry is still the newest one, as far as it knows."""

    @abstractmethod
    def end(self) -> None:
        """Marks this process's entry as released, and shows no more that it lives."""


class LocalLock(RunLock):
    """That of a directory. A writer holds the lock of its entry's file for as long as it lives."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir: Path = run_dir
        self._file: FileIO | None = None
        self._writer: Writer | None = None

    def newest(self) -> tuple[int, Writer | None]:
        try:
            names = os.listdir(self.run_dir / WRITERS)
        except FileNotFoundError:
            return 0, None
        number = max(map(number_of, names), default=0)
        try:
            with open_regular(self._entry(number)) as file:
                return number, WRITER_DECODER.decode(file.read())
        except (OSError, msgspec.MsgspecError, UnicodeError):
            return number, None

    def add(self, number: int, writer: Writer) -> bool:
        folder = self._entry(number).parent
        beside = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}")
        beside.mkdir(parents=True)
        file = FileIO(beside / _FILE, "x+", opener=open_lock)
        try:
            with suppress(OSError):  # without file locks, the content decides
                try_lock(file.fileno())
            file.write(msgspec.json.encode(writer))
            os.fsync(file.fileno())
            sync_directory(beside)
            os.rename(beside, folder)
        except OSError as error:
            file.close()
            shutil.rmtree(beside, ignore_errors=True)
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                return False
            raise
        self._file, self._writer = file, writer
        # Forked children, such as data loaders, must not keep the lock.
        os.register_at_fork(after_in_child=file.close)
        return True

    def ended(self, number: int, writer: Writer | None) -> bool:
        says_so = writer is None or writer.released or writer.gone
        until = time.monotonic() + _DYING_SECONDS  # an ended process loses it soon
        while True:
            try:
                with FileIO(self._entry(number), "r+") as file:
                    if try_lock(file.fileno()):
                        return True
            except FileNotFoundError:
                return True
            except OSError:  # no locks
                return says_so
            if not says_so or time.monotonic() > until:
                return False
            time.sleep(_POLL_SECONDS)

    def is_newest(self) -> bool:
        return self.newest() == (self.number, self._writer)

    def end(self) -> None:
        assert self._file is not None and self._writer is not None, "it was claimed"
        with self._file as file, suppress(OSError):  # on a full disk, too
            content = msgspec.json.encode(msgspec.structs.replace(self._writer, released=True))
            os.pwrite(file.fileno(), content.ljust(os.fstat(file.fileno()).st_size), 0)

    def _entry(self, number: int) -> Path:
        return self.run_dir / WRITERS / entry_name(number) / _FILE


def entry_name(number: int) -> str:
    """Returns the name of an entry."""
    return f"{number:06d}"


def number_of(name: str) -> int:
    """Returns the number of an entry's name; 0 for a name that is none of an entry's."""
    number = int(name) if re.fullmatch(r"[0-9]{6,9}", name) else 0
    return number if name == entry_name(number) else 0


def _succeeds(one: Writer, other: Writer) -> bool:
    """Returns whether `one` is chief after `other`: in the same job and a later view."""
    return one.epoch == other.epoch and one.view > other.view


def _refusal(run_dir: Location, holder: Writer | None) -> str:
    if holder is None:
        return (
            f"the newest entry of {run_dir}/{WRITERS} is locked by another process: end that, or "
            "choose another directory (run_dir= or --run-dir)"
        )
    if (holder.host, holder.pid) == (socket.gethostname(), os.getpid()):
        return (
            f"this program itself writes to the run directory {run_dir} already: close the session "
            "or the optimizer that does, or give this one a directory of its own (run_dir=)"
        )
    ended = "" if not holder.gone else "; it has ended, but a process that it has started holds it"
    return (
        f"{holder.words} writes to the run directory {run_dir}, and no two jobs can{ended}: stop "
        f"it with `{holder.stop}` on {holder.host}, wait until it has ended, or choose another "
        "directory (run_dir= or --run-dir)"
    )
