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
import secrets
import shutil
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack, suppress
from io import FileIO
from pathlib import Path

import msgspec
import psutil

from trireme.atomic_file import sync_directory
from trireme.clock import Clock, MonotonicClock
from trireme.errors import ConfigurationError
from trireme.file_lock import open_lock, try_lock
from trireme.location import Location
from trireme.process_birth import process_birth

WRITERS = "writers"

_FILE = "writer.json"
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY)
_DYING_SECONDS = 5.0


class Writer(msgspec.Struct, frozen=True, kw_only=True):
    """A process that writes to a run directory.

    Attributes:
        task: the task's name, such as `worker:0`.
        job: the job's id.
        epoch: the job's epoch, which no other job has.
        view: the number of the view in which the task is chief; 0 where there are no views.
        host: the host of the process.
        pid: the process id on the host.
        began: when the process began, in seconds since 1970.
        birth: what no other process of this id has; see `process_birth`. Empty where unknown.
        since: when it took the lock, in seconds since 1970.
        stop: the command that stops it.
        token: a random name of the claim.
        released: whether it has released the lock.
    """

    task: str
    job: str
    epoch: str
    view: int = 0
    host: str
    pid: int
    began: float
    birth: str = ""
    since: float
    stop: str
    token: str = ""
    released: bool = False

    @property
    def words(self) -> str:
        """The writer in words, as part of a sentence."""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"{self.task} (process {self.pid} on {self.host}, since {since})"

    @property
    def stopped(self) -> bool:
        """Whether the process is known to be stopped, as by SIGSTOP; False for other hosts."""
        return self._status == psutil.STATUS_STOPPED

    @property
    def gone(self) -> bool:
        """Whether the process is known to have ended; False for other hosts."""
        return self._status == psutil.STATUS_ZOMBIE

    @property
    def here(self) -> bool:
        """Whether it is a process of this host."""
        return self.host == socket.gethostname()

    @property
    def _status(self) -> str:
        """The status of the process, a zombie once it has ended; "" where it is unknown."""
        if not self.here:
            return ""
        try:
            status = psutil.Process(self.pid).status()
            birth = process_birth(self.pid)
            another = self.birth and birth and birth != self.birth  # the id is another process's
            return psutil.STATUS_ZOMBIE if another else status
        except psutil.NoSuchProcess:
            return psutil.STATUS_ZOMBIE
        except psutil.Error:
            return ""


def writer_here(task: str, job: str, *, epoch: str, view: int = 0, stop: str = "") -> Writer:
    """Returns this process as a writer."""
    return Writer(
        task=task,
        job=job,
        epoch=epoch,
        view=view,
        host=socket.gethostname(),
        pid=os.getpid(),
        began=psutil.Process().create_time(),
        birth=process_birth(os.getpid()),
        since=time.time(),
        stop=stop or f"kill {os.getpid()}",
    )


class Claims(ABC):
    """The numbered entries of a run directory.

    Attributes:
        run_dir: the run directory.
        poll_seconds: the time between two looks at a writer of which it is not known if it lives.
    """

    run_dir: Location
    poll_seconds = 0.05

    @abstractmethod
    def newest(self) -> tuple[int, Writer | None]:
        """Returns the newest entry's number and writer; 0 where there is none.

        The writer is None where it cannot be read.
        """

    @abstractmethod
    def add(self, number: int, writer: Writer) -> bool:
        """Adds an entry, as that of a living writer; returns False where there is one already.

        Raises:
            OSError: it cannot be added.
        """

    @abstractmethod
    def ended(self, number: int, writer: Writer | None, clock: Clock) -> bool | None:
        """Returns whether a writer writes no more; None where that will soon be known.

        Raises:
            OSError: that cannot be found out.
        """

    @abstractmethod
    def holds(self, number: int, writer: Writer) -> bool:
        """Returns whether this process's entry is still the newest one, as far as it knows."""

    @abstractmethod
    def release(self, number: int, writer: Writer) -> None:
        """Marks a writer's entry as released, and shows no more that it lives."""


