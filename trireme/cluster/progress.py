"""Detects a stuck task: its process sends heartbeats while its main thread makes no steps.

Heartbeats come from a thread of their own. So each reports how many steps the worker has made, and
an excuse while none can be expected: it waits for other tasks, evaluates, saves, compiles, or a
debugger holds it. A server reports the turns of its service's loop likewise, and has no excuse.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from trireme.cluster.messages import StatusValue
from trireme.cluster.state import Pace, Policy, Task

# Names in a heartbeat's status:
STEPS, EXCUSE, LOCATION = "progress", "excuse", "at"  # and where the main thread is
BUSY = "busy"  # of a server whose loop is within long turns: it answers nobody in time
UNREACHED = "unreached"  # of a worker that reaches its coordinator, and not these servers
STUCK = "stuck"  # which the coordinator adds to that of a worker that is late

FIRST_BATCH = "its first batch is made"  # the excuse of a worker that waits for its first one

LOOK_SECONDS = 5.0

LAST_COPY_TIMEOUTS = 3
"""A server with the last copy of a shard is lost after so many silent heartbeat timeouts: where all
others are gone, nobody could take its place, and the job would go back to its checkpoint."""

_USUAL_STEPS = 10
_LEAST_SECONDS = 10.0
_FIRST_BATCH_SECONDS = 60.0
_SMOOTHING = 0.2


def heard(now: float, task: Task, status: Mapping[str, StatusValue]) -> Task:
    """Returns a task after a heartbeat. One that reports no steps is never late."""
    pace, steps = task.pace, status.get(STEPS)
    waits = status.get(EXCUSE) == task.status.get(EXCUSE) == FIRST_BATCH
    if not waits and (not isinstance(steps, int) or status.get(EXCUSE) or not steps):
        made = steps if isinstance(steps, int) else 0
        return replace(task, status=status, pace=Pace(now, made, pace.usual))
    if waits or steps == pace.steps:
        if pace.late:
            status = {**status, STUCK: standstill(now, replace(task, status=status))}
        return replace(task, status=status)
    assert isinstance(steps, int)
    usual = pace.usual
    if 0 < pace.steps < steps:
        sample = (now - pace.moved) / (steps - pace.steps)
        usual = sample if not usual else usual + _SMOOTHING * (sample - usual)
    return replace(task, status=status, pace=Pace(now, steps, usual))


def is_late(now: float, policy: Policy, task: Task) -> bool:
    """Returns whether a worker has made no step for as long as several of its usual steps take."""
    idle = now - task.pace.moved
    if task.state == "live" and task.status.get(EXCUSE) == FIRST_BATCH:
        return idle >= _FIRST_BATCH_SECONDS  # nobody knows how long it may take
    least = min(_LEAST_SECONDS, policy.progress_timeout / 2 or _LEAST_SECONDS)
    return _counts(task, "worker") and idle >= max(least, _USUAL_STEPS * task.pace.usual)


def is_overdue(now: float, policy: Policy, task: Task) -> bool:
    """Returns whether a task has made no step for so long that the job goes on without it."""
    limit = policy.heartbeat_timeout if task.role == "ps" else policy.progress_timeout
    return _counts(task, task.role) and limit > 0 and now - task.pace.moved >= limit


def standstill(now: float, task: Task) -> str:
    """Returns a text: for how long a task has made no step, and where its main thread is."""
    seconds = f"{now - task.pace.moved:.0f} s"
    text = f"it lives, and has made no step for {seconds}"
    if task.role == "ps":
        text = f"it lives, and its service has done nothing for {seconds}"
    elif task.pace.usual:
        text += f", where its steps take {task.pace.usual:.2g} s"
    location = task.status.get(LOCATION)
    return f"{text}; its main thread is at {location}" if location else text


def is_absent(now: float, since: float, patience: float) -> bool:
    """Returns whether a worker that cannot reach servers stays out of its job for now.

    The others do not wait for it then. It leaves after `patience` seconds, and for as long; now and
    then it comes back to see whether other servers have the parameters.
    """
    absent = now - since - patience
    return absent >= 0 and absent % (patience + LOOK_SECONDS) < patience


def _counts(task: Task, role: str) -> bool:
    return task.state == "live" and task.role == role and task.pace.steps > 0
