"""Brings the job into line with its tasks: losses, the job's begin and end, views, notices.

`reconcile` depends only on the state and the time, and not on the last event. So no rule can be
missed because an unexpected event made its condition true.
"""

from __future__ import annotations

from msgspec.structs import replace

from trireme.cluster import progress
from trireme.cluster.messages import JobOver, ViewChanged, WaitingFor
from trireme.cluster.placement import first_division
from trireme.cluster.state import DecisionBuilder, Task, missing
from trireme.cluster.view import ServerEntry, View, WorkerEntry, first_view


def reconcile(builder: DecisionBuilder) -> None:
    """Brings the job into line with its tasks and the time."""
    _lose_silent_tasks(builder)
    _lose_stuck_workers(builder)
    if builder.state.phase == "forming":
        _form(builder)
    if builder.state.phase in ("forming", "running"):
        _end_if_due(builder)
    renewed = builder.state.phase == "running" and _renew_view(builder)
    _notify_waiting(builder)
    state, newcomer = builder.state, builder.newcomer
    if newcomer is not None:  # it may have missed the newest notice
        if state.over is not None:
            builder.send(newcomer, state.over)
        elif state.view is not None and not renewed:
            builder.send(newcomer, ViewChanged(state.view))


def lose_server(builder: DecisionBuilder, server: Task, why: str) -> None:
    """Ends a running job, which cannot go on without the parameters of a server."""
    if builder.state.phase == "running":
        builder.end(JobOver("failed", server.name, f"{server} was lost: {why}"))


def _lose_silent_tasks(builder: DecisionBuilder) -> None:
    policy = builder.state.policy
    for task in builder.state.tasks.values():
        silence = builder.now - task.heard
        away = builder.now - task.since
        if task.state == "live" and silence >= policy.heartbeat_timeout:
            _lose(builder, task, f"it sent nothing for {silence:.1f} s")
        elif task.state == "disconnected" and away >= policy.reconnect_grace:
            _lose(builder, task, f"{task.reason}, and it did not come back within {away:.1f} s")


def _lose_stuck_workers(builder: DecisionBuilder) -> None:
    """Reports a worker that lives and makes no steps, and gives it up in the end."""
    if builder.state.phase != "running":
        return
    for task in builder.state.of("worker"):
        if progress.is_overdue(builder.now, builder.state.policy, task):
            task = replace(task, late=True)
            _lose(builder, task, progress.standstill(builder.now, task))
        elif not task.late and progress.is_late(builder.now, builder.state.policy, task):
            builder.update_task(replace(task, late=True))
            builder.add_reason(f"{task} is stuck: {progress.standstill(builder.now, task)}")


def _lose(builder: DecisionBuilder, task: Task, why: str) -> None:
    if task.connection is not None:
        builder.close(task.connection)
    builder.update_task(replace(task, state="lost", reason=why, since=builder.now, connection=None))
    builder.add_reason(f"{task} was lost: {why}")
    if task.role == "ps":
        lose_server(builder, task, why)


def _form(builder: DecisionBuilder) -> None:
    state = builder.state
    if all(task.state == "live" for task in state.tasks.values()):
        reason = "every task has come"
        builder.state = replace(state, phase="running", reason=reason)
        builder.add_reason(reason)
    elif builder.now - state.started >= state.policy.join_timeout:
        absent = missing(state)
        reason = (
            f"after {state.policy.join_timeout:.0f} s the job still waited for "
            f"{', '.join(f'{task.name} ({task.reason})' for task in absent)}: see what they "
            "printed, and whether they can reach the coordinator"
        )
        builder.end(JobOver("failed", absent[0].name, reason))


def _end_if_due(builder: DecisionBuilder) -> None:
    workers = builder.state.of("worker")
    left = [worker for worker in workers if worker.state == "left"]
    lost = [worker for worker in workers if worker.state == "lost"]
    if any(worker.active for worker in workers):
        return
    if left:
        _end_by_leaving(builder, left, lost)
    elif builder.state.phase == "running":
        _end_by_loss(builder, lost)


def _end_by_leaving(builder: DecisionBuilder, left: list[Task], lost: list[Task]) -> None:
    chief = _chief_lost_at_the_end(left, lost)
    if chief is not None:
        if builder.now - chief.since < builder.state.policy.wait_for_restart:
            return  # its new process gets the values from the servers and saves them
        reason = (
            f"{chief} was lost: {chief.reason}. It was the chief, the others had finished, and it "
            "had not said that it had saved the last step"
        )
        builder.end(JobOver("failed", chief.name, reason))
        return
    interrupted = [worker for worker in left if worker.outcome == "interrupted"]
    note = f"; lost on the way: {', '.join(map(str, lost))}" if lost else ""
    if interrupted:
        builder.end(JobOver("interrupted", interrupted[0].name, interrupted[0].reason + note))
    else:
        builder.end(JobOver("finished", "", "every worker has finished" + note))


def _chief_lost_at_the_end(left: list[Task], lost: list[Task]) -> Task | None:
    """Returns the chief, if it was lost when no worker was left to replace it."""
    finished = max(worker.since for worker in left)
    late = [worker for worker in lost if worker.since > finished]
    chief = min(late, key=lambda worker: worker.index, default=None)
    if chief is None or any(worker.index < chief.index for worker in left):
        return None
    return chief


def _end_by_loss(builder: DecisionBuilder, lost: list[Task]) -> None:
    first = min(lost, key=lambda worker: (worker.since, worker.heard))
    last = max(worker.since for worker in lost)
    if builder.now - last >= builder.state.policy.wait_for_restart:
        who = "the only worker" if len(lost) == 1 else f"all {len(lost)} workers were lost, first"
        reason = f"{who} {first}: {first.reason}"
        builder.end(JobOver("failed", first.name, reason))


def _renew_view(builder: DecisionBuilder) -> bool:
    """Issues a new view if the members differ from the newest one; returns whether it did."""
    state = builder.state
    servers = tuple(
        ServerEntry(task.index, task.incarnation, task.address) for task in state.of("ps")
    )
    workers = tuple(
        WorkerEntry(task.index, task.incarnation) for task in state.of("worker") if task.active
    )
    if state.view is None:
        hosts = {task.index: task.host for task in state.of("ps")}
        shards = first_division(hosts, state.policy.slots, state.policy.replicas)
        view = View(first_view(state.term), servers, workers, shards)
    elif (state.view.servers, state.view.workers) == (servers, workers):
        return False
    else:
        number = state.view.number + 1
        view = replace(state.view, number=number, servers=servers, workers=workers)
    builder.state = replace(state, view=view)
    indices = ", ".join(str(worker.index) for worker in workers)
    builder.add_reason(f"view {view.number}: workers {indices or 'none'}, {len(servers)} servers")
    builder.broadcast(ViewChanged(view))
    return True


def _notify_waiting(builder: DecisionBuilder) -> None:
    state = builder.state
    absent = missing(state)
    if not absent or builder.now - state.noticed < state.policy.notice_interval:
        return
    if state.phase == "forming":
        deadline = state.started + state.policy.join_timeout
    else:
        deadline = min(task.since for task in absent) + state.policy.wait_for_restart
    names = tuple(task.name for task in absent)
    builder.state = replace(state, noticed=builder.now)
    builder.add_reason(f"waiting for {', '.join(names)}, {deadline - builder.now:.0f} s more")
    builder.broadcast(WaitingFor(names, deadline - builder.now))
