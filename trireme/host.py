"""What this host has for a process, and when a process of it began.

Linux lends more memory than there is, and ends processes when it runs out: so what cannot fit is
refused by its size, before memory is asked for. A process's id can be told from the same id of a
later process by when it began.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec

from trireme.errors import OutOfMemory

Moment = Annotated[float, msgspec.Meta(ge=0, le=253_402_300_799)]  # in seconds since 1970
_CGROUPS = Path("/sys/fs/cgroup")


def host_memory(proc: Path = Path("/proc/self/cgroup"), mount: Path = _CGROUPS) -> int:
    """Returns the bytes that processes here can have at most: of the host, or of a container."""
    import psutil  # slow to load

    total = psutil.virtual_memory().total + psutil.swap_memory().total
    return min([total, *_limits(proc, mount)])


def _limits(proc: Path, mount: Path) -> Iterator[int]:
    """Yields the limits of this process's control groups, and of those that they are in."""
    lines = []
    with suppress(OSError):
        lines = proc.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    for line in lines:
        inside = mount / line.removeprefix("0::").lstrip("/")  # cgroups(7), version 2
        for folder in (inside, *inside.parents):
            if line.startswith("0::") and folder.is_relative_to(mount):
                with suppress(OSError, ValueError):  # "max" is no limit
                    yield int((folder / "memory.max").read_text(encoding="ascii"))


def check_fits(nbytes: int, what: str, advice: str, most: int | None = None) -> None:
    """Raises `OutOfMemory` if a process cannot have so many bytes; `what` takes them."""
    most = host_memory() if most is None else most
    if nbytes > most:
        raise OutOfMemory(
            f"{what} takes {nbytes / 1e9:,.1f} GB, and a process here can have "
            f"{most / 1e9:,.1f} GB at most: {advice}"
        )


_START_TICKS = 19  # the place of `starttime` in `/proc/PID/stat`, see proc(5), after the name


def process_birth(pid: int) -> str:
    """Returns a text that no other process of this id has; "" where it is unknown.

    It is the boot's id and the ticks from the boot to the start of the process. The time of day of
    the start, which psutil computes from them, changes when the clock is set.
    """
    if sys.platform != "linux":
        import psutil  # slow to load

        with suppress(psutil.Error):
            return str(psutil.Process(pid).create_time())  # the kernel keeps it as it was
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return f"{boot} {fields[_START_TICKS]}"
    except (OSError, IndexError):  # there is no such process, or it may not be looked at
        return ""
