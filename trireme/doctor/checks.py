"""The checks of a host, its network, certificates and a run directory: each asks, and judges."""

from __future__ import annotations

import importlib.metadata
import os
import resource
import shutil
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Literal

import msgspec
import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from trireme.cluster.spec import LOOPBACK
from trireme.errors import TriremeError
from trireme.file_lock import try_lock
from trireme.launch.environment.detect import detect
from trireme.launch.run_directory import is_running, read_record
from trireme.session.checkpoint.run_lock import LocalClaims
from trireme.wire.shared_memory import available
from trireme.wire.transport import connect, listen

DISTRIBUTION = "trireme-train"
GIB, MIB = 1 << 30, 1 << 20
SOON = timedelta(days=7)
SUFFIXES = (".pem", ".crt", ".cert", ".key")
_SOME_HOST = "192.0.2.1"  # of RFC 5737, which no host has; nothing is sent there


class Check(msgspec.Struct, frozen=True):
    """The result of one check.

    Attributes:
        topic: what was looked at, in a word or two.
        level: `ok`; `warning` for what a job may run with; `problem` for what it fails with.
        advice: what to do; empty if all is well, or if `finding` is an error that says it.
    """

    topic: str
    level: Literal["ok", "warning", "problem"]
    finding: str
    advice: str = ""


def check_versions(name: str = DISTRIBUTION) -> Iterator[Check]:
    """Checks Python and each package that the distribution needs."""
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        advice = "install it: `pip install --editable .`"
        yield Check("trireme", "warning", "it runs from a source tree, not installed", advice)
        return
    yield Check("trireme", "ok", found.version)
    python = ".".join(map(str, sys.version_info[:3]))
    supports = str(found.metadata["Requires-Python"] or "")
    if SpecifierSet(supports).contains(python, prereleases=True):
        yield Check("python", "ok", python)
    else:
        advice = "make an environment with a newer Python"
        yield Check("python", "problem", f"{python}, and trireme needs {supports}", advice)
    well = []
    for each in map(Requirement, found.requires or ()):
        if each.marker and not each.marker.evaluate({"extra": ""}):
            continue
        version = None
        with suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(each.name)
        if version is not None and each.specifier.contains(version, prereleases=True):
            well.append(f"{each.name} {version}")
            continue
        have = "is not installed" if version is None else f"is {version}"
        needs = f"it {have}, and trireme needs {each.specifier or 'it'}"
        yield Check(each.name, "problem", needs, f"pip install '{each.name}{each.specifier}'")
    if well:
        yield Check("packages", "ok", ", ".join(well))


def check_shared_memory(directory: Path = Path("/dev/shm")) -> Iterator[Check]:
    """Checks `memfd`, by which tasks of a host share memory, and /dev/shm, which loaders use."""
    if available():
        yield Check("memfd", "ok", "workers and servers of this host can share memory")
    else:
        advice = "nothing: tasks of this host use TCP, which is slower"
        yield Check("memfd", "warning", "this system has no memfd_create", advice)
    if not directory.is_dir():
        return
    usage = shutil.disk_usage(directory)
    text = f"{_size(usage.free)} free of {_size(usage.total)}"
    if usage.free < 512 * MIB:  # Docker gives containers 64 MiB
        advice = "give the container more (docker run --shm-size=1g), or use no num_workers"
        says = f"{text}: data loaders with processes of their own may die by SIGBUS"
        yield Check("/dev/shm", "warning", says, advice)
    else:
        yield Check("/dev/shm", "ok", text)


