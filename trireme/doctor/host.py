"""Checks of this host: versions, shared memory, limits, cores, clock. Pure functions of facts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from trireme.doctor.check import MIB, Check, bytes_as_text

LEAST_FILES, USUAL_FILES = 256, 1024
LEAST_PROCESSES = 512
SMALL_SHARED_MEMORY = 512 * MIB
"""Docker gives containers 64 MiB, in which loaders with processes of their own die by SIGBUS."""
CLOCK_SKEW = 5.0
CERTIFICATE_SKEW = 300.0


@dataclass(frozen=True, slots=True)
class Distribution:
    """The installed distribution of Trireme.

    Attributes:
        version: its version; empty if it runs from a source tree that is not installed.
        python: the version of the interpreter.
        requires_python: the versions of Python that it supports, such as `>=3.11`.
        requirements: what it needs, such as `torch>=2.9,<3`.
        installed: the version of each package that is installed, by its normalized name (PEP 503).
    """

    version: str
    python: str
    requires_python: str
    requirements: tuple[str, ...]
    installed: Mapping[str, str]


def check_versions(found: Distribution, constraints: Sequence[str] = ()) -> list[Check]:
    """Checks Python and every package that Trireme needs.

    Args:
        found: what is installed.
        constraints: lines such as `torch==2.9.1`, which the installed packages must satisfy too.
    """
    if not found.version:
        return [
            Check(
                "trireme",
                "warning",
                "it runs from a source tree, and its requirements are unknown",
                "install it: `pip install --editable .`",
            )
        ]
    checks = [Check("trireme", "ok", found.version), _check_python(found)]
    required = [Requirement(text) for text in found.requirements]
    required = [each for each in required if not each.marker or each.marker.evaluate({"extra": ""})]
    checks += _check_packages(required, found.installed, "trireme needs")
    pinned = [Requirement(line) for line in constraints]
    pinned = [each for each in pinned if canonicalize_name(each.name) in found.installed]
    return checks + _check_packages(pinned, found.installed, "the constraints ask for", quiet=True)


def _check_python(found: Distribution) -> Check:
    if SpecifierSet(found.requires_python).contains(found.python, prereleases=True):
        return Check("python", "ok", found.python)
    return Check(
        "python",
        "problem",
        f"{found.python}, and trireme needs {found.requires_python}",
        "make an environment with a newer Python",
    )


def _check_packages(
    required: Sequence[Requirement],
    installed: Mapping[str, str],
    who: str,
    *,
    quiet: bool = False,
) -> list[Check]:
    """Checks packages; those that are well share one check, but for torch."""
    well, checks = [], []
    for each in required:
        version = installed.get(canonicalize_name(each.name))
        if version is not None and each.specifier.contains(version, prereleases=True):
            well.append(f"{each.name} {version}")
            continue
        have = "is not installed" if version is None else f"is {version}"
        checks.append(
            Check(
                each.name,
                "problem",
                f"it {have}, and {who} {each.specifier or 'it'}",
                f"pip install '{each.name}{each.specifier}'",
            )
        )
    well.sort(key=lambda text: not text.startswith("torch "))
    if well:
        text = f"{len(well)} versions as constrained" if quiet else ", ".join(well)
        checks.insert(0, Check("packages", "ok", text))
    return checks


@dataclass(frozen=True, slots=True)
class SharedMemoryFacts:
    """The shared memory of this host.

    Attributes:
        size, free: of /dev/shm, in bytes; None where there is none.
        failure: why memory that two processes share cannot be made; empty if it can.
    """

    size: int | None
    free: int | None
    failure: str = ""


def check_shared_memory(facts: SharedMemoryFacts) -> list[Check]:
    """Checks `memfd`, by which workers lend servers memory, and /dev/shm, which loaders use."""
    checks = [Check("memfd", "ok", "workers and servers of this host can share memory")]
    if facts.failure:
        checks = [
            Check(
                "memfd",
                "warning",
                f"no memory can be shared here: {facts.failure}",
                "nothing: tasks of this host use TCP, which is slower",
            )
        ]
    if facts.size is None or facts.free is None:
        return [*checks, Check("/dev/shm", "ok", "this system has none")]
    text = f"{bytes_as_text(facts.free)} free of {bytes_as_text(facts.size)}"
    if facts.free < SMALL_SHARED_MEMORY:
        advice = "give the container more (docker run --shm-size=1g), or use no num_workers"
        says = f"{text}: data loaders with processes of their own may die by SIGBUS"
        return [*checks, Check("/dev/shm", "warning", says, advice)]
    return [*checks, Check("/dev/shm", "ok", text)]


@dataclass(frozen=True, slots=True)
class LimitFacts:
    """Limits of a process of this user, None for none.

    Attributes:
        files: how many files it may have open.
        processes: how many processes and threads the user may have.
        running: how many the user has.
        locked: how many bytes it may lock in memory.
    """

    files: int | None
    processes: int | None
    running: int
    locked: int | None


def check_limits(facts: LimitFacts) -> list[Check]:
    """Checks the limits that `ulimit` shows."""
    return [_check_files(facts.files), _check_processes(facts), _check_locked(facts.locked)]


def _check_files(files: int | None) -> Check:
    if files is None or files >= USUAL_FILES:
        return Check("open files", "ok", "no limit" if files is None else f"{files} a process")
    return Check(
        "open files",
        "problem" if files < LEAST_FILES else "warning",
        f"{files} a process are few: a server needs one for each connection",
        f"ulimit -n {4 * USUAL_FILES}, in the shell that starts the tasks",
    )


def _check_processes(facts: LimitFacts) -> Check:
    if facts.processes is None:
        return Check("processes", "ok", "no limit")
    left = facts.processes - facts.running
    text = f"{facts.running} of {facts.processes} processes and threads are in use"
    if left >= LEAST_PROCESSES:
        return Check("processes", "ok", text)
    advice = f"ulimit -u {facts.running + 4 * LEAST_PROCESSES}, or end what is not needed"
    return Check("processes", "warning", f"{text}: {left} are left, and torch starts many", advice)


def _check_locked(locked: int | None) -> Check:
    text = "no limit" if locked is None else bytes_as_text(locked)
    if locked is None or locked >= 64 * MIB:
        return Check("locked memory", "ok", text)
    advice = "ulimit -l unlimited, if the job uses NCCL over InfiniBand; otherwise nothing"
    return Check("locked memory", "warning", f"{text} a process", advice)


@dataclass(frozen=True, slots=True)
class CoreFacts:
    """The cores of this host.

    Attributes:
        usable: how many this process may use.
        load: how many processes want to run, as a mean over the last minute.
        threads: the value of OMP_NUM_THREADS; empty if it is not set.
    """

    usable: int
    load: float
    threads: str


def check_cores(facts: CoreFacts) -> list[Check]:
    """Checks the cores, what else uses them, and the number of BLAS threads."""
    text = f"{facts.usable}, load {facts.load:.1f}"
    checks = [Check("cores", "ok", text)]
    if facts.load > facts.usable:
        says = f"{text}: other processes use them"
        advice = (
            "end them, or expect a slower job; where `python` alone starts a program, "
            "OMP_NUM_THREADS=1 often makes it faster"
        )
        checks = [Check("cores", "warning", says, advice)]
    if not facts.threads:
        return [*checks, Check("BLAS threads", "ok", "each task gets its part of the cores")]
    well = facts.threads.isdecimal() and 0 < int(facts.threads) <= facts.usable
    if well:
        text = f"OMP_NUM_THREADS={facts.threads} for every task"
        return [*checks, Check("BLAS threads", "ok", text)]
    says = f"OMP_NUM_THREADS={facts.threads}, and there are {facts.usable} cores"
    advice = "unset OMP_NUM_THREADS: each task then gets its part of the cores"
    return [*checks, Check("BLAS threads", "warning", says, advice)]


def check_clock(readings: Sequence[float], resolution: float) -> Check:
    """Checks the monotonic clock, by which every deadline is measured.

    Args:
        readings: of that clock, in seconds, one after the other.
        resolution: the clock's resolution in seconds.
    """
    if list(readings) != sorted(readings) or readings[0] == readings[-1]:
        return Check(
            "monotonic clock",
            "problem",
            "it does not advance steadily, and every deadline depends on it",
            "repair the host's clock source (on Linux: /sys/devices/system/clocksource)",
        )
    return Check("monotonic clock", "ok", f"resolution {resolution * 1e9:.0f} ns")


def check_skew(host: str, offset: float | None, reason: str = "") -> Check:
    """Checks this host's time of day against another's.

    Args:
        host: the other host.
        offset: by how many seconds its clock is ahead of this one; None if it did not answer.
        reason: why it did not.
    """
    topic = f"clock of {host}"
    if offset is None:
        advice = "run an NTP server there, or compare `date` on both by hand"
        return Check(topic, "warning", f"it does not tell the time: {reason}", advice)
    if abs(offset) <= CLOCK_SKEW:
        return Check(topic, "ok", f"{offset:+.3f} s")
    far = abs(offset) > CERTIFICATE_SKEW
    harm = "certificates may count as not yet valid" if far else "times in records do not fit"
    advice = "synchronise both by NTP (chronyc tracking, timedatectl)"
    return Check(topic, "problem" if far else "warning", f"{offset:+.1f} s: {harm}", advice)


@dataclass(frozen=True, slots=True)
class LauncherFacts:
    """The launchers that are present.

    Attributes:
        task: the task that this process would be, by its environment.
        problem: why its environment describes none; empty if it does.
        ray: the version of Ray; empty if it is not installed.
        slurm: whether `srun` is there.
    """

    task: str
    problem: str
    ray: str
    slurm: bool


def check_launchers(facts: LauncherFacts) -> list[Check]:
    """Checks what the environment says of this process, and which launchers there are."""
    ray = f"ray {facts.ray}" if facts.ray else "no ray"
    slurm = "srun" if facts.slurm else "no srun"
    checks = [Check("launchers", "ok", f"{ray}, {slurm}")]
    if facts.problem:
        advice = "correct or unset these variables"
        return [*checks, Check("environment", "problem", facts.problem, advice)]
    return [*checks, Check("environment", "ok", f"a program started here is {facts.task}")]
