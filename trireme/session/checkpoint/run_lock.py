"""The lock of a run directory: decides which process may write checkpoints and records there.

`RUN/writers` has one numbered entry for each claim, which names the writer in JSON. The newest
entry names the present writer, and that process holds a lock on it for as long as it may write.
Other jobs are refused meanwhile. A chief that takes over within the same job adds the next entry,
whether its predecessor has ended or is only stopped.

An entry appears complete and locked in one atomic step, and only if no entry has its number; it is
never replaced or deleted. A process that has decided by the newest entry, and was stopped before it
added its own, finds the number taken and decides again. A writer loses its right as soon as there
is an entry after its own. It checks its right before it publishes a checkpoint, and its successor
removes what it was writing. So no chief publishes over its successor, wherever it was stopped.

Whether a process may take over is decided by the job's epoch, which no other job has, and by the
numbers of the views in which the two processes were chief.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import socket
import time
from contextlib import ExitStack, suppress
from io import FileIO
from pathlib import Path

import msgspec
import psutil

from trireme.clock import Clock, MonotonicClock
from trireme.errors import CheckpointLockLost, ConfigurationError
from trireme.file_lock import open_lock, try_lock
from trireme.location import RemotePath
from trireme.process_birth import process_birth
from trireme.session.checkpoint.atomic_directories import evict, sync_directory
from trireme.session.checkpoint.manifest import checkpoint_directory

WRITERS = "writers"

_FILE = "writer.json"
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY)

_DYING_SECONDS = 5.0
_POLL_SECONDS = 0.05


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
    """Returns this process as a writer.

    Args:
        task: its name.
        job: its job's id.
        epoch: of its job.
        view: the number of the view in which it is chief.
        stop: the command that stops the job; "" for `kill` with this process's id.
    """
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


class RunLock:
    """The right to write to a run directory, until `release` or the end of the process.

    Attributes:
        run_dir: the directory.
        number: the number of this claim in the directory.
        writer: this process.
    """

    def __init__(self, run_dir: Path, number: int, file: FileIO, writer: Writer) -> None:
        self.run_dir = run_dir
        self.number = number
        self.writer = writer
        self._file = file
        # Forked children, such as data loaders, must not keep the lock.
        os.register_at_fork(after_in_child=file.close)

    @classmethod
    def claim(
        cls, run_dir: Path, writer: Writer, *, first: bool = True, clock: Clock | None = None
    ) -> RunLock:
        """Takes a run directory for this process; the directory exists.

        Args:
            run_dir: the directory.
            writer: this process, with the view in which it is chief.
            first: whether the job begins. A job that continues does not take back a directory that
                another job has taken since this process began.
            clock: measures how long an ended process may take to lose its lock.

        Raises:
            ConfigurationError: another process writes to the directory, or a later chief of this
                job does or did; names it.
            OSError: the directory cannot be written.
        """
        clock = MonotonicClock() if clock is None else clock
        deadline = clock.now() + _DYING_SECONDS
        while True:
            number = _newest(run_dir)
            holder, free = _look(run_dir, number)
            if holder is not None and succeeds(holder, writer):
                raise ConfigurationError(
                    f"{holder.words} has taken over the run directory {run_dir} as chief of view "
                    f"{holder.view} of this job: {writer.task}, which was chief of view "
                    f"{writer.view}, may write there no more"
                )
            if free and not first and came_between(holder, writer):
                raise ConfigurationError(refusal(run_dir, holder))
            if free or (holder is not None and succeeds(writer, holder)):
                lock = cls._enter(run_dir, number + 1, writer)
                if lock is not None:
                    return lock
                continue  # another process was faster
            ending = holder is None or holder.released or holder.gone
            if not ending or clock.now() >= deadline:
                raise ConfigurationError(refusal(run_dir, holder))
            time.sleep(_POLL_SECONDS)

    @classmethod
    def _enter(cls, run_dir: Path, number: int, writer: Writer) -> RunLock | None:
        """Adds this writer's locked entry; returns None if another entry was added first."""
        named = msgspec.structs.replace(writer, token=secrets.token_hex(8), since=time.time())
        (run_dir / WRITERS).mkdir(exist_ok=True)
        entry = _entry(run_dir, number)
        beside = entry.with_name(f".{entry.name}.{named.token}")
        beside.mkdir()
        with ExitStack() as undo, suppress(CheckpointLockLost):
            undo.callback(shutil.rmtree, beside, ignore_errors=True)
            file = undo.enter_context(FileIO(beside / _FILE, "x+", opener=open_lock))
            _is_free(file, None)
            file.write(msgspec.json.encode(named))
            os.fsync(file.fileno())
            sync_directory(beside)
            try:
                os.rename(beside, entry)
            except OSError as error:
                if error.errno in _TAKEN:
                    return None
                raise
            undo.pop_all()
            lock = cls(run_dir, number, file, named)
            undo.callback(lock.release)
            with suppress(FileNotFoundError):
                evict(checkpoint_directory(run_dir), lock.check)
            undo.pop_all()
            return lock
        return None

    @property
    def held(self) -> bool:
        """Whether this process may write."""
        own = _read(_entry(self.run_dir, self.number))
        mine = own is not None and own.token == self.writer.token
        superseded = _entry(self.run_dir, self.number + 1).exists()
        return not self._file.closed and mine and not superseded

    def check(self) -> None:
        """Checks that this process may write.

        Raises:
            CheckpointLockLost: another process may; names it.
        """
        if not self.held:
            now = read_writer(self.run_dir)
            who = "nobody" if now is None else now.words
            raise CheckpointLockLost(
                f"{self.writer.task} (process {self.writer.pid}) may no longer write to "
                f"{self.run_dir}: {who} does, after the newest entry of {WRITERS} there"
            )

    def release(self) -> None:
        """Releases the lock. May be called again."""
        if self._file.closed:
            return
        with self._file as file, suppress(OSError):  # on a full disk the lock is released too
            content = msgspec.json.encode(msgspec.structs.replace(self.writer, released=True))
            os.pwrite(file.fileno(), content.ljust(os.fstat(file.fileno()).st_size), 0)


