"""Finds the facts that the checks need: asks the system, opens sockets, reads files."""

from __future__ import annotations

import importlib.metadata
import os
import resource
import shutil
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
from packaging.utils import canonicalize_name

from trireme.doctor.host import (
    CoreFacts,
    Distribution,
    LauncherFacts,
    LimitFacts,
    SharedMemoryFacts,
)
from trireme.doctor.network import AddressFacts, Reached
from trireme.doctor.run_directory import DirectoryFacts
from trireme.errors import TriremeError
from trireme.file_lock import try_lock
from trireme.launch.environment.detect import detect
from trireme.launch.run_directory import is_running, read_record
from trireme.session.checkpoint.run_lock import read_writer
from trireme.wire.shared_memory import SharedMemory, available
from trireme.wire.transport import connect, listen

DISTRIBUTION = "trireme-train"
SOME_HOST = "192.0.2.1"
"""An address of RFC 5737, which no host has. Nothing is sent there."""
NTP_PORT, NTP_EPOCH = 123, 2_208_988_800
_NTP = struct.Struct("!B39xII")
PROBED_BYTES = 4096


def find_distribution() -> Distribution:
    """Returns what is installed."""
    python = ".".join(map(str, sys.version_info[:3]))
    installed: dict[str, str] = {
        canonicalize_name(each.name): each.version
        for each in importlib.metadata.distributions()
        if each.name  # what a broken installation has left behind has none
    }
    try:
        found = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return Distribution("", python, "", (), installed)
    supports = str(found.metadata.json.get("requires_python", ""))
    return Distribution(found.version, python, supports, tuple(found.requires or ()), installed)


def find_shared_memory(directory: Path = Path("/dev/shm")) -> SharedMemoryFacts:
    """Returns the size of /dev/shm, and whether shared memory can be made."""
    size = free = None
    with suppress(OSError):
        usage = shutil.disk_usage(directory)
        size, free = usage.total, usage.free
    if not available():
        return SharedMemoryFacts(size, free, "this system has no memfd_create")
    try:
        SharedMemory.create(PROBED_BYTES).close()
    except OSError as error:
        return SharedMemoryFacts(size, free, str(error))
    return SharedMemoryFacts(size, free)


def find_limits() -> LimitFacts:
    """Returns the limits of this process."""
    running = 0
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.uids().real == os.getuid():
                running += process.num_threads()
    return LimitFacts(
        files=_limit(resource.RLIMIT_NOFILE),
        processes=_limit(resource.RLIMIT_NPROC),
        running=running,
        locked=_limit(resource.RLIMIT_MEMLOCK),
    )


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def find_cores(environ: Mapping[str, str]) -> CoreFacts:
    """Returns the cores that this process may use, and their load."""
    limited = hasattr(os, "sched_getaffinity")
    usable = len(os.sched_getaffinity(0)) if limited else os.cpu_count() or 1
    return CoreFacts(usable, os.getloadavg()[0], environ.get("OMP_NUM_THREADS", ""))


def read_clock(count: int = 1000) -> tuple[list[float], float]:
    """Returns readings of the monotonic clock, and its resolution in seconds."""
    return [time.monotonic() for _ in range(count)], time.get_clock_info("monotonic").resolution


def ask_time(host: str, timeout: float) -> tuple[float | None, str]:
    """Asks a host for the time of day by SNTP (RFC 4330).

    Args:
        host: its name or address, with `:port` if it is not NTP's.
        timeout: in seconds.

    Returns:
        By how many seconds its clock is ahead of this host's, or None and why it did not answer.
    """
    name, colon, digits = host.rpartition(":")
    if not (colon and digits.isdecimal()):
        name, digits = host, str(NTP_PORT)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            asking.settimeout(timeout)
            asking.connect((name, int(digits)))
            before = time.time()
            asking.send(bytes([0x23]) + bytes(47))  # version 4, from a client
            answer, after = asking.recv(1024), time.time()
        _, seconds, fraction = _NTP.unpack_from(answer)
    except (OSError, ValueError, struct.error) as error:
        return None, f"no answer by NTP from {name}:{digits} ({error})"
    theirs = seconds - NTP_EPOCH + fraction / (1 << 32)
    return theirs - (before + after) / 2, ""


def find_launchers(environ: Mapping[str, str]) -> LauncherFacts:
    """Returns which launchers are there, and what the environment says of this process."""
    try:
        ray = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        ray = ""
    slurm, task, problem = shutil.which("srun") is not None, "", ""
    try:
        found = detect(environ)
        alone = found.workers == 1 and not found.servers and found.processes == 1
        task = "a job of its own" if alone else f"{found.name} of a job"
    except TriremeError as error:
        problem = str(error)
    return LauncherFacts(task, problem, ray, slurm)


def find_addresses() -> AddressFacts:
    """Returns the addresses of this host."""
    families = (socket.AF_INET, socket.AF_INET6)
    interfaces = {
        name: [each.address.partition("%")[0] for each in entries if each.family in families]
        for name, entries in psutil.net_if_addrs().items()
    }
    name = socket.gethostname()
    resolved: tuple[str, ...] = ()
    with suppress(OSError):
        resolved = tuple(dict.fromkeys(str(e[4][0]) for e in socket.getaddrinfo(name, None)))
    return AddressFacts(name, resolved, {k: v for k, v in interfaces.items() if v}, _outward())


def _outward() -> str:
    """Returns the address from which packets to other hosts leave; empty if there is no route."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((SOME_HOST, 9))  # which sends nothing for a datagram socket
        address: str = probe.getsockname()[0]
        return address
    return ""


def try_port(port: int) -> str:
    """Listens at a port of all interfaces for a moment; returns why that failed, or nothing."""
    try:
        listen(f"tcp://0.0.0.0:{port}", allow_plaintext=True).close()
    except TriremeError as error:
        return str(error)
    return ""


def reach(name: str, address: str, timeout: float) -> Reached:
    """Connects to a task at `host:port`, says nothing, and closes the connection."""
    began = time.monotonic()
    try:
        connect(f"tcp://{address}", timeout=timeout).close()
    except TriremeError as error:
        return Reached(name, address, None, str(error))
    return Reached(name, address, time.monotonic() - began)


def find_directory(path: Path) -> DirectoryFacts:
    """Returns the state of a run directory, or of the place where it would be made."""
    place = next(each for each in (path, *path.resolve().parents) if each.exists())
    usage, failure, locks = shutil.disk_usage(place), "", True
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            locks = _has_locks(file.fileno())
    except OSError as error:
        failure = error.strerror or str(error)
    job = writer = stop = ""
    stopped = False
    if is_running(path):
        with suppress(TriremeError):
            record = read_record(path)
            job = f"job {record.job[:8]} (process {record.launcher} on {record.host})"
    entry = read_writer(path) if path.is_dir() else None
    if entry is not None and not entry.released and not entry.gone:
        writer, stopped, stop = entry.words, entry.stopped, entry.stop
    return DirectoryFacts(
        str(path), usage.free, usage.total, failure, locks, job, writer, stopped, stop
    )


def _has_locks(descriptor: int) -> bool:
    try:
        return try_lock(descriptor)
    except OSError:
        return False


def constraint_lines(path: Path) -> Sequence[str]:
    """Returns the requirements in a file of constraints, without comments."""
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]
