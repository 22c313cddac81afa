"""The lock of a run directory: who may write checkpoints and records there.

`RUN/writers` has one numbered entry for each claim, which says in JSON who it is. The newest entry
names the writer, and that process holds its lock for as long as it may write. Another job is
refused while it does. A chief that takes over within the same job adds the next entry, whether its
predecessor has ended or was only stopped.

An entry appears whole and locked, at one moment, and only if there is none of that number; it is
never replaced and never deleted. So who has decided on what the newest entry says, and was stopped
before it added its own, finds the number taken, and looks again; and a writer has lost its right as
soon as there is an entry after its own. It looks for that right before it gives a checkpoint its
name, and its successor takes away what it was writing then. So no chief publishes over its
successor, wherever it was stopped.

Who may take over is decided by the job's epoch, which no other job has, and by the numbers of the
views in which the two were chief.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import socket
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil

from trireme.clock import Clock, MonotonicClock
from trireme.errors import CheckpointLockLost, ConfigurationError
from trireme.file_lock import try_lock
from trireme.session.checkpoint import checkpoint_directory
from trireme.session.checkpoint.durable import evict, sync_directory

__all__ = ["WRITERS", "RunLock", "Writer", "read_writer", "writer_here"]

WRITERS = "writers"

_FILE = "writer.json"
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY)

_DYING_SECONDS = 5.0
_POLL_SECONDS = 0.05


class Writer(msgspec.Struct, frozen=True, kw_only=True):
    """Who writes to a run directory.

    Attributes:
        task: its name, such as `worker:0`.
        job: its job's id.
        epoch: of its job; no other job has the same.
        view: the number of the view in which it is chief; 0 where there are none.
        host: on which host it runs.
        pid: its process id there.
        began: when the process began, in seconds since 1970.
        since: when it took the lock, likewise.
        stop: the command that stops it.
        token: of this one claim.
        released: whether it has given the lock back.
    """

    task: str
    job: str
    epoch: str
    view: int = 0
    host: str
    pid: int
    began: float
    since: float
    stop: str
    token: str = ""
    released: bool = False

    @property
    def words(self) -> str:
        """As part of a sentence."""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"{self.task} (process {self.pid} on {self.host}, since {since})"

    @property
    def here(self) -> bool:
        """Whether this is the calling process."""
        return self.host == socket.gethostname() and self.pid == os.getpid()

    @property
    def stopped(self) -> bool:
        """Whether it is known that the process is stopped, as by SIGSTOP: it runs on this host."""
        if self.gone or self.host != socket.gethostname():
            return False
        try:
            return bool(psutil.Process(self.pid).status() == psutil.STATUS_STOPPED)
        except psutil.Error:
            return False

    @property
    def gone(self) -> bool:
        """Whether it is known that the process has ended: it ran on this host."""
        if self.host != socket.gethostname():
            return False
        try:
            process = psutil.Process(self.pid)
            return process.create_time() > self.since or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True
        except psutil.Error:
            return False


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
        since=time.time(),
        stop=stop or f"kill {os.getpid()}",
    )


class RunLock:
    """The right to write to a run directory, until `release` or the end of the process.

    Attributes:
        run_dir: the directory.
        number: of this claim among all that were made there.
        writer: who this is.
    """

    def __init__(self, run_dir: Path, number: int, descriptor: int, writer: Writer) -> None:
        self.run_dir = run_dir
        self.number = number
        self.writer = writer
        self._descriptor: int | None = descriptor
        # A child that is forked, such as one that loads data, must not keep the lock.
        forget = weakref.WeakMethod(self._close)
        os.register_at_fork(after_in_child=lambda: _call(forget()))

    @classmethod
    def claim(
        cls, run_dir: Path, writer: Writer, *, first: bool = True, clock: Clock | None = None
    ) -> RunLock:
        """Takes a run directory for this process; the directory exists.

        Args:
            run_dir: the directory.
            writer: who this is, with the view in which it is chief.
            first: whether the job begins here. In a job that goes on, a directory that another job
                has taken since this process began is not taken back.
            clock: for how long a process that has ended may take to lose its lock.

        Raises:
            ConfigurationError: another process writes there, or a later chief of this job does or
                did; names it.
            OSError: the directory cannot be written.
        """
        clock = MonotonicClock() if clock is None else clock
        deadline = clock.now() + _DYING_SECONDS
        while True:
            number = _newest(run_dir)
            holder, free = _look(run_dir, number)
            if holder is not None and _succeeds(holder, writer):
                raise ConfigurationError(_superseded(run_dir, holder, writer))
            if free and not first and _came_between(holder, writer):
                raise ConfigurationError(_taken(run_dir, holder))
            if free or (holder is not None and _succeeds(writer, holder)):
                lock = cls._enter(run_dir, number + 1, writer)
                if lock is not None:
                    return lock
                continue  # another one was faster
            ending = holder is None or holder.released or holder.gone
            if not ending or clock.now() >= deadline:
                raise ConfigurationError(_taken(run_dir, holder))
            time.sleep(_POLL_SECONDS)

    @classmethod
    def _enter(cls, run_dir: Path, number: int, writer: Writer) -> RunLock | None:
        """Adds this writer's entry, locked already; returns None if it is not the newest."""
        named = msgspec.structs.replace(writer, token=secrets.token_hex(8), since=time.time())
        (run_dir / WRITERS).mkdir(exist_ok=True)
        entry = _entry(run_dir, number)
        beside = entry.with_name(f".{entry.name}.{named.token}")
        beside.mkdir()
        try:
            descriptor = os.open(beside / _FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError:
            shutil.rmtree(beside, ignore_errors=True)
            raise
        try:
            _is_free(descriptor, None)
            os.write(descriptor, msgspec.json.encode(named))
            os.fsync(descriptor)
            sync_directory(beside)
            os.rename(beside, entry)  # which fails where there is a directory with a file in it
        except BaseException as error:
            os.close(descriptor)
            shutil.rmtree(beside, ignore_errors=True)
            if isinstance(error, OSError) and error.errno in _TAKEN:
                return None
            raise
        lock = cls(run_dir, number, descriptor, named)
        try:
            evict(checkpoint_directory(run_dir), lock.check)
        except FileNotFoundError:
            pass
        except CheckpointLockLost:
            lock.release()
            return None
        except OSError:
            lock.release()
            raise
        return lock

    def check(self) -> None:
        """Returns while this process may write.

        Raises:
            CheckpointLockLost: another does; names it.
        """
        own = _read(_entry(self.run_dir, self.number))
        mine = own is not None and own.token == self.writer.token
        if self._descriptor is None or not mine or _entry(self.run_dir, self.number + 1).exists():
            now = read_writer(self.run_dir)
            who = "nobody" if now is None else now.words
            raise CheckpointLockLost(
                f"{self.writer.task} (process {self.writer.pid}) may no longer write to "
                f"{self.run_dir}: {who} does, after the newest entry of {WRITERS} there"
            )

    @property
    def held(self) -> bool:
        """Whether `check` would return."""
        try:
            self.check()
        except CheckpointLockLost:
            return False
        return True

    def release(self) -> None:
        """Lets the next one in. May be repeated."""
        if self._descriptor is None:
            return
        try:
            content = msgspec.json.encode(msgspec.structs.replace(self.writer, released=True))
            os.pwrite(self._descriptor, content.ljust(os.fstat(self._descriptor).st_size), 0)
        except OSError:  # a full disk, say: the lock itself is given back all the same
            pass
        self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def read_writer(run_dir: Path) -> Writer | None:
    """Returns who writes, or wrote last, to a run directory; None where that is not known."""
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
    """Returns who an entry names, None where that is not known, and whether it may be succeeded."""
    try:
        descriptor = os.open(_entry(run_dir, number) / _FILE, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None, True
    try:
        holder = _decoded(descriptor)
        return holder, _is_free(descriptor, holder)
    finally:
        os.close(descriptor)


def _read(entry: Path) -> Writer | None:
    try:
        descriptor = os.open(entry / _FILE, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return _decoded(descriptor)
    finally:
        os.close(descriptor)


def _decoded(descriptor: int) -> Writer | None:
    try:
        return msgspec.json.decode(os.pread(descriptor, 1 << 16, 0), type=Writer)
    except (OSError, msgspec.MsgspecError):
        return None


def _is_free(descriptor: int, holder: Writer | None) -> bool:
    """Takes the file's lock if nobody has it; without locks, goes by what the file says."""
    try:
        return try_lock(descriptor)
    except OSError:
        return holder is None or holder.released or holder.gone


def _came_between(holder: Writer | None, writer: Writer) -> bool:
    """Whether another job has written to the directory since this process began."""
    return holder is not None and holder.epoch != writer.epoch and holder.since > writer.began


def _succeeds(one: Writer, other: Writer) -> bool:
    """Whether one is chief after the other: in the same job, and in a later view."""
    return one.epoch == other.epoch and one.view > other.view


def _superseded(run_dir: Path, holder: Writer, writer: Writer) -> str:
    return (
        f"{holder.words} has taken over the run directory {run_dir} as chief of view "
        f"{holder.view} of this job: {writer.task}, which was chief of view {writer.view}, may "
        "write there no more"
    )


def _taken(run_dir: Path, holder: Writer | None) -> str:
    if holder is None:
        return (
            f"another process is about to write to the run directory {run_dir}: the newest "
            f"entry of its {WRITERS} is locked; end that process, or choose another directory "
            "(run_dir= or --run-dir)"
        )
    if holder.here:
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


def _call(function: Callable[[], None] | None) -> None:
    if function is not None:
        function()
