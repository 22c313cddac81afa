"""Who takes part: a pure state machine. Events in; new state, instructions and a reason out.

`step(now, state, event)` opens nothing, reads no clock and keeps nothing. The coordinator, the
simulator and the tests drive it alike. It works in two halves: the event is written into the task
that it concerns (this module), then the job is brought into line (`consequences.settle`).

    forming --------- every task is live ---------> running
    forming, running -- every worker has left ----> finished, or interrupted if one says so
    forming ----------- not complete in time -----> failed
    forming, running -- a task says it failed ----> failed
    running ----------- a server or all workers
                        are lost -----------------> failed

    expected --Join--> live --Leave--> left
                       live --its connection closes--> disconnected --nothing--> lost
                       live --silence--> lost
    disconnected --Join, same incarnation--> live
    disconnected, lost, left --Join of a new process--> live, as the next incarnation

A connection is a number that the coordinator gives to each; a task holds at most one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from trireme.cluster import progress
from trireme.cluster.consequences import lose_server, settle
from trireme.cluster.decision import Close, Decision, Draft, Instruction, Send
from trireme.cluster.messages import (
    Heartbeat,
    HeartbeatHeard,
    JobOver,
    JobOverHeard,
    Join,
    Joined,
    Leave,
    Left,
    Outcome,
    Refused,
    Stop,
    StopRequested,
    clip_details,
)
from trireme.cluster.spec import task_name
from trireme.cluster.state import (
    Policy,
    State,
    Task,
    cluster_status,
    everybody_told,
    initial_state,
    missing,
)
from trireme.wire.message import Message

__all__ = [
    "Close",
    "Closed",
    "Decision",
    "Event",
    "Instruction",
    "Paused",
    "Policy",
    "Received",
    "Send",
    "State",
    "Task",
    "Tick",
    "cluster_status",
    "everybody_told",
    "initial_state",
    "missing",
    "step",
]


@dataclass(frozen=True, slots=True)
class Received:
    """A message arrived on a connection."""

    connection: int
    message: Message


@dataclass(frozen=True, slots=True)
class Closed:
    """A connection is gone; `why` is for people."""

    connection: int
    why: str


@dataclass(frozen=True, slots=True)
class Paused:
    """The coordinator itself stood still for so many seconds and could hear nobody."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = Received | Closed | Paused | Tick


def step(now: float, state: State, event: Event) -> Decision:
    """Decides what an event leads to.

    Args:
        now: the time in seconds, on the clock by which `state` was made.
        state: what is known so far; it is not changed.
        event: what happened.

    Returns:
        The new state, what to do, and why.
    """
    draft = Draft(now, state)
    if isinstance(event, Received):
        _receive(draft, event.connection, event.message)
        if isinstance(event.message, Heartbeat):
            return draft.decision()  # makes nothing due, and most events are heartbeats
    elif isinstance(event, Closed):
        _disconnect(draft, event)
    elif isinstance(event, Paused):
        _forgive(draft, event.seconds)
    settle(draft)
    return draft.decision()


def _receive(draft: Draft, connection: int, message: Message) -> None:
    if isinstance(message, Join):
        _join(draft, connection, message)
    elif isinstance(message, Stop):
        _stop(draft, message.reason)
    else:
        task = draft.state.holder(connection)
        handler = _HANDLERS.get(type(message))
        if task is None or handler is None:
            _cut_off(draft, connection, f"{type(message).__name__} has no place here")
            return
        task = replace(task, heard=draft.now)
        draft.put(task)
        handler(draft, task, connection, message)


# Join ------------------------------------------------------------------------------------------


def _join(draft: Draft, connection: int, join: Join) -> None:
    known = draft.state.tasks.get(task_name(join.role, join.index))
    if known is None:
        _deny(draft, connection, join, _outside(draft, join))
        return
    refusal = _refusal(draft, connection, known, join)
    if refusal is not None:
        _deny(draft, connection, join, refusal)
        return
    resumes = join.incarnation > 0 and known.state != "lost"
    if draft.state.over is not None and not resumes:
        draft.send(connection, draft.state.over)
        draft.because(f"{known.name} came after the job was over")
        return
    _take_in(draft, connection, known, _resumed(known) if resumes else _admitted(known, join))
    if known.role == "ps" and known.active and not resumes:
        lose_server(draft, known, f"pid {join.pid} on {join.host} came in its place, empty")


def _take_in(draft: Draft, connection: int, known: Task, task: Task) -> None:
    if known.connection is not None and known.connection != connection:
        draft.close(known.connection)
    task = replace(task, connection=connection, heard=draft.now, moved=draft.now)
    if task.state != known.state:
        task = replace(task, since=draft.now)
    draft.put(task)
    draft.because(f"{task} is connected as incarnation {task.incarnation}")
    policy = draft.state.policy
    draft.send(
        connection,
        Joined(
            task.incarnation,
            policy.heartbeat_interval,
            policy.heartbeat_timeout,
            draft.state.epoch,
            draft.state.term,
        ),
    )
    draft.newcomer = connection


def _deny(draft: Draft, connection: int, join: Join, refusal: Refused) -> None:
    draft.send(connection, refusal)
    draft.because(f"{task_name(join.role, join.index)} was refused: {refusal.reason}")


