"""The checks of a host, its network and a run directory: each asks, and judges."""

from __future__ import annotations

import importlib.metadata
import math
import platform
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec
import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from trireme.cluster.spec import LOOPBACK
from trireme.errors import TriremeError
from trireme.files import try_lock
from trireme.launch.environment import detect
from trireme.launch.run_directory import is_running, read_record
from trireme.printable import size
from trireme.session.checkpoint.run_lock import LocalLock
from trireme.wire.transport import connect, listen, local_memory

GIB, MIB = 1 << 30, 1 << 20
_SOME_HOST = "192.0.2.1"  # of RFC 5737, which no host has; nothing is sent there

Level = Literal["ok", "warning", "problem"]
Doubt = tuple[object, Level, str, str]


class Check(msgspec.Struct, frozen=True):
    """The result of one check: a job may run with a warning, and fails with a problem."""

    topic: str
    level: Level
    finding: str
    advice: str = ""  # what to do; empty if all is well, or if `finding` is an error that says it


def judge(topic: str, finding: str, *doubts: Doubt) -> Check:
    """Returns the first doubt that holds: (whether it does, level, more of the finding, advice)."""
    for holds, level, more, advice in doubts:
        if holds:
            return Check(topic, level, f"{finding}{more}", advice)
    return Check(topic, "ok", finding)


def check_versions(name: str = "trireme-train") -> Iterator[Check]:
    """Checks Python and each package that the distribution needs."""
    found = importlib.metadata.distribution(name)
    yield Check("trireme", "ok", found.version)
    python, supports = platform.python_version(), str(found.metadata["Requires-Python"] or "")
    old = not SpecifierSet(supports).contains(python, prereleases=True)
    advice = "make an environment with a newer Python"
    yield judge("python", python, (old, "problem", f", and trireme needs {supports}", advice))
    for each in map(Requirement, found.requires or ()):
        if each.marker and not each.marker.evaluate({"extra": ""}):
            continue
        version = None
        with suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(each.name)
        if version is not None and each.specifier.contains(version, prereleases=True):
            continue
        have = "is not installed" if version is None else f"is {version}"
        needs = f"it {have}, and trireme needs {each.specifier or 'it'}"
        yield Check(each.name, "problem", needs, f"pip install '{each.name}{each.specifier}'")


def check_shared_memory(directory: Path = Path("/dev/shm")) -> Iterator[Check]:
    """Checks `memfd`, by which tasks of a host share memory, and /dev/shm, which loaders use."""
    none, advice = local_memory() is None, "nothing: tasks of this host use TCP, which is slower"
    finding = f"this system has {'no ' * none}memfd_create, by which tasks share memory"
    yield judge("memfd", finding, (none, "warning", "", advice))
    if directory.is_dir():
        usage = shutil.disk_usage(directory)
        more = ": data loaders with processes of their own may die by SIGBUS"
        advice = "give the container more (docker run --shm-size=1g), or use no num_workers"
        yield judge(
            "/dev/shm",
            f"{size(usage.free)} free of {size(usage.total)}",
            (usage.free < 512 * MIB, "warning", more, advice),  # Docker gives containers 64 MiB
        )


def check_files(limit: int) -> Check:
    """Checks how many files a process may have open, as `ulimit -n` shows it."""
    most = math.inf if limit == resource.RLIM_INFINITY else limit
    more = " are few: a server needs one for each connection"
    advice = "ulimit -n 4096, in the shell that starts the tasks"
    return judge(
        "open files",
        f"{most} a process",
        (most < 1024, "problem" if most < 256 else "warning", more, advice),
    )


def check_environment(environ: Mapping[str, str]) -> Check:
    """Checks what variables of launchers say of a program that is started here."""
    try:
        found = detect(environ)
    except TriremeError as error:
        return Check("environment", "problem", str(error), "correct or unset these variables")
    alone = found.workers == 1 and not found.servers and found.group.size == 1
    task = "a job of its own" if alone else f"{found.name} of a job"
    return Check("environment", "ok", f"a program started here is {task}")


def find_addresses() -> tuple[str, list[str], set[str], str]:
    """Returns the arguments of `check_addresses`."""
    name, resolved, outward = socket.gethostname(), list[str](), ""
    own = {each.address for entries in psutil.net_if_addrs().values() for each in entries}
    with suppress(OSError):
        resolved = sorted({str(each[4][0]) for each in socket.getaddrinfo(name, None)})
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((_SOME_HOST, 9))
        outward = probe.getsockname()[0]
    return name, resolved, {each.partition("%")[0] for each in own}, outward


