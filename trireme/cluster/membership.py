"""The membership of a job: a pure state machine from events to a new state and instructions.

`step(now, state, *events)` opens nothing, reads no clock and keeps no state of its own. The
coordinator, the simulator and the tests use it alike. It works in two parts: this module updates
the task that the event concerns, then `reconcile` brings the job into line.

    forming --------- every task is live ---------> running
    forming, running -- every worker has left ----> finished, or interrupted if one says so
    forming ----------- not complete in time -----> failed
    forming, running -- a task says it failed ----> failed
    running ----------- all workers are lost, or all
                        copies of a shard are, and
                        the job does not survive it -> failed

    expected --Join--> live --Leave--> left
                       live --its connection closes--> disconnected --nothing--> lost
                       live --silence--> lost
    disconnected --Join, same incarnation--> live
    disconnected, lost, left --Join of a new process--> live, as the next incarnation
    live, disconnected --its process has ended--> lost

A connection is a number that the coordinator assigns. A task holds at most one.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from msgspec.structs import replace

from trireme.cluster import progress
from trireme.cluster.messages import (
    CaughtUp,
    CopyLost,
    Heartbeat,
    HeartbeatHeard,
    JobOver,
    JobOverHeard,
    Join,
    Joined,
    LastStepSaved,
    Leave,
    Left,
    LinkLost,
    ReadyToSwitch,
    Refusal,
    RequestRefused,
    Scale,
    Signalled,
)
from trireme.cluster.reconcile import lacks_copies, lose_server, lose_task, reconcile
from trireme.cluster.reconfiguration import (
    take_caught_up,
    take_copy_lost,
    take_link_lost,
    take_ready,
)
from trireme.cluster.scaling import admit_further, scale, stop_job, take_signal
from trireme.cluster.spec import task_name
from trireme.cluster.state import Decision, DecisionBuilder, State, Task
from trireme.wire.message import Message


@dataclass(frozen=True, slots=True)
class Received:
    """A message arrived on a connection; `sequence` is that of a request."""

    connection: int
    message: Message
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class Closed:
    """A connection has closed; silently, if the peer's process may live."""

    connection: int
    why: str
    silent: bool = False


@dataclass(frozen=True, slots=True)
class Paused:
    """The coordinator itself was stalled for so many seconds and received nothing."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The coordinator's process is asked to end; finally, if nothing is started again."""

    reason: str
    final: bool = False


@dataclass(frozen=True, slots=True)
class ProcessEnded:
    """The process of a task has ended, as whoever has started it knows."""

    task: str
    host: str
    pid: int
    reason: str


Event = Received | Closed | Paused | Tick | Stop | ProcessEnded


def step(now: float, state: State, *events: Event) -> Decision:
    """Decides how to respond to events that came together; `state` is not modified."""
    builder = DecisionBuilder(now, state)
    for event in events:
        builder.begin_event()
        if isinstance(event, Received):
            _receive(builder, event)
        elif isinstance(event, Closed):
            _disconnect(builder, event)
        elif isinstance(event, Stop):
            if event.final:
                policy = dataclasses.replace(builder.state.policy, wait_for_restart=0.0)
                builder.state = replace(builder.state, policy=policy)
            stop_job(builder, "coordinator:0", event.reason)
        elif isinstance(event, ProcessEnded):
            _process_ended(builder, event)
        elif isinstance(event, Paused):
            _extend_deadlines(builder, event.seconds)
    if not all(map(is_routine, events)):
        reconcile(builder)
    return builder.decision()


def is_routine(event: Event) -> bool:
    """Returns whether an event changes nothing else, as most do: it is a heartbeat."""
    return isinstance(event, Received) and isinstance(event.message, Heartbeat)


def _receive(builder: DecisionBuilder, event: Received) -> None:
    connection, message = event.connection, event.message
    holder = builder.state.holder(connection)
    if isinstance(message, Join):
        _join(builder, connection, message)
    elif holder is not None and _hear(
        builder, replace(holder, heard=builder.now), connection, message
    ):
        return
    elif holder is None and isinstance(message, Scale):
        scale(builder, connection, message, event.sequence)
    else:
        why = f"{type(message).__name__} was not expected"
        builder.add_reason(f"the connection of {holder or 'no task'} is closed: {why}")
        builder.close(connection)
        _disconnect(builder, Closed(connection, why))


