"""`trireme certs init|issue|show DIR`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from trireme.cli.command import number
from trireme.cli.parser import CERTS
from trireme.errors import UsageError, suggestion
from trireme.launch.config.authority import AUTHORITY_DAYS
from trireme.launch.config.certificates import issue, make_authority, show
from trireme.launch.config.secret import SECRET_FILE


def main(arguments: Sequence[str]) -> int:
    """Runs one of the three actions."""
    given = CERTS.parser().read(arguments)
    action = _ACTIONS.get(given.action)
    if action is None:
        raise UsageError(
            f"`trireme certs` cannot {given.action}{suggestion(given.action, _ACTIONS)}; it can "
            f"{', '.join(_ACTIONS)}"
        )
    if given.action != "issue" and (given.task or given.host):
        raise UsageError("--task and --host are for `trireme certs issue`")
    if given.action == "show" and given.days is not None:
        raise UsageError("--days is for `trireme certs init` and `trireme certs issue`")
    return action(given)


def _init(given: Namespace) -> int:
    directory = Path(given.dir)
    days = _days(given.days)
    for file in make_authority(directory, AUTHORITY_DAYS if days is None else days):
        print(file)
    print(
        "Only you can read these. Next: `trireme certs issue "
        f"{directory} --task ps:0 --task worker:0`, with every task of the job. ca.key stays here."
    )
    return 0


def _issue(given: Namespace) -> int:
    if not given.task:
        raise UsageError("name the tasks: `trireme certs issue DIR --task ps:0 --task worker:0`")
    directory, tasks = Path(given.dir), tuple(dict.fromkeys(given.task))
    files = issue(directory, tasks, given.host, _days(given.days))
    for task, file in zip(tasks, files, strict=True):
        print(f"{file}: for {task}{' and coordinator:0' if task == 'ps:0' else ''}")
    print(
        f"Copy each to the host of its task, with {directory / SECRET_FILE}, into one directory "
        "that only you can read, and start the task there with --certs DIRECTORY."
    )
    return 0


def _show(given: Namespace) -> int:
    status, now = 0, datetime.now(UTC)
    for file, facts in show(Path(given.dir)):
        if facts is None:
            print(f"{file.name}  DAMAGED: it holds no certificate")
            status = 1
            continue
        who = " and ".join(facts.tasks) or "the authority"
        where = f" at {', '.join(facts.hosts)}" if facts.hosts else ""
        problem = facts.problem(now)
        status = 1 if problem else status
        print(
            f"{file.name}  {who}{where}  until {facts.end:%Y-%m-%d %H:%M} UTC"
            f"{f'  NOT VALID: it {problem}' if problem else ''}"
        )
    return status


_ACTIONS: dict[str, Callable[[Namespace], int]] = {"init": _init, "issue": _issue, "show": _show}


def _days(text: str | None) -> float | None:
    what = "a number above 0, at most 36500"
    return None if text is None else number("--days", text, what, lambda days: 0 < days <= 36500)
