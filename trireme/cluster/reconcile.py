"""Brings the job into line with its tasks: losses, the job's begin and end, views, notices.

`reconcile` depends only on the state and the time, and not on the last event. So no rule can be
missed because an unexpected event made its condition true.
"""

from __future__ import annotations

from msgspec.structs import replace

from trireme.cluster import progress
from trireme.cluster.messages import (
    Dismissed,
    Interrupted,
    JobOver,
    Outcome,
    ViewChanged,
    WaitingFor,
)
from trireme.cluster.placement import surviving
from trireme.cluster.reconfiguration import renew_view
from trireme.cluster.scaling import DEPARTURE, DISMISSAL, answer_signals, dismiss_those_to_leave
from trireme.cluster.state import DecisionBuilder, State, Task, comes_back_until, missing


def reconcile(builder: DecisionBuilder) -> None:
    """Brings the job into line with its tasks and the time."""
    _lose_silent_tasks(builder)
    _lose_stuck_tasks(builder)
    answer_signals(builder)
    if builder.state.phase == "forming":
        _form(builder)
    if builder.state.phase in ("forming", "running"):
        _end_if_due(builder)
    renewed = builder.state.phase == "running" and renew_view(builder)
    _inform_newcomers(builder, renewed=renewed)
    if builder.state.over is None:
        dismiss_those_to_leave(builder)
    _notify_waiting(builder)


def lose_task(
    builder: DecisionBuilder, task: Task, why: str, *, silent: bool = False, late: bool = False
) -> None:
    """Gives a task up: `silent` if its process may live, out of reach; `late` keeps it out."""
    if task.connection is not None:
        builder.close(task.connection)
    lost = replace(task, state="lost", reason=why, since=builder.now, connection=None)
    builder.update_task(replace(lost, silent=silent, pace=replace(task.pace, late=late)))
    builder.add_reason(f"{task} was lost: {why}")
    if task.role == "ps":
        lose_server(builder, task, why)


def lose_server(builder: DecisionBuilder, server: Task, why: str) -> None:
    """Forgets a server; ends a running job if it needs its copies, and does not survive that."""
    shunned = {s: note for s, note in builder.state.shunned.items() if s != server.index}
    state = builder.state = replace(builder.state, shunned=shunned)
    if not state.policy.survives_loss and lacks_copies(state):
        builder.end(JobOver("failed", server.name, f"{server} was lost: {why}"))


def lacks_copies(state: State) -> bool:
    """Returns whether a shard of a running job has no copy left."""
    return (
        state.phase == "running"
        and state.view is not None
        and surviving(state.view.shards, state.holders) is None
    )


def _has_last_copy(state: State, task: Task) -> bool:
    """Returns whether a server is the last one that holds a shard of which there were several."""
    shards = state.view.shards if state.view is not None and state.policy.replicas > 1 else ()
    held = [state.holders.intersection(shard.copies) for shard in shards]
    return task.role == "ps" and {task.index} in held


def _inform_newcomers(builder: DecisionBuilder, *, renewed: bool) -> None:
    state = builder.state
    for newcomer in builder.newcomers:
        if state.over is not None:
            builder.send(newcomer, state.over)
            continue
        if state.view is not None and not renewed:
            builder.send(newcomer, ViewChanged(state.view))
        task = state.holder(newcomer)
        if task is not None and task.notified:
            builder.send(newcomer, Dismissed(DEPARTURE if task.departs else DISMISSAL))
        if task is not None and task.role == "worker" and state.stopping:
            builder.send(newcomer, Interrupted(state.stopping))


def _lose_silent_tasks(builder: DecisionBuilder) -> None:
    policy = builder.state.policy
    for task in builder.state.tasks.values():
        silence = builder.now - task.heard
        away = builder.now - task.since
        grace = policy.reconnect_grace
        if builder.state.resumed is not None and task.since <= builder.state.resumed:
            grace = max(grace, policy.heartbeat_timeout)  # it pauses between its attempts
        limit = policy.heartbeat_timeout
        if _has_last_copy(builder.state, task):
            limit *= progress.LAST_COPY_TIMEOUTS
            grace = max(grace, limit)
        if task.state == "live" and silence >= limit:
            lose_task(builder, task, f"it sent nothing for {silence:.1f} s", silent=True)
        elif task.state == "disconnected" and away >= grace:
            why = f"{task.reason}, and it did not come back within {away:.1f} s"
            lose_task(builder, task, why, silent=task.silent)