def _hear(builder: DecisionBuilder, task: Task, connection: int, message: Message) -> bool:
    """Takes in a member's message; returns whether a task of its role may send it."""
    server = task.role == "ps"
    if isinstance(message, Heartbeat):
        task = progress.heard(builder.now, replace(task, hears=message.heard), message.status)
        builder.send(connection, HeartbeatHeard(builder.now))
        builder.add_reason(f"{task.name} is alive")
    builder.update_task(task)
    if isinstance(message, Leave):
        _leave(builder, task, connection, message)
    elif isinstance(message, Signalled):
        take_signal(builder, task, message)
    elif isinstance(message, LastStepSaved):
        if task.role == "worker" and task.saved != message.step:
            builder.update_task(replace(task, saved=message.step))
            builder.add_reason(f"{task} has saved the last step, {message.step}")
    elif isinstance(message, CaughtUp) and server:
        take_caught_up(builder, task, message)
    elif isinstance(message, CopyLost) and server:
        take_copy_lost(builder, task, message)
    elif isinstance(message, LinkLost) and server:
        take_link_lost(builder, task, message)
    elif isinstance(message, ReadyToSwitch) and server:
        take_ready(builder, task, message)
    elif isinstance(message, JobOverHeard):
        if builder.state.over is not None:
            builder.update_task(replace(_left(builder, task, "the job is over"), connection=None))
            builder.close(connection)
            builder.add_reason(f"{task.name} knows that the job is over")
    else:
        return isinstance(message, Heartbeat)
    return True


def _left(builder: DecisionBuilder, task: Task, reason: str) -> Task:
    if task.state == "left":
        return task
    return replace(task, state="left", reason=reason, since=builder.now)


def _process_ended(builder: DecisionBuilder, ended: ProcessEnded) -> None:
    """Gives a task up whose process has ended, if that process holds it."""
    name, process = ended.task, (ended.host, ended.pid)
    builder.add_reason(f"pid {ended.pid} on {ended.host} of {name} has ended: {ended.reason}")
    task = builder.state.tasks.get(name)
    if task is not None and task.active and (task.host, task.pid) == process:
        lose_task(builder, task, f"its process ended: {ended.reason}")
    elif task is not None and task.silent and (task.host, task.pid) == process:
        builder.update_task(replace(task, silent=False))  # it does not come back by itself


# Join ------------------------------------------------------------------------------------------


def _join(builder: DecisionBuilder, connection: int, join: Join) -> None:
    name = task_name(join.role, join.index)
    if name not in builder.state.tasks:
        admit_further(builder, join.role, join.index)
    known = builder.state.tasks.get(name)
    refusal = _refusal(builder, connection, known, join)
    if refusal is not None:
        builder.send(connection, refusal)
        builder.add_reason(f"{name} was refused: {refusal.reason}")
        return
    assert known is not None  # else it was refused
    resumes = known.state != "lost" and (join.incarnation > 0 or _asks_again(known, join))
    if builder.state.over is not None and not resumes:
        builder.send(connection, builder.state.over)
        builder.add_reason(f"{known.name} came after the job was over")
        return
    _admit(builder, connection, known, join, resumes=resumes)
    if known.role == "ps" and known.active and not resumes:
        lose_server(builder, known, f"pid {join.pid} on {join.host} came in its place, empty")


def _admit(
    builder: DecisionBuilder, connection: int, known: Task, join: Join, *, resumes: bool
) -> None:
    if known.connection is not None and known.connection != connection:
        builder.close(known.connection)
    task = known
    if not resumes:
        task = Task(
            *(known.role, known.index, "live", "it joined"),
            incarnation=known.incarnation + 1,
            host=join.host,
            pid=join.pid,
            address=join.address,
            start=join.start,
        )
    elif known.state != "left":
        task = replace(known, state="live", reason="it connected again")
    pace = replace(task.pace, moved=builder.now)
    task = replace(task, connection=connection, heard=builder.now, pace=pace, silent=False)
    if task.state != known.state:
        task = replace(task, since=builder.now)
    builder.update_task(task)
    builder.add_reason(f"{task} is connected as incarnation {task.incarnation}")
    policy = builder.state.policy
    beats = policy.heartbeat_interval, policy.heartbeat_timeout
    start = builder.state.epoch, builder.state.term
    builder.send(connection, Joined(task.incarnation, *beats, *start, policy.rejoin_timeout))
    builder.newcomers.append(connection)


def _asks_again(known: Task, join: Join) -> bool:
    """Returns whether a process joins that has joined already, and has not heard that it has."""
    return 0 < join.start == known.start and join.incarnation < known.incarnation