def _refusal(draft: Draft, connection: int, known: Task, join: Join) -> Refused | None:
    """Returns why a task may not join, or None if it may."""
    holder = draft.state.holder(connection)
    if holder is not None and holder.name != known.name:
        return Refused("claimed", f"this connection is held by {holder}: use one for each task")
    if join.term > draft.state.term:
        return Refused(
            "deposed",
            f"{known.name} has joined term {join.term} of the coordinator, and this process is "
            f"of term {draft.state.term}: it was replaced, and takes nobody in",
        )
    if join.incarnation > known.incarnation:
        return Refused(
            "unknown",
            f"{known.name} comes as incarnation {join.incarnation}, which this coordinator never "
            "gave out: it was started anew and knows nothing of this job; start all of it again",
        )
    if 0 < join.incarnation < known.incarnation:
        return Refused(
            "superseded",
            f"{known} is now incarnation {known.incarnation} of this task: incarnation "
            f"{join.incarnation}, of which nothing was heard, was given up; end its process",
        )
    if join.incarnation > 0 and known.state == "lost" and known.late:
        return Refused(
            "superseded",
            f"{known} was put out of the job: {known.reason}; end its process, or give its steps "
            "longer (--progress-timeout)",
        )
    if join.incarnation == 0 and known.state == "live":
        return Refused(
            "claimed",
            f"{known.name} is held by pid {known.pid} on {known.host}, connected for "
            f"{draft.now - known.since:.0f} s and last heard {draft.now - known.heard:.1f} s ago: "
            "end that process first, or give this one an index of its own",
        )
    return None


def _outside(draft: Draft, join: Join) -> Refused:
    count = len(draft.state.of(join.role))
    return Refused(
        "outside",
        f"{task_name(join.role, join.index)} is outside the cluster, which has {count} "
        f"{'task' if count == 1 else 'tasks'} of role {join.role}: correct the index, or start "
        "the job with more",
    )


def _resumed(known: Task) -> Task:
    if known.state == "left":
        return known
    return replace(known, state="live", reason="it connected again")


def _admitted(known: Task, join: Join) -> Task:
    return Task(
        role=known.role,
        index=known.index,
        state="live",
        reason="it joined",
        incarnation=known.incarnation + 1,
        host=join.host,
        pid=join.pid,
        address=join.address,
    )


# What a task says once it has joined -----------------------------------------------------------


def _hear(draft: Draft, task: Task, connection: int, message: Message) -> None:
    assert isinstance(message, Heartbeat)
    draft.put(progress.heard(draft.now, task, message.status))
    draft.send(connection, HeartbeatHeard())
    draft.because(f"{task.name} is alive")


def _leave(draft: Draft, task: Task, connection: int, message: Message) -> None:
    assert isinstance(message, Leave)
    said = f"{task} left, {message.outcome}" + (f": {message.reason}" if message.reason else "")
    draft.send(connection, Left())
    draft.because(said)
    if task.state == "left":
        return  # it did not get our first answer
    outcome = message.outcome
    draft.put(replace(task, state="left", reason=said, since=draft.now, outcome=outcome))
    if outcome == "failed":
        draft.end(_failure(draft, task, message))
    elif task.role == "ps" and draft.state.phase == "running":
        how: Outcome = "interrupted" if outcome == "interrupted" else "failed"
        draft.end(JobOver(how, task.name, f"{said}, while workers still needed its parameters"))


def _failure(draft: Draft, task: Task, leave: Leave) -> JobOver:
    """Names the culprit: a worker may fail just because a server went away a moment ago."""
    details = clip_details(leave.details)
    gone = [server for server in draft.state.of("ps") if server.state == "disconnected"]
    if task.role == "worker" and gone:
        first = min(gone, key=lambda server: server.since)
        reason = (
            f"{first} went away: {first.reason}; {draft.now - first.since:.1f} s later {task} "
            f"failed: {leave.reason}"
        )
        return JobOver("failed", first.name, reason, details)
    return JobOver("failed", task.name, f"{task} failed: {leave.reason}", details)


def _hear_the_end(draft: Draft, task: Task, connection: int, message: Message) -> None:
    if draft.state.over is None:
        return
    if task.state != "left":
        task = replace(task, state="left", reason="the job is over", since=draft.now)
    draft.put(replace(task, connection=None))
    draft.close(connection)
    draft.because(f"{task.name} knows that the job is over")


_HANDLERS: dict[type[Message], Callable[[Draft, Task, int, Message], None]] = {
    Heartbeat: _hear,
    Leave: _leave,
    JobOverHeard: _hear_the_end,
}


# Other events ----------------------------------------------------------------------------------


def _stop(draft: Draft, reason: str) -> None:
    state = draft.state
    if state.over is not None or state.stop is not None:
        return
    draft.state = replace(state, stop=reason)
    draft.because(f"the job was asked to stop: {reason}")
    for worker in state.of("worker"):
        if worker.connection is not None:
            draft.send(worker.connection, StopRequested(reason))


def _cut_off(draft: Draft, connection: int, why: str) -> None:
    whose = draft.state.holder(connection) or "no task"
    draft.because(f"the connection of {whose} is closed: {why}")
    draft.close(connection)
    _disconnect(draft, Closed(connection, why))


def _disconnect(draft: Draft, event: Closed) -> None:
    task = draft.state.holder(event.connection)
    if task is None:
        return
    if task.state == "live":
        reason = f"its connection closed ({event.why})"
        task = replace(task, state="disconnected", reason=reason, since=draft.now)
        draft.because(f"{task} is cut off: {event.why}")
    draft.put(replace(task, connection=None, heard=draft.now))


def _forgive(draft: Draft, seconds: float) -> None:
    """Moves the deadlines of the tasks: the silence was the coordinator's own."""
    for task in draft.state.tasks.values():
        waited = seconds if task.state in ("disconnected", "lost") else 0.0
        draft.put(
            replace(
                task,
                heard=task.heard + seconds,
                since=task.since + waited,
                moved=task.moved + seconds,
            )
        )
    draft.because(f"the coordinator stood still for {seconds:.1f} s: nobody is given up for it")