def _lose_stuck_tasks(builder: DecisionBuilder) -> None:
    """Reports a worker that lives and makes no steps; gives it up in the end, and such a server."""
    if builder.state.phase != "running":
        return
    for task in builder.state.of("ps"):
        if progress.is_overdue(builder.now, builder.state.policy, task):
            lose_task(builder, task, progress.standstill(builder.now, task))
    for task in builder.state.of("worker"):
        unreached = task.status.get(progress.UNREACHED)
        if task.state == "live" and unreached:
            lose_task(builder, task, f"it lives, and cannot reach {unreached}", silent=True)
        # A worker is judged at its last heartbeat: a silent one may be making steps.
        elif progress.is_overdue(task.heard, builder.state.policy, task):
            lose_task(builder, task, progress.standstill(task.heard, task), late=True)
        elif not task.pace.late and progress.is_late(task.heard, builder.state.policy, task):
            builder.update_task(replace(task, pace=replace(task.pace, late=True)))
            builder.add_reason(f"{task} is stuck: {progress.standstill(task.heard, task)}")


def _form(builder: DecisionBuilder) -> None:
    state = builder.state
    if not missing(state):
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
    state, workers = builder.state, builder.state.of("worker")
    servers = [server for server in state.of("ps") if server.state == "lost"]
    if state.phase == "running" and servers and not state.left_to_go_on("ps"):
        _end_by_loss(builder, servers)
    # Those who left because the job was made smaller have not finished it.
    left = [worker for worker in workers if worker.state == "left" and not worker.dismissed]
    lost = [worker for worker in workers if worker.state == "lost"]
    if any(worker.active for worker in workers):
        return
    if left:
        _end_by_leaving(builder, left, lost)
    elif builder.state.phase == "running" and lost:
        _end_by_loss(builder, [worker for worker in lost if not worker.dismissed] or lost)


def _end_by_leaving(builder: DecisionBuilder, left: list[Task], lost: list[Task]) -> None:
    chiefs = [worker for worker in lost if worker.saved is not None] or lost
    if chiefs and all(worker.saved is None for worker in left):  # nobody has taken over from it
        chief = min(chiefs, key=lambda worker: worker.index)
        if builder.now < comes_back_until(builder.state.policy, chief):
            return  # it, or its new process, gets the values from the servers and saves them
        lacks = (
            "its program had not ended, though the last step is saved"
            if chief.saved is not None
            else "it had not reported that it had saved the last step"
        )
        reason = f"{chief} was lost: {chief.reason}. It was the chief, the others had finished, "
        reason += f"and {lacks}"
        builder.end(JobOver(_outcome_of_loss(builder.state, [chief]), chief.name, reason))
        return
    interrupted = [worker for worker in left if worker.outcome == "interrupted"]
    note = f"; lost on the way: {', '.join(map(str, lost))}" if lost else ""
    if interrupted:
        builder.end(JobOver("interrupted", interrupted[0].name, interrupted[0].reason + note))
    else:
        builder.end(JobOver("finished", "", "every worker has finished" + note))


def _end_by_loss(builder: DecisionBuilder, lost: list[Task]) -> None:
    first = min(lost, key=lambda task: (task.since, task.heard))
    if builder.now >= max(comes_back_until(builder.state.policy, task) for task in lost):
        kind = "server" if first.role == "ps" else "worker"
        who = f"the only {kind}" if len(lost) == 1 else f"all {len(lost)} {kind}s were lost, first"
        reason = f"{who} {first}: {first.reason}"
        builder.end(JobOver(_outcome_of_loss(builder.state, lost), first.name, reason))


def _outcome_of_loss(state: State, lost: list[Task]) -> Outcome:
    """Returns how a job ends whose last tasks were lost.

    Where one of them has saved the last step, and was asked to end by a signal, nothing has failed.
    """
    asked = any(task.saved is not None and (task.signal or state.stopping) for task in lost)
    return "interrupted" if asked else "failed"


def _notify_waiting(builder: DecisionBuilder) -> None:
    state = builder.state
    absent = missing(state)
    if not absent or builder.now - state.noticed < state.policy.notice_interval:
        return
    if state.phase == "forming":
        deadline = state.started + state.policy.join_timeout
    else:
        deadline = max(comes_back_until(state.policy, task) for task in absent)
    names = tuple(task.name for task in absent)
    builder.state = replace(state, noticed=builder.now)
    builder.add_reason(f"waiting for {', '.join(names)}, {deadline - builder.now:.0f} s more")
    builder.broadcast(WaitingFor(names, deadline - builder.now))