def check_limits() -> Iterator[Check]:
    """Checks the limits that `ulimit` shows."""
    files, processes = (_limit(each) for each in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
    yield check_files(files)
    running = 0
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            running += process.num_threads() * (process.uids().real == os.getuid())
    yield check_processes(running, processes)


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def check_files(limit: int | None) -> Check:
    """Checks how many files a process may have open; None for no limit."""
    if limit is None or limit >= 1024:
        return Check("open files", "ok", "no limit" if limit is None else f"{limit} a process")
    says = f"{limit} a process are few: a server needs one for each connection"
    advice = "ulimit -n 4096, in the shell that starts the tasks"
    return Check("open files", "problem" if limit < 256 else "warning", says, advice)


def check_processes(running: int, limit: int | None) -> Check:
    """Checks how many processes and threads this user has, and may have; None for no limit."""
    text = f"{running} of {limit or 'any number of'} processes and threads are in use"
    if limit is None or limit - running >= 512:
        return Check("processes", "ok", text)
    advice = f"ulimit -u {running + 2048}, or end what is not needed"
    return Check("processes", "warning", f"{text}, and torch starts many", advice)


def check_cores(usable: int, load: float, threads: str) -> Iterator[Check]:
    """Checks the cores that this process may use, their load, and OMP_NUM_THREADS ("" if unset)."""
    text = f"{usable}, load {load:.1f}"
    if load > usable:
        advice = "end them, or expect a slower job"
        yield Check("cores", "warning", f"{text}: other processes use them", advice)
    else:
        yield Check("cores", "ok", text)
    if threads and not (threads.isdecimal() and 0 < int(threads) <= usable):
        says = f"OMP_NUM_THREADS={threads}, and there are {usable} cores"
        advice = "unset OMP_NUM_THREADS: each task then gets its part of the cores"
        yield Check("BLAS threads", "warning", says, advice)


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
    if LOOPBACK in own:
        yield Check("loopback", "ok", f"tasks of `trireme run` announce {LOOPBACK}")
    else:
        found = f"this host has no {LOOPBACK}, where `trireme run` has its tasks listen"
        yield Check("loopback", "problem", found, "ip link set lo up")
    if outward:
        yield Check("network", "ok", f"tasks that other hosts reach announce {outward}")
    else:
        advice = "connect it, if the job is to have tasks on several hosts; otherwise nothing"
        yield Check("network", "warning", "this host has no route to others", advice)
    text = f"{name} is {', '.join(resolved)}"
    if not resolved:
        found = f"{name} resolves to no address, and torch.distributed asks for it"
        advice = f"add {outward or LOOPBACK} {name} to /etc/hosts"
        yield Check("host name", "warning", found, advice)
    elif not own.intersection(resolved):
        advice = f"correct {name} in /etc/hosts or DNS, or set GLOO_SOCKET_IFNAME"
        yield Check("host name", "problem", f"{text}, which is no address of this host", advice)
    elif outward and all(each.startswith("127.") or each == "::1" for each in resolved):
        advice = f"for process groups on several hosts map {name} to {outward}"
        yield Check("host name", "warning", f"{text}, which other hosts cannot reach", advice)
    else:
        yield Check("host name", "ok", text)


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


def check_certificates(directory: Path, now: datetime) -> Iterator[Check]:
    """Checks the dates of each certificate, and that only this user can read private keys.

    Raises:
        OSError: the directory cannot be read.
    """
    paths = sorted(each for each in directory.iterdir() if each.suffix in SUFFIXES)
    if not paths:
        advice = "name the directory that holds the job's certificates and keys"
        yield Check("certificates", "problem", "no certificate and no key is there", advice)
    for path in paths:
        try:
            yield _check_certificate(path, now)
        except (OSError, ValueError) as error:
            yield Check(path.name, "problem", f"it cannot be read: {error}", "issue it again")


def _check_certificate(path: Path, now: datetime) -> Check:
    from cryptography import x509

    text, mode = path.read_bytes(), stat.S_IMODE(path.stat().st_mode)
    private = b"PRIVATE KEY-----" in text
    if private and mode & (stat.S_IRWXG | stat.S_IRWXO):
        finding = f"other users can read this private key (mode {mode:03o})"
        return Check(path.name, "problem", finding, f"chmod 600 {path.name}, and issue it again")
    if private and b"-----BEGIN CERTIFICATE-----" not in text:
        return Check(path.name, "ok", "a private key, which only this user can read")
    found = x509.load_pem_x509_certificate(text)
    begins, ends = found.not_valid_before_utc, found.not_valid_after_utc
    who = f"{found.subject.rfc4514_string() or '(no subject)'}, until {ends:%Y-%m-%d %H:%M} UTC"
    if begins > now:
        advice = "set this host's clock, or issue it again"
        return Check(path.name, "problem", f"{who}, is not valid yet", advice)
    if ends <= now:
        return Check(path.name, "problem", f"{who}, has expired", "issue it again")
    if ends < now + SOON:
        return Check(path.name, "warning", f"{who}, expires soon", "issue it again")
    return Check(path.name, "ok", who)


def check_directory(path: Path) -> Iterator[Check]:
    """Checks a run directory: its disk, the permission, the locks, and who uses it."""
    place = next(each for each in (path, *path.resolve().parents) if each.exists())
    yield check_disk(shutil.disk_usage(place).free, path)
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            locked = False
            with suppress(OSError):
                locked = try_lock(file.fileno())
    except OSError as error:
        advice = "change its owner or permissions, or name another directory with --run-dir"
        says = f"{path} cannot be written: {error.strerror or error}"
        yield Check("run directory", "problem", says, advice)
    else:
        if locked:
            yield Check("run directory", "ok", f"{path} can be written and locked")
        else:
            says = f"the file system of {path} has no file locks: two jobs could write there"
            advice = "use a file system with locks (NFS mounts: without nolock)"
            yield Check("run directory", "warning", says, advice)
    yield _check_users(path)


def check_disk(free: int, path: Path) -> Check:
    """Checks the free bytes of a run directory's disk."""
    if free >= GIB:
        return Check("disk", "ok", f"{_size(free)} free at {path}")
    advice = "make room, keep fewer checkpoints (Checkpoint(keep=...)), or name another --run-dir"
    level: Literal["warning", "problem"] = "problem" if free < 64 * MIB else "warning"
    return Check("disk", level, f"{_size(free)} free at {path}", advice)


def _check_users(path: Path) -> Check:
    entry = LocalClaims(path).newest()[1] if path.is_dir() else None
    if entry is not None and (entry.released or entry.gone):
        entry = None
    if entry is not None and entry.stopped:
        advice = f"continue it (kill -CONT), or end it: {entry.stop}"
        return Check("run lock", "problem", f"{entry.words} holds it and is stopped", advice)
    with suppress(TriremeError):
        if is_running(path):
            record = read_record(path)
            job = f"job {record.job[:8]} (process {record.launcher} on {record.host}) runs there"
            return Check("run lock", "ok", job)
    if entry is not None:
        advice = f"to start another job there, first: {entry.stop}"
        return Check("run lock", "warning", f"{entry.words} writes there", advice)
    return Check("run lock", "ok", "no job uses it")


def check_host(environ: Mapping[str, str]) -> Iterator[Check]:
    """Checks this host."""
    affinity = getattr(os, "sched_getaffinity", None)
    usable = len(affinity(0)) if affinity else os.cpu_count() or 1
    yield from check_versions()
    yield from check_shared_memory()
    yield from check_limits()
    yield from check_cores(usable, os.getloadavg()[0], environ.get("OMP_NUM_THREADS", ""))
    yield check_environment(environ)
    yield from check_addresses(*find_addresses())


def _size(count: float) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"