class LocalClaims(Claims):
    """Those of a directory. A writer holds the lock of its entry's file for as long as it lives."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir: Path = run_dir
        self._files: dict[int, FileIO] = {}
        self._dying: tuple[int, float] | None = None  # an ended writer's entry, and until when

    def newest(self) -> tuple[int, Writer | None]:
        try:
            names = os.listdir(self.run_dir / WRITERS)
        except FileNotFoundError:
            return 0, None
        number = max((int(name) for name in names if name.isdecimal()), default=0)
        try:
            content = (self._entry(number) / _FILE).read_bytes()
            return number, msgspec.json.decode(content, type=Writer)
        except (OSError, msgspec.MsgspecError, UnicodeError):
            return number, None

    def add(self, number: int, writer: Writer) -> bool:
        (self.run_dir / WRITERS).mkdir(exist_ok=True)
        entry = self._entry(number)
        beside = entry.with_name(f".{entry.name}.{writer.token}")
        beside.mkdir()
        with ExitStack() as undo:
            undo.callback(shutil.rmtree, beside, ignore_errors=True)
            file = undo.enter_context(FileIO(beside / _FILE, "x+", opener=open_lock))
            with suppress(OSError):  # without file locks, the content decides
                try_lock(file.fileno())
            file.write(msgspec.json.encode(writer))
            os.fsync(file.fileno())
            sync_directory(beside)
            try:
                os.rename(beside, entry)
            except OSError as error:
                if error.errno in _TAKEN:
                    return False
                raise
            undo.pop_all()
        self._files[number] = file
        # Forked children, such as data loaders, must not keep the lock.
        os.register_at_fork(after_in_child=file.close)
        return True

    def ended(self, number: int, writer: Writer | None, clock: Clock) -> bool | None:
        says_so = writer is None or writer.released or writer.gone
        try:
            with FileIO(self._entry(number) / _FILE, "r+") as file:
                if try_lock(file.fileno()):
                    return True
        except FileNotFoundError:
            return True
        except OSError:  # no locks
            return says_so
        if not says_so:
            return False
        if self._dying is None or self._dying[0] != number:  # an ended process loses it soon
            self._dying = number, clock.now() + _DYING_SECONDS
        return None if clock.now() < self._dying[1] else False

    def holds(self, number: int, writer: Writer) -> bool:
        newest = self.newest()[1]
        return newest is not None and newest.token == writer.token

    def release(self, number: int, writer: Writer) -> None:
        with self._files.pop(number) as file, suppress(OSError):  # on a full disk, too
            content = msgspec.json.encode(msgspec.structs.replace(writer, released=True))
            os.pwrite(file.fileno(), content.ljust(os.fstat(file.fileno()).st_size), 0)

    def _entry(self, number: int) -> Path:
        return self.run_dir / WRITERS / f"{number:06d}"


class RunLock:
    """The right to write to a run directory, until `release` or the end of the process.

    Attributes:
        number: the number of this claim in the directory.
        writer: this process.
    """

    def __init__(self, claims: Claims, number: int, writer: Writer) -> None:
        self.number = number
        self.writer = writer
        self._claims = claims
        self._released = False

    @classmethod
    def claim(
        cls,
        claims: Claims,
        writer: Writer,
        *,
        first: bool = True,
        above: int = 0,
        clock: Clock | None = None,
        sleep: Callable[[float], object] = time.sleep,
    ) -> RunLock:
        """Takes a run directory for this process.

        Args:
            claims: the claims of the directory.
            writer: this process, with the view in which it is chief.
            first: whether the job begins. A job that continues does not take back a directory that
                another job has taken since this process began.
            above: the number of this claim is higher: checkpoints of other directories may have
                been put into this one.
            clock: measures how long another writer may be silent.
            sleep: waits between two looks at it.

        Raises:
            ConfigurationError: another process writes to the directory, or a later chief of this
                job does or did; names it.
            OSError: the directory cannot be written.
        """
        clock, run_dir = MonotonicClock() if clock is None else clock, claims.run_dir
        while True:
            number, holder = claims.newest()
            if holder is not None and succeeds(holder, writer):
                raise ConfigurationError(
                    f"{holder.words} has taken over the run directory {run_dir} as chief of view "
                    f"{holder.view} of this job: {writer.task}, which was chief of view "
                    f"{writer.view}, may write there no more"
                )
            ended = not number or claims.ended(number, holder, clock)
            if ended and not first and came_between(holder, writer):
                raise ConfigurationError(refusal(run_dir, holder))
            if ended or (holder is not None and succeeds(writer, holder)):
                number = max(number, above) + 1
                token = secrets.token_hex(8)
                named = msgspec.structs.replace(writer, token=token, since=time.time())
                if claims.add(number, named):
                    return cls(claims, number, named)
            elif ended is None:
                sleep(claims.poll_seconds)
            else:
                raise ConfigurationError(refusal(run_dir, holder))

    @property
    def held(self) -> bool:
        """Whether this process may write: nobody else has claimed the directory since."""
        return not self._released and self._claims.holds(self.number, self.writer)

    def release(self) -> None:
        if not self._released:
            self._released = True
            self._claims.release(self.number, self.writer)


def came_between(holder: Writer | None, writer: Writer) -> bool:
    """Returns whether another job has written to the directory since this process began."""
    return holder is not None and holder.epoch != writer.epoch and holder.since > writer.began


def succeeds(one: Writer, other: Writer) -> bool:
    """Returns whether `one` is chief after `other`: in the same job and a later view."""
    return one.epoch == other.epoch and one.view > other.view


def refusal(run_dir: Location, holder: Writer | None) -> str:
    """Returns why another process cannot write to a run directory, and what to do."""
    if holder is None:
        return (
            f"another process is about to write to the run directory {run_dir}: the newest "
            f"entry of its {WRITERS} is locked; end that process, or choose another directory "
            "(run_dir= or --run-dir)"
        )
    if (holder.host, holder.pid) == (socket.gethostname(), os.getpid()):
        return (
            f"this program itself writes to the run directory {run_dir} already: close the session "
            "or the optimizer that does, or give this one a directory of its own (run_dir=)"
        )
    if holder.gone:
        return (
            f"{holder.words} wrote to the run directory {run_dir} and has ended, but its lock is "
            "still held, by a process that it has started: end that one, or choose another "
            "directory (run_dir= or --run-dir)"
        )
    return (
        f"{holder.words} writes to the run directory {run_dir}, and no two jobs can: stop it with "
        f"`{holder.stop}` on {holder.host}, wait until it has ended, or choose another directory "
        "(run_dir= or --run-dir)"
    )
