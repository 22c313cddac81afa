"""Limits that a process runs into: a full disk, no more descriptors, little memory."""

from __future__ import annotations

import os
import resource
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

FILLING = ".filling"
CHUNK = 1 << 16
CGROUPS = Path("/sys/fs/cgroup")
STARVING_BYTES = 16 << 20


class CannotLimit(Exception):
    """This machine or user has no such limits; says what is missing."""


# The disk ----------------------------------------------------------------------------------------


@contextmanager
def small_disk(directory: Path, nbytes: int) -> Iterator[Path]:
    """Mounts a file system of so many bytes at a directory while the block runs.

    Raises:
        CannotLimit: this user may not mount.
    """
    options = f"size={nbytes},mode=700,uid={os.getuid()}"
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise CannotLimit(f"no tmpfs can be mounted: {ended.stderr.strip()}")
    try:
        yield directory
    finally:
        # Lazily: a process that still has a file open there shall not keep the mount.
        subprocess.run(["umount", "--lazy", str(directory)], check=False)


def fill(directory: Path) -> Path:
    """Fills the disk of a directory to its last byte; returns the file that does, to delete it."""
    path = directory / FILLING
    with path.open("ab", buffering=0) as file:
        for size in (CHUNK, 1):
            with suppress(OSError):
                while file.write(bytes(size)):
                    pass
    return path


# Descriptors -------------------------------------------------------------------------------------


@contextmanager
def no_descriptors(pid: int, spare: int = 0) -> Iterator[None]:
    """Keeps a process from opening more than so many descriptors while the block runs.

    What it has open stays open. It gets the lowest free numbers.
    """
    old = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    listed = Path(f"/proc/{pid}/fd")
    # Looked at again, for listing them opens one more.
    in_use = {int(name) for name in os.listdir(listed) if (listed / name).is_symlink()}
    free = next(number for number in range(len(in_use) + 1) if number not in in_use)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free + spare, old[1]))
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, old)


# Memory ------------------------------------------------------------------------------------------


@contextmanager
def memory_group(nbytes: int) -> Iterator[MemoryGroup]:
    """Makes a control group whose processes together have so many bytes of memory.

    Raises:
        CannotLimit: this machine has no such groups, or this user may not make one.
    """
    one = (CGROUPS / "memory").is_dir()
    path = (CGROUPS / "memory" if one else CGROUPS) / f"trireme-{uuid.uuid4().hex[:8]}"
    limit = "memory.limit_in_bytes" if one else "memory.max"
    try:
        path.mkdir()
        try:
            (path / limit).write_text(str(nbytes))
        except OSError:
            path.rmdir()
            raise
        with suppress(OSError):  # without a swap the file may be missing
            (path / ("memory.memsw.limit_in_bytes" if one else "memory.swap.max")).write_text(
                str(nbytes if one else 0)
            )
    except OSError as error:
        raise CannotLimit(f"no control group can limit memory here: {error}") from error
    try:
        yield MemoryGroup(path)
    finally:
        group = MemoryGroup(path)
        for pid in group.pids():
            with suppress(OSError):
                (path.parent / "cgroup.procs").write_text(str(pid))
        with suppress(OSError):
            path.rmdir()


# Waits for a line, then keeps what never has an end of line.
_EATS = ["sh", "-c", "read line; exec tail /dev/zero"]


def starve(pid: int, seconds: float) -> int | None:
    """Has the system kill a process for its memory, as it would on a host that has no more.

    Another process shares a group with it and wants more than there is. The system is told to kill
    the given one first. It also counts what a process had before it came into the group, so the
    other one is small.

    Args:
        pid: of the process.
        seconds: how long that may take.

    Returns:
        How it ended, if it was a child of this one: it is waited for.

    Raises:
        CannotLimit: see `memory_group`.
        psutil.TimeoutExpired: the process lives on.
    """
    victim = psutil.Process(pid)
    with (
        memory_group(STARVING_BYTES) as group,
        subprocess.Popen(_EATS, stdin=subprocess.PIPE) as eater,
    ):
        try:
            Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
            group.add(eater.pid)
            group.add(pid)
            assert eater.stdin is not None
            eater.stdin.write(b"\n")
            eater.stdin.flush()
            return victim.wait(seconds)
        finally:
            eater.kill()


class MemoryGroup:
    """A control group; see `memory_group`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, pid: int) -> None:
        """Puts a process into the group; what it starts from now on is in it too."""
        (self._path / "cgroup.procs").write_text(str(pid))

    def pids(self) -> list[int]:
        """Returns the processes of the group."""
        return [int(pid) for pid in (self._path / "cgroup.procs").read_text().split()]
