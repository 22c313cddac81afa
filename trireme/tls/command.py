"""`trireme certs init|issue|show DIR`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from trireme.cli.command import number
from trireme.errors import UsageError
from trireme.launch.config.secret import SECRET_FILE
from trireme.tls.authority import AUTHORITY_DAYS
from trireme.tls.directory import certificates_in, issue, make_authority
from trireme.tls.entry import CERTS


def main(arguments: Sequence[str]) -> int:
    """Runs one of the three actions."""
    given = CERTS.parser().read(arguments)
    what = "a number above 0, at most 36500"
    days = given.days and number("--days", given.days, what, lambda days: 0 < days <= 36500)
    if given.action == "init":
        return _init(given.dir, days or AUTHORITY_DAYS)
    if given.action == "issue":
        return _issue(given.dir, tuple(dict.fromkeys(given.task)), days)
    return _show(given.dir)


def _init(directory: Path, days: float) -> int:
    for file in make_authority(directory, days):
        print(file)
    print(
        "Only you can read these. Next: `trireme certs issue "
        f"{directory} --task ps:0 --task worker:0`, with every task of the job. ca.key stays here."
    )
    return 0


def _issue(directory: Path, tasks: Sequence[str], days: float | None) -> int:
    if not tasks:
        raise UsageError("name the tasks: `trireme certs issue DIR --task ps:0 --task worker:0`")
    for task, file in zip(tasks, issue(directory, tasks, days), strict=True):
        print(f"{file}: for {task}{' and coordinator:0' if task == 'ps:0' else ''}")
    print(
        f"Copy each to the host of its task, with {directory / SECRET_FILE}, into one directory "
        "that only you can read, and start the task there with --certs DIRECTORY."
    )
    return 0


def _show(directory: Path) -> int:
    status, now = 0, datetime.now(UTC)
    for file, facts in certificates_in(directory):
        if facts is None:
            print(f"{file.name}  DAMAGED: it holds no certificate")
            status = 1
            continue
        problem = facts.problem(now)
        status = 1 if problem else status
        print(
            f"{file.name}  {' and '.join(facts.tasks) or 'the authority'}  "
            f"until {facts.end:%Y-%m-%d %H:%M} UTC{problem and f'  NOT VALID: it {problem}'}"
        )
    return status
