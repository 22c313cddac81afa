"""The flags by which the classic programs of TensorFlow name a task of a cluster.

`trireme task` takes them, and so does a program that is started by python with them:

    python program.py --job_name=worker --task_index=0 --ps_hosts=a:2222 --worker_hosts=b:1,c:1

A program that reads these flags itself keeps them: nothing is taken from its command line.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence

from trireme.cluster.spec import ROLES
from trireme.environments.by_hand import FALSE, TRUE, classic_strategy, classic_task
from trireme.environments.found import Launched
from trireme.errors import UsageError

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

_log = logging.getLogger(__name__)


def find_flagged(arguments: Sequence[str]) -> Launched | None:
    """Returns the task that the arguments of a program name; None if they name none."""
    flags, _ = split_flags(arguments)
    if not flags:
        return None
    named = classic_task(flags)
    _log.warning(
        "%s:%d by the flags on the command line (--job_name, ...): %d workers, servers at %s",
        named.role,
        named.index,
        len(named.cluster.worker),
        ", ".join(named.cluster.ps),
    )
    options = {"aggregate": flags.get("aggregate"), "strategy": classic_strategy(flags)}
    return Launched("the command line", named, options)


def check_flags(arguments: Sequence[str]) -> None:
    """Refuses a program that is told its role in a cluster, and not the cluster."""
    flags, _ = _split(arguments)
    role = flags.get("job_name")
    if role in _CLASSIC_ROLES and not flags.keys() & {"ps_hosts", "worker_hosts"}:
        raise UsageError(
            f"--job_name={role} makes this process a task of a cluster, and no flag says of which: "
            "add --ps_hosts and --worker_hosts, the same for every task, and --task_index; or "
            "leave --job_name out to run this process alone"
        )


def split_flags(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Splits the arguments of a program into the values of the classic flags and all others.

    There are no flags unless they name a cluster: a role, hosts as HOST:PORT lists, and a number as
    the index. Others are the program's own.
    """
    flags, others = _split(arguments)
    return (flags, others) if _names_task(flags) else ({}, list(arguments))


def _split(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
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
            value = words.pop(0) if words and words[0].lower() in (*TRUE, *FALSE) else "true"
        elif not equals:
            value = words.pop(0) if words else ""
        flags[name] = value
    return flags, others


def _names_task(flags: Mapping[str, str]) -> bool:
    """Returns whether flags are the classic ones; a program may have others of these names."""
    hosts = [flags[name] for name in ("ps_hosts", "worker_hosts") if name in flags]
    return (
        flags.get("job_name") in _CLASSIC_ROLES
        and bool(hosts)
        and all(_HOSTS.fullmatch(each) for each in hosts)
        and (flags.get("task_index") or "0").isdecimal()
    )