def read_writer(run_dir: Path) -> Writer | None:
    """Returns the present or last writer of a run directory; None if it is unknown."""
    return _read(_entry(run_dir, _newest(run_dir)))


def _entry(run_dir: Path, number: int) -> Path:
    return run_dir / WRITERS / f"{number:06d}"


def _newest(run_dir: Path) -> int:
    """Returns the number of the newest entry; 0 where there is none."""
    try:
        names = os.listdir(run_dir / WRITERS)
    except FileNotFoundError:
        return 0
    return max((int(name) for name in names if name.isdecimal()), default=0)


def _look(run_dir: Path, number: int) -> tuple[Writer | None, bool]:
    """Returns an entry's writer, None if unknown, and whether its lock is free."""
    entry = _entry(run_dir, number)
    try:
        with FileIO(entry / _FILE, "r+") as file:
            holder = _read(entry)
            return holder, _is_free(file, holder)
    except FileNotFoundError:
        return None, True


def _read(entry: Path) -> Writer | None:
    """Returns the writer that an entry names; None if it cannot be read."""
    try:
        return msgspec.json.decode((entry / _FILE).read_bytes(), type=Writer)
    except (OSError, msgspec.MsgspecError, UnicodeError):
        return None


def _is_free(file: FileIO, holder: Writer | None) -> bool:
    """Takes the file's lock if it is free; without file locks, decides by the file's content."""
    try:
        return try_lock(file.fileno())
    except OSError:
        return holder is None or holder.released or holder.gone


def came_between(holder: Writer | None, writer: Writer) -> bool:
    """Returns whether another job has written to the directory since this process began."""
    return holder is not None and holder.epoch != writer.epoch and holder.since > writer.began


def succeeds(one: Writer, other: Writer) -> bool:
    """Returns whether `one` is chief after `other`: in the same job and a later view."""
    return one.epoch == other.epoch and one.view > other.view


def refusal(run_dir: Path | RemotePath, holder: Writer | None) -> str:
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
