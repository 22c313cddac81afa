"""`trireme doctor`: checks this host and what it reaches, and says what to do."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from resource import RLIMIT_NOFILE, getrlimit

import msgspec

from trireme.cli.runs import query
from trireme.cluster.messages import TaskStatus
from trireme.cluster.spec import check_address
from trireme.doctor.checks import (
    Check,
    check_addresses,
    check_directory,
    check_environment,
    check_files,
    check_port,
    check_shared_memory,
    check_task,
    check_versions,
    find_addresses,
)
from trireme.doctor.entry import DOCTOR
from trireme.errors import TriremeError, UsageError
from trireme.launch.run_directory import RECORD, is_running, read_record
from trireme.location import local_directory
from trireme.printable import counted

_SECONDS = 3.0  # how long to wait for a host


def main(arguments: Sequence[str]) -> int:
    """Prints the checks; returns 1 if there is a problem, else 0."""
    given = DOCTOR.parser().read(arguments)
    if wrong := [text for text in given.port if not text.isdecimal() or not 0 < int(text) < 65536]:
        raise UsageError(f"--port is {wrong[0]!r}: it must be a number from 1 to 65535")
    tasks = [task for where in given.where for task in _tasks(where)]
    directories = [Path(where) for where in given.where if Path(where).is_dir()]
    directories += [local_directory(given.run_dir)] if given.run_dir is not None else []

    checks = [*check_versions(), *check_shared_memory(), check_files(getrlimit(RLIMIT_NOFILE)[0])]
    checks += [check_environment(os.environ), *check_addresses(*find_addresses())]
    checks += [*map(check_port, (0, *map(int, given.port)))]
    checks += [check_task(name, address, _SECONDS) for name, address in tasks]
    for directory in directories or [Path("runs")]:
        checks += check_directory(directory)
    problems = sum(check.level == "problem" for check in checks)
    as_json = json.dumps(msgspec.to_builtins(checks), indent=2) if given.json else ""
    print(as_json or "\n".join(_lines(checks)))
    return 1 if problems else 0


def _tasks(where: str) -> Iterator[tuple[str, str]]:
    path = Path(where)
    if path.is_dir():
        if (path / RECORD).exists() and is_running(path):
            record = read_record(path)
            if record.coordinator:
                yield "coordinator:0", record.coordinator.partition("://")[2]
                with suppress(TriremeError):  # the check of the coordinator says why
                    yield from listening(query(record, _SECONDS).tasks)
    else:
        check_address("the task", where)
        yield "", where


def listening(tasks: Iterable[TaskStatus]) -> Iterator[tuple[str, str]]:
    """Yields the names and the addresses of tasks that should listen, not of those that left."""
    for task in tasks:
        if task.address and task.state not in ("expected", "left"):
            yield task.name, task.address.partition("://")[2]


def _lines(checks: Sequence[Check]) -> Iterator[str]:
    width = max(len(check.topic) for check in checks)
    for check in checks:
        yield f"{check.level:<8} {check.topic:<{width}}  {check.finding}"
        if check.advice:
            yield f"{'':<8} {'':<{width}}  -> {check.advice}"
    problems = sum(check.level == "problem" for check in checks)
    warnings = sum(check.level == "warning" for check in checks)
    yield f"{len(checks)} checks: {counted(problems, 'problem')}, {counted(warnings, 'warning')}"