def _refusal(
    builder: DecisionBuilder, connection: int, known: Task | None, join: Join
) -> RequestRefused | None:
    state, holder = builder.state, builder.state.holder(connection)
    code: Refusal
    if known is None:
        count = len(state.of(join.role))
        code = "outside"
        why = (
            f"{task_name(join.role, join.index)} is outside the cluster, which has {count} "
            f"{'task' if count == 1 else 'tasks'} of role {join.role}: correct the index, or start "
            "the job with more"
        )
    elif holder is not None and holder.name != known.name:
        code, why = "claimed", f"this connection is held by {holder}: use one for each task"
    elif join.term > state.term:
        code = "deposed"
        why = (
            f"{known.name} has joined term {join.term} of the coordinator, and this process is "
            f"of term {state.term}: it was replaced, and admits no task"
        )
    elif join.incarnation > known.incarnation:
        code = "unknown"
        why = (
            f"{known.name} comes as incarnation {join.incarnation}, which this coordinator never "
            "gave out: it was started again, without its journal; start the whole job again"
        )
    elif 0 < join.incarnation < known.incarnation and not _asks_again(known, join):
        code = "superseded"
        why = (
            f"{known} is now incarnation {known.incarnation} of this task: incarnation "
            f"{join.incarnation}, of which nothing was heard, was given up; end its process"
        )
    elif known.dismissed and not known.active:
        code = "dismissed"
        why = (
            f"the job was made smaller and has no place for {known.name}: make it larger first "
            "(trireme scale)"
        )
    elif join.incarnation > 0 and known.state == "lost" and known.pace.late:
        code = "superseded"
        why = (
            f"{known} was removed from the job: {known.reason}; start it again, or give its steps "
            "more time (--progress-timeout)"
        )
    elif join.incarnation == 0 and known.state == "live" and not _asks_again(known, join):
        code = "claimed"
        why = (
            f"{known.name} is held by pid {known.pid} on {known.host}, last heard "
            f"{builder.now - known.heard:.1f} s ago: end that process first, or give this one an "
            "index of its own"
        )
    else:
        return None
    return RequestRefused(code, why)


# Messages of a member --------------------------------------------------------------------------


def _leave(builder: DecisionBuilder, task: Task, connection: int, message: Leave) -> None:
    left = f"{task} left, {message.outcome}" + (f": {message.reason}" if message.reason else "")
    builder.send(connection, Left())
    builder.add_reason(left)
    if task.state == "left":  # it did not get the first answer
        return
    outcome = message.outcome
    if task.departs and outcome == "interrupted" and not builder.state.stopping:
        lose_task(builder, task, f"it left: {message.reason}")
        return
    builder.update_task(replace(_left(builder, task, left), outcome=outcome))
    if outcome == "failed":
        builder.end(_failure(builder, task, message))
    elif task.role == "ps" and lacks_copies(builder.state):
        builder.end(
            JobOver(
                "interrupted" if outcome == "interrupted" else "failed",
                task.name,
                f"{left}, while workers still needed its parameters",
            )
        )


def _failure(builder: DecisionBuilder, task: Task, leave: Leave) -> JobOver:
    """Returns the job's end. A worker may have failed only because a server just went away."""
    gone = [server for server in builder.state.of("ps") if server.state == "disconnected"]
    if task.role == "worker" and gone:
        first = min(gone, key=lambda server: server.since)
        reason = (
            f"{first} went away: {first.reason}; {builder.now - first.since:.1f} s later {task} "
            f"failed: {leave.reason}"
        )
        return JobOver("failed", first.name, reason)
    return JobOver("failed", task.name, f"{task} failed: {leave.reason}")


# Other events ----------------------------------------------------------------------------------


def _disconnect(builder: DecisionBuilder, event: Closed) -> None:
    task = builder.state.holder(event.connection)
    if task is None:
        return
    if task.state == "live":
        reason = f"its connection closed ({event.why})"
        task = replace(task, state="disconnected", reason=reason, since=builder.now)
        task = replace(task, silent=event.silent)
        builder.add_reason(f"{task} is cut off: {event.why}")
    builder.update_task(replace(task, connection=None, heard=builder.now))


def _extend_deadlines(builder: DecisionBuilder, seconds: float) -> None:
    """Extends the deadlines of the tasks, because the coordinator itself was stalled."""
    for task in builder.state.tasks.values():
        waited = seconds if task.state in ("disconnected", "lost") else 0.0
        pace = replace(task.pace, moved=task.pace.moved + seconds)
        task = replace(task, heard=task.heard + seconds, since=task.since + waited, pace=pace)
        builder.update_task(task)
    resumed = builder.state.resumed
    if resumed is not None:
        builder.state = replace(builder.state, resumed=resumed + seconds)
    builder.add_reason(f"the coordinator was stalled for {seconds:.1f} s: no task is given up")
