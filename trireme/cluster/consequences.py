"""What follows from how the tasks are: losses, the job's begin and end, views, notices.

`settle` looks only at the state and the time, never at what happened last. So no rule can be
missed because an unexpected event made it true.
"""

from __future__ import annotations

from dataclasses import replace

from trireme.cluster import progress
from trireme.cluster.decision import Draft
from trireme.cluster.messages import JobOver, StopRequested, ViewChanged, WaitingFor
from trireme.cluster.state import Task, missing
from trireme.cluster.view import ServerEntry, View, WorkerEntry, first_view

__all__ = ["lose_server", "settle"]


def settle(draft: Draft) -> None:
    """Brings the job into line with its tasks and the time."""
    _give_up_the_silent(draft)
    _give_up_the_stuck(draft)
    if draft.state.phase == "forming":
        _form(draft)
    if draft.state.phase in ("forming", "running"):
        _end_if_due(draft)
    renewed = draft.state.phase == "running" and _renew_view(draft)
    _notify_waiting(draft)
    if draft.newcomer is not None:
        _catch_up(draft, draft.newcomer, knows_view=renewed)


def lose_server(draft: Draft, server: Task, why: str) -> None:
    """Ends a running job, which cannot go on without the parameters of a server."""
    if draft.state.phase == "running":
        draft.end(JobOver("failed", server.name, f"{server} was lost: {why}"))


def _give_up_the_silent(draft: Draft) -> None:
    policy = draft.state.policy
    for task in draft.state.tasks.values():
        silence = draft.now - task.heard
        away = draft.now - task.since
        if task.state == "live" and silence >= policy.heartbeat_timeout:
            _lose(draft, task, f"it said nothing for {silence:.1f} s")
        elif task.state == "disconnected" and away >= policy.reconnect_grace:
            _lose(draft, task, f"{task.reason}, and it did not come back within {away:.1f} s")


def _give_up_the_stuck(draft: Draft) -> None:
    """Names who lives and makes no steps, and goes on without it in the end."""
    if draft.state.phase != "running":
        return
    for task in draft.state.of("worker"):
        if progress.is_overdue(draft.now, draft.state.policy, task):
            task = replace(task, late=True)
            _lose(draft, task, progress.standstill(draft.now, task))
        elif not task.late and progress.is_late(draft.now, draft.state.policy, task):
            draft.put(replace(task, late=True))
            draft.because(f"{task} is stuck: {progress.standstill(draft.now, task)}")


def _lose(draft: Draft, task: Task, why: str) -> None:
    if task.connection is not None:
        draft.close(task.connection)
    draft.put(replace(task, state="lost", reason=why, since=draft.now, connection=None))
    draft.because(f"{task} was lost: {why}")
    if task.role == "ps":
        lose_server(draft, task, why)


def _form(draft: Draft) -> None:
    state = draft.state
    if state.stop is not None:
        reason = f"the job was stopped before all its tasks had come: {state.stop}"
        draft.end(JobOver("interrupted", "", reason))
    elif all(task.state == "live" for task in state.tasks.values()):
        reason = "every task has come"
        draft.state = replace(state, phase="running", reason=reason)
        draft.because(reason)
    elif draft.now - state.started >= state.policy.join_timeout:
        absent = missing(state)
        reason = (
            f"after {state.policy.join_timeout:.0f} s the job still waited for "
            f"{', '.join(f'{task.name} ({task.reason})' for task in absent)}: see what they "
            "printed, and whether they can reach the coordinator"
        )
        draft.end(JobOver("failed", absent[0].name, reason))


def _end_if_due(draft: Draft) -> None:
    workers = draft.state.of("worker")
    left = [worker for worker in workers if worker.state == "left"]
    lost = [worker for worker in workers if worker.state == "lost"]
    if any(worker.active for worker in workers):
        _end_if_strict(draft, lost)
    elif left:
        _end_by_leaving(draft, left, lost)
    elif draft.state.phase == "running":
        _end_by_loss(draft, lost)


