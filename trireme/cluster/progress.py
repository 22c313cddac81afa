"""Who lives and gets nowhere: a worker whose heart beats while its main thread is stuck.

A heartbeat comes from a thread of its own, so that it says that a process lives and not that it
makes steps. It therefore carries how many steps the worker has made, and an excuse while none can
be expected: it waits for others, evaluates, saves, compiles, or a debugger holds it. Pure: the
membership asks this module at each heartbeat and each tick.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from trireme.cluster.messages import StatusValue
from trireme.cluster.state import Policy, Task

__all__ = ["EXCUSE", "PLACE", "STEPS", "STUCK", "heard", "is_late", "is_overdue", "standstill"]

STEPS, EXCUSE, PLACE = "progress", "excuse", "at"
"""What a worker's heartbeat says: its steps, why it makes none, where its main thread is."""

STUCK = "stuck"
"""What the coordinator adds to the status of a worker that is late."""

_USUAL_STEPS = 10
_LEAST_SECONDS = 10.0
_SMOOTHING = 0.2


def heard(now: float, task: Task, status: Mapping[str, StatusValue]) -> Task:
    """Returns a task of which a heartbeat has come.

    Args:
        now: the time.
        task: as it was.
        status: what the heartbeat says. A task that does not say how many steps it has made, such
            as a server, is never late.
    """
    steps = status.get(STEPS)
    if not isinstance(steps, int) or status.get(EXCUSE) or not steps:
        made = steps if isinstance(steps, int) else 0
        return replace(task, status=status, steps=made, moved=now, late=False)
    if steps == task.steps:
        if task.late:
            status = {**status, STUCK: standstill(now, replace(task, status=status))}
        return replace(task, status=status)
    usual = task.usual
    if 0 < task.steps < steps:
        sample = (now - task.moved) / (steps - task.steps)
        usual = sample if not usual else usual + _SMOOTHING * (sample - usual)
    return replace(task, status=status, steps=steps, moved=now, usual=usual, late=False)


def is_late(now: float, policy: Policy, task: Task) -> bool:
    """Returns whether a worker has made no step for as long as several of its usual steps take."""
    least = _LEAST_SECONDS
    if policy.progress_timeout:
        least = min(least, policy.progress_timeout / 2)
    return _counts(task) and now - task.moved >= max(least, _USUAL_STEPS * task.usual)


def is_overdue(now: float, policy: Policy, task: Task) -> bool:
    """Returns whether a worker has made no step for so long that the job goes on without it."""
    limit = policy.progress_timeout
    return _counts(task) and limit > 0 and now - task.moved >= limit


def standstill(now: float, task: Task) -> str:
    """Returns in words for how long a worker has made no step, and where it is."""
    text = f"it lives, and has made no step for {now - task.moved:.0f} s"
    if task.usual:
        text += f", where its steps take {task.usual:.2g} s"
    place = task.status.get(PLACE)
    return f"{text}; its main thread is at {place}" if place else text


def _counts(task: Task) -> bool:
    return task.state == "live" and task.role == "worker" and task.steps > 0
