"""The lock of a run directory: who may write checkpoints and records there.

`RUN/writer.lock` says in JSON who writes, and that process holds the file's lock for as long as it
may. Another job is refused while it does. A chief that takes over within the same job replaces the
file, so that its predecessor, which may only have been stopped, finds another's name there: it
looks right before it gives a checkpoint its name, and what it was writing is taken away. So no
chief publishes over its successor, wherever it was stopped.

Who may take over is decided by the job's epoch, which no other job has, and by the numbers of the
views in which the two were chief.
"""

from __future__ import annotations

import os
import secrets
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
from trireme.session.checkpoint.durable import evict

__all__ = ["LOCK", "RunLock", "Writer", "read_writer", "writer_here"]

LOCK = "writer.lock"

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
        path: the file.
        writer: who this is.
    """

    def __init__(self, path: Path, descriptor: int, writer: Writer) -> None:
        self.path = path
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
            ConfigurationError: another process writes there; names it.
            OSError: the directory cannot be written.
        """
        clock = MonotonicClock() if clock is None else clock
        path, deadline = run_dir / LOCK, clock.now() + _DYING_SECONDS
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                holder = _read(descriptor)
                if _is_free(descriptor, holder):
                    if holder != read_writer(run_dir):
                        continue  # it was replaced meanwhile
                    if first or not _came_between(holder, writer):
                        return cls._install(path, writer)
                    raise ConfigurationError(_taken(run_dir, holder))
                if holder is not None and _yields(holder, writer):
                    return cls._install(path, writer)
                dying = holder is None or holder.gone
                if not dying or clock.now() >= deadline:
                    raise ConfigurationError(_taken(run_dir, holder))
            finally:
                os.close(descriptor)
            time.sleep(_POLL_SECONDS)

    @classmethod
    def _install(cls, path: Path, writer: Writer) -> RunLock:
        """Puts a file of this writer's, which is locked already, in the place of the other."""
        named = msgspec.structs.replace(writer, token=secrets.token_hex(8), since=time.time())
        beside = path.with_name(f".{path.name}.{named.token}")
        descriptor = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            _is_free(descriptor, None)
            os.write(descriptor, msgspec.json.encode(named))
            os.fsync(descriptor)
            os.replace(beside, path)
        except BaseException:
            os.close(descriptor)
            beside.unlink(missing_ok=True)
            raise
        lock = cls(path, descriptor, named)
        try:
            evict(checkpoint_directory(path.parent))
        except FileNotFoundError:
            pass
        except OSError:
            lock.release()
            raise
        return lock

    def check(self) -> None:
        """Returns while this process may write.

        Raises:
            CheckpointLockLost: another does; names it.
        """
        now = read_writer(self.path.parent)
        if self._descriptor is None or now is None or now.token != self.writer.token:
            who = "nobody" if now is None else now.words
            raise CheckpointLockLost(
                f"{self.writer.task} (process {self.writer.pid}) may no longer write to "
                f"{self.path.parent}: {who} does, after {self.path.name} there"
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
        if self.held:
            try:
                content = msgspec.json.encode(msgspec.structs.replace(self.writer, released=True))
                os.ftruncate(self._descriptor, 0)
                os.pwrite(self._descriptor, content, 0)
            except OSError:  # a full disk, say: the lock itself is given back all the same
                pass
        self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def read_writer(run_dir: Path) -> Writer | None:
    """Returns who writes, or wrote last, to a run directory; None where that is not known."""
    try:
        descriptor = os.open(run_dir / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return _read(descriptor)
    finally:
        os.close(descriptor)


def _read(descriptor: int) -> Writer | None:
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


def _yields(holder: Writer, writer: Writer) -> bool:
    """Whether a holder has lost its right to this writer: a later view has another chief."""
    return holder.epoch == writer.epoch and holder.view < writer.view


def _taken(run_dir: Path, holder: Writer | None) -> str:
    if holder is None:
        return (
            f"another process is about to write to the run directory {run_dir}: its {LOCK} is "
            "locked; end that process, or choose another directory (run_dir= or --run-dir)"
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
