"""Reads `TF_CONFIG`, which describes cluster and task in the environment of TensorFlow's programs.

TensorFlow's chief becomes worker 0, and its workers follow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from trireme.environments.cluster import ClusterSpec, ClusterTask
from trireme.environments.found import Launched
from trireme.errors import ConfigurationError, suggestion
from trireme.launch.config.task_config import GroupMember, TaskConfig
from trireme.launch.process_setup.resources import threads_of_task

_VARIABLE = "TF_CONFIG"
_CHIEFS = ("chief", "master")
_JOBS = (*_CHIEFS, "worker", "ps")


class _Task(msgspec.Struct):
    type: str = ""
    index: int = 0


class _Config(msgspec.Struct):
    cluster: dict[str, list[str]] = {}
    task: _Task = msgspec.field(default_factory=_Task)


def find_tf_task(environ: Mapping[str, str]) -> Launched | None:
    """Returns the task that `TF_CONFIG` describes; None where it is not set or names no cluster."""
    text = environ.get(_VARIABLE, "")
    named = read_tf_config(text) if text.strip() else None
    if named is None:
        return None
    return Launched(_VARIABLE, named if named.cluster.ps else _worker(named, environ))


def read_tf_config(text: str) -> ClusterTask | None:
    """Returns the task that a value of `TF_CONFIG` describes; None if it names no cluster."""
    try:
        config = msgspec.json.decode(text, type=_Config, strict=False)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise _wrong(
            f"cannot be read: {error}",
            'it is JSON such as {"cluster": {"worker": ["a:2222", "b:2222"]}, '
            '"task": {"type": "worker", "index": 0}}',
        ) from error
    if not any(config.cluster.values()):
        return None
    for job in config.cluster:
        _check_job(job, "has tasks of the type")
    chiefs = [address for job in _CHIEFS for address in config.cluster.get(job, [])]
    if len(chiefs) > 1:
        raise _wrong(f"has {len(chiefs)} chiefs", "name one, and the others as workers")
    workers = (*chiefs, *config.cluster.get("worker", []))
    role, index = _which(config.task, chiefs)
    try:
        cluster = ClusterSpec(ps=tuple(config.cluster.get("ps", [])), worker=workers)
        cluster.check_task(role, index)
    except ConfigurationError as error:
        raise _wrong(f"makes no cluster: {error}", "the chief counts as worker:0") from error
    return ClusterTask(role, index, cluster)


def _which(task: _Task, chiefs: Sequence[str]) -> tuple[str, int]:
    kind, index = task.type, task.index
    if not kind:
        raise _wrong("has a cluster and no task", 'add "task": {"type": "worker", "index": 0}')
    _check_job(kind, "says that this task is of the type")
    if index < 0 or (kind in _CHIEFS and index):
        raise _wrong(f"has the task {kind} {index}", "indices count from 0, and there is one chief")
    if kind in _CHIEFS and not chiefs:
        raise _wrong(f"has the task {kind} and none such in its cluster", f"name {kind} there too")
    if kind == "worker":
        return "worker", index + len(chiefs)
    return ("ps", index) if kind == "ps" else ("worker", 0)


def _check_job(job: str, where: str) -> None:
    if job == "evaluator":
        raise _wrong(
            f"{where} evaluator", "leave it out: here the workers evaluate, in the same program"
        )
    if job not in _JOBS:
        raise _wrong(f"{where} {job!r}{suggestion(job, _JOBS)}", f"there are {', '.join(_JOBS)}")


def _wrong(what: str, do: str) -> ConfigurationError:
    return ConfigurationError(f"{_VARIABLE} {what}: {do}; or unset it to run this process alone")


def _worker(task: ClusterTask, environ: Mapping[str, str]) -> TaskConfig:
    """Returns a worker of a cluster without servers; they meet at the first one's address."""
    hosts = [address.rpartition(":")[0] for address in task.cluster.worker]
    size, mine = len(hosts), hosts[task.index]
    return TaskConfig(
        job="",
        index=task.index,
        workers=size,
        group=GroupMember(
            size=size,
            rank=task.index,
            local_rank=hosts[: task.index].count(mine),
            one_host=hosts.count(mine) == size,
            address=task.cluster.worker[0] if size > 1 else "",
        ),
        threads=threads_of_task(environ, hosts.count(mine)) if size > 1 else None,
    )
