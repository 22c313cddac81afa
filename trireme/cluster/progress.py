"""Detects a stuck task: its process sends heartbeats while its main thread makes no steps.

Heartbeats come from a thread of their own, so that they show that the process lives and not that it
makes steps. A heartbeat therefore reports how many steps the worker has made, and an excuse while
none can be expected: it waits for other tasks, evaluates, saves, compiles, or a debugger holds it.
A server reports the signs of life of its service's loop likewise, and has no excuse.
Pure: the membership calls this module at each heartbeat and each tick.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from trireme.cluster.messages import StatusValue
from trireme.cluster.state import Policy, Task

STEPS, EXCUSE, LOCATION = "progress", "excuse", "at"
"""The names in a heartbeat's status: the steps, the excuse, and the main thread's location."""

BUSY = "busy"
"""The name in the status of a server whose loop is within long turns: it answers nobody in time."""

FIRST_BATCH = "its first batch is made"
"""The excuse of a worker that waits for its first batch: it is named after a while, and kept."""

STUCK = "stuck"
"""The name that the coordinator adds to the status of a worker that is late."""

UNREACHED = "unreached"
"""The name in the status of a worker that reaches its coordinator, and not these servers."""

LOOK_SECONDS = 5.0

_USUAL_STEPS = 10
_LEAST_SECONDS = 10.0
_FIRST_BATCH_SECONDS = 60.0
_SMOOTHING = 0.2


def heard(now: float, task: Task, status: Mapping[str, StatusValue]) -> Task:
    """Returns a task after a heartbeat.

    Args:
        now: the time.
        task: the task before the heartbeat.
        status: the heartbeat's status. A task that does not report its steps, such as a server, is
            never late.
    """
    steps = status.get(STEPS)
    if status.get(EXCUSE) == task.status.get(EXCUSE) == FIRST_BATCH:
        return replace(task, status=_told(now, task, status))
    if not isinstance(steps, int) or status.get(EXCUSE) or not steps:
        made = steps if isinstance(steps, int) else 0
        return replace(task, status=status, steps=made, moved=now, late=False)
    if steps == task.steps:
        return replace(task, status=_told(now, task, status))
    usual = task.usual
    if 0 < task.steps < steps:
        sample = (now - task.moved) / (steps - task.steps)
        usual = sample if not usual else usual + _SMOOTHING * (sample - usual)
    return replace(task, status=status, steps=steps, moved=now, usual=usual, late=False)


def _told(now: float, task: Task, status: Mapping[str, StatusValue]) -> Mapping[str, StatusValue]:
    """Returns the status of a worker that has made no step since; says so if it is late."""
    if not task.late:
        return status
    return {**status, STUCK: standstill(now, replace(task, status=status))}


def is_late(now: float, policy: Policy, task: Task) -> bool:
    """Returns whether a worker has made no step for as long as several of its usual steps take.

    How long the first batch may take nobody knows: one that takes a minute is worth a word.
    """
    if task.state == "live" and task.status.get(EXCUSE) == FIRST_BATCH:
        return now - task.moved >= _FIRST_BATCH_SECONDS
    least = _LEAST_SECONDS
    if policy.progress_timeout:
        least = min(least, policy.progress_timeout / 2)
    return _counts(task) and now - task.moved >= max(least, _USUAL_STEPS * task.usual)


def is_overdue(now: float, policy: Policy, task: Task) -> bool:
    """Returns whether a task has made no step for so long that the job goes on without it."""
    if task.role == "ps":
        reports = task.state == "live" and task.steps > 0
        return reports and now - task.moved >= policy.heartbeat_timeout
    limit = policy.progress_timeout
    return _counts(task) and limit > 0 and now - task.moved >= limit


def standstill(now: float, task: Task) -> str:
    """Returns a text: for how long a task has made no step, and where its main thread is."""
    seconds = f"{now - task.moved:.0f} s"
    text = f"it lives, and has made no step for {seconds}"
    if task.role == "ps":
        text = f"it lives, and its service has done nothing for {seconds}"
    elif task.usual:
        text += f", where its steps take {task.usual:.2g} s"
    location = task.status.get(LOCATION)
    return f"{text}; its main thread is at {location}" if location else text


def is_absent(now: float, since: float, patience: float) -> bool:
    """Returns whether a worker that cannot reach servers stays out of its job for now.

    The others do not wait for it then. Now and then it comes back to see whether other servers have
    the parameters.

    Args:
        now: the time.
        since: since when it cannot reach them.
        patience: the seconds after which it leaves, and for which it stays away.
    """
    absent = now - since - patience
    return absent >= 0 and absent % (patience + LOOK_SECONDS) < patience


def _counts(task: Task) -> bool:
    return task.state == "live" and task.role == "worker" and task.steps > 0