def check_addresses(
    name: str, resolved: Sequence[str], own: set[str], outward: str
) -> Iterator[Check]:
    """Checks loopback, the address for other hosts, and the host's own name.

    `resolved` are the addresses of that, `own` those of this host's interfaces, and `outward` the
    one from which this host reaches others; "" if it reaches none.
    """
    finding = f"tasks of `trireme run` announce {LOOPBACK}"
    more, advice = ", which this host has not", "ip link set lo up"
    yield judge("loopback", finding, (LOOPBACK not in own, "problem", more, advice))
    finding = f"tasks that other hosts reach announce {outward or 'nothing: there is no route'}"
    advice = "connect it, if the job is to have tasks on several hosts; otherwise nothing"
    yield judge("network", finding, (not outward, "warning", "", advice))
    loopback = all(each.startswith("127.") or each == "::1" for each in resolved)
    ways = (
        f"add {outward or LOOPBACK} {name} to /etc/hosts",
        f"correct {name} in /etc/hosts or DNS, or set GLOO_SOCKET_IFNAME",
        f"for process groups on several hosts map {name} to {outward}",
    )
    foreign, beyond = not own.intersection(resolved), outward and loopback
    yield judge(
        "host name",
        f"{name} is {', '.join(resolved)}",
        (not resolved, "warning", "no address, and torch.distributed asks for one", ways[0]),
        (foreign, "problem", ", which is no address of this host", ways[1]),
        (beyond, "warning", ", which other hosts cannot reach", ways[2]),
    )


def check_port(port: int) -> Check:
    """Checks that a task can listen at a port; 0 for one that the system chooses."""
    topic = f"port {port}" if port else "listening"
    try:
        listen(f"tcp://0.0.0.0:{port}", allow_plaintext=True).close()
    except TriremeError as error:
        return Check(topic, "problem", str(error))
    return Check(topic, "ok", "free" if port else "the system gives ports")


def check_task(name: str, address: str, timeout: float) -> Check:
    """Checks that a task, if its name is known, can be reached at `host:port` from this host."""
    topic = f"{name} at {address}" if name else address
    began = time.monotonic()
    try:
        connect(f"tcp://{address}", timeout=timeout).close()
    except TriremeError as error:
        return Check(topic, "problem", str(error))
    return Check(topic, "ok", f"reached in {(time.monotonic() - began) * 1e3:.1f} ms")


def check_directory(path: Path) -> Iterator[Check]:
    """Checks a run directory: its disk, the permission, the locks, and who uses it."""
    place = next(each for each in (path, *path.resolve().parents) if each.exists())
    yield check_disk(shutil.disk_usage(place).free, path)
    locked = False
    try:
        with tempfile.TemporaryFile(dir=place) as file, suppress(OSError):
            locked = try_lock(file.fileno())
    except OSError as error:
        advice = "change its owner or permissions, or name another directory with --run-dir"
        says = f"{path} cannot be written: {error.strerror or error}"
        yield Check("run directory", "problem", says, advice)
    else:
        more = ", but its file system has no file locks: two jobs could write there"
        advice = "use a file system with locks (NFS mounts: without nolock)"
        found = f"{path} can be written" + " and locked" * locked
        yield judge("run directory", found, (not locked, "warning", more, advice))
    yield _check_users(path)


def check_disk(free: int, path: Path) -> Check:
    """Checks the free bytes of a run directory's disk."""
    advice = "make room, keep fewer checkpoints (Checkpoint(keep=...)), or name another --run-dir"
    return judge(
        "disk",
        f"{size(free)} free at {path}",
        (free < GIB, "problem" if free < 64 * MIB else "warning", "", advice),
    )


def _check_users(path: Path) -> Check:
    entry = LocalLock(path).newest()[1] if path.is_dir() else None
    if entry is not None and (entry.released or entry.gone):
        entry = None
    with suppress(TriremeError):
        if is_running(path):
            record = read_record(path)
            job = f"job {record.job[:8]} (process {record.launcher} on {record.host}) runs there"
            return Check("run lock", "ok", job)
    if entry is None:
        return Check("run lock", "ok", "no job uses it")
    advice = f"to start another job there, first: {entry.stop}"
    return Check("run lock", "warning", f"{entry.words} writes there", advice)
