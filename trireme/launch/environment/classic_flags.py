"""The flags by which the classic programs of TensorFlow name a task of a cluster.

`trireme task` takes them, and so does a program that is started by python with them:

    python program.py --job_name=worker --task_index=0 --ps_hosts=a:2222 --worker_hosts=b:1,c:1

A program that reads these flags itself keeps them: nothing is taken from its command line. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from trireme.cluster.spec import ROLES, ClusterSpec, ClusterTask
from trireme.errors import UsageError, suggestion

_FLAGS = {
    "job_name": "job_name",
    "task_index": "task_index",
    "task_id": "task_index",
    "ps_hosts": "ps_hosts",
    "worker_hosts": "worker_hosts",
    "coordinator": "coordinator",
    "sync_replicas": "sync_replicas",
    "replicas_to_aggregate": "aggregate",
}
"""The name of each flag, by each of its spellings, with underscores."""

_CLASSIC_ROLES = (*ROLES, "chief")  # `classic_task` refuses those that Trireme does not have
_HOST = r"(\[[0-9A-Fa-f:.]+\]|[\w.-]+):\d+"
_HOSTS = re.compile(rf"\s*{_HOST}(\s*,\s*{_HOST})*\s*")

_TRUE, _FALSE = ("true", "1", "yes"), ("false", "0", "no")

Flags = Mapping[str, str | None]
"""The values of flags, by their names; None for one that was not given."""


def split_flags(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Splits the arguments of a program into the values of the classic flags and all others.

    There are no flags unless they name a cluster: a role, hosts as HOST:PORT lists, and a number as
    the index. Others are the program's own.
    """
    flags: dict[str, str] = {}
    others: list[str] = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        if word == "--":
            others += [word, *words]
            break
        spelling, equals, value = word.partition("=")
        name = _FLAGS.get(spelling.lstrip("-").replace("-", "_")) if word[:1] == "-" else None
        if name is None:
            others.append(word)
            continue
        if not equals and name == "sync_replicas":
            value = words.pop(0) if words and words[0].lower() in (*_TRUE, *_FALSE) else "true"
        elif not equals:
            value = words.pop(0) if words else ""
        flags[name] = value
    return (flags, others) if _names_task(flags) else ({}, list(arguments))


def _names_task(flags: Flags) -> bool:
    """Returns whether flags are the classic ones; a program may have others of these names."""
    hosts = [flags[name] or "" for name in ("ps_hosts", "worker_hosts") if name in flags]
    return (
        flags.get("job_name") in _CLASSIC_ROLES
        and bool(hosts)
        and all(_HOSTS.fullmatch(each) for each in hosts)
        and (flags.get("task_index") or "0").isdecimal()
    )


def classic_task(flags: Flags) -> ClusterTask:
    """Returns the task that the flags name."""
    job_name, ps_hosts, worker_hosts = (
        flags.get(name) for name in ("job_name", "ps_hosts", "worker_hosts")
    )
    if job_name is None or ps_hosts is None or worker_hosts is None:
        missing = next(n for n in ("job_name", "ps_hosts", "worker_hosts") if flags.get(n) is None)
        raise UsageError(
            f"--{missing.replace('_', '-')} is missing: every task needs --job-name, "
            "--task-index, --ps-hosts and --worker-hosts"
        )
    if job_name not in ROLES:
        raise UsageError(
            f"--job-name is {job_name!r}{suggestion(job_name, ROLES)}; the roles are: "
            f"{', '.join(ROLES)}"
        )
    cluster = ClusterSpec.from_hosts(ps_hosts, worker_hosts, flags.get("coordinator"))
    return ClusterTask(job_name, _index(flags.get("task_index")), cluster)


def classic_strategy(flags: Flags) -> str | None:
    """Returns the strategy, which is `sync` with `--sync-replicas`."""
    text, strategy = flags.get("sync_replicas"), flags.get("strategy")
    if text is None:
        return strategy
    if text.lower() not in (*_TRUE, *_FALSE):
        raise UsageError(f"--sync-replicas is {text!r}: it must be true or false")
    if text.lower() in _FALSE:
        return strategy
    if strategy not in (None, "sync"):
        raise UsageError(f"--sync-replicas and --strategy {strategy} contradict each other")
    return "sync"


def _index(text: str | None) -> int:
    try:
        return int(text) if text is not None else 0
    except ValueError:
        raise UsageError(f"--task-index is {text!r}: it must be a whole number from 0") from None