def _end_if_strict(draft: Draft, lost: list[Task]) -> None:
    policy = draft.state.policy
    if not policy.strict or draft.state.phase != "running":
        return
    for worker in lost:
        if draft.now - worker.since >= policy.restart_patience:
            reason = (
                f"{worker} was lost: {worker.reason}; no new process took its place within "
                f"{policy.restart_patience:.0f} s, and this strict job does not go on without it"
            )
            draft.end(JobOver("failed", worker.name, reason))


def _end_by_leaving(draft: Draft, left: list[Task], lost: list[Task]) -> None:
    chief = _chief_lost_at_the_end(left, lost)
    if chief is not None:
        if draft.now - chief.since < draft.state.policy.wait_for_restart:
            return  # its new process finds the values at the servers, and saves them
        reason = (
            f"{chief} was lost: {chief.reason}. It was the chief, the others had finished, and it "
            "had not said that it had saved the last step"
        )
        draft.end(JobOver("failed", chief.name, reason))
        return
    interrupted = [worker for worker in left if worker.outcome == "interrupted"]
    note = f"; lost on the way: {', '.join(map(str, lost))}" if lost else ""
    if interrupted:
        draft.end(JobOver("interrupted", interrupted[0].name, interrupted[0].reason + note))
    else:
        draft.end(JobOver("finished", "", "every worker has finished" + note))


def _chief_lost_at_the_end(left: list[Task], lost: list[Task]) -> Task | None:
    """Returns the chief, if it was lost when nobody was left to take over from it."""
    finished = max(worker.since for worker in left)
    late = [worker for worker in lost if worker.since > finished]
    chief = min(late, key=lambda worker: worker.index, default=None)
    if chief is None or any(worker.index < chief.index for worker in left):
        return None
    return chief


def _end_by_loss(draft: Draft, lost: list[Task]) -> None:
    first = min(lost, key=lambda worker: (worker.since, worker.heard))
    if draft.state.stop is not None:
        reason = f"the job was stopped while no worker was left: {draft.state.stop}"
        draft.end(JobOver("interrupted", first.name, reason))
    elif draft.now - max(worker.since for worker in lost) >= draft.state.policy.restart_patience:
        who = "the only worker" if len(lost) == 1 else f"all {len(lost)} workers were lost, first"
        reason = f"{who} {first}: {first.reason}"
        draft.end(JobOver("failed", first.name, reason))


def _renew_view(draft: Draft) -> bool:
    """Issues a new view if the newest does not say who is there; returns whether it did."""
    state = draft.state
    servers = tuple(
        ServerEntry(task.index, task.incarnation, task.address) for task in state.of("ps")
    )
    workers = tuple(
        WorkerEntry(task.index, task.incarnation)
        for task in state.of("worker")
        if task.active or (state.policy.strict and task.state == "lost")
    )
    if state.view and (state.view.servers, state.view.workers) == (servers, workers):
        return False
    view = View(state.view.number + 1 if state.view else first_view(state.term), servers, workers)
    draft.state = replace(state, view=view)
    indices = ", ".join(str(worker.index) for worker in workers)
    draft.because(f"view {view.number}: workers {indices or 'none'}, {len(servers)} servers")
    draft.broadcast(ViewChanged(view))
    return True


def _notify_waiting(draft: Draft) -> None:
    state = draft.state
    absent = missing(state)
    if not absent or draft.now - state.noticed < state.policy.notice_interval:
        return
    if state.phase == "forming":
        deadline = state.started + state.policy.join_timeout
    else:
        deadline = min(task.since for task in absent) + state.policy.restart_patience
    names = tuple(task.name for task in absent)
    draft.state = replace(state, noticed=draft.now)
    draft.because(f"waiting for {', '.join(names)}, {deadline - draft.now:.0f} s more")
    draft.broadcast(WaitingFor(names, deadline - draft.now))


def _catch_up(draft: Draft, connection: int, *, knows_view: bool) -> None:
    """Tells a task that has just joined what it may have missed."""
    state = draft.state
    if state.over is not None:
        draft.send(connection, state.over)
        return
    if state.view is not None and not knows_view:
        draft.send(connection, ViewChanged(state.view))
    if state.stop is not None:
        draft.send(connection, StopRequested(state.stop))
