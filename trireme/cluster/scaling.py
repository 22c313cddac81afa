"""A job that grows and shrinks while it runs, and tasks that a signal asks to end.

A task that is not needed any more is *dismissed*: a worker at once, and it finishes its update
first; a server once others hold its copies. The last task of a role is never dismissed.

A signal to one worker, as of a host that is taken away, has that worker leave: the others go on,
and another process may take its place. The job stops, at a step that is saved, after Ctrl-C at a
worker, where the coordinator or a parameter server is asked to end, or where all workers are, or
one of a job whose number of workers is fixed.

Signals to all tasks come one after the other. So a worker leaves only when `settle` seconds have
passed and the others were not asked too.
"""

from __future__ import annotations

from msgspec.structs import replace

from trireme.cluster.messages import (
    Dismissed,
    Interrupted,
    JobOver,
    RequestRefused,
    Scale,
    Scaled,
    Signalled,
)
from trireme.cluster.reconfiguration import is_needed
from trireme.cluster.spec import task_name
from trireme.cluster.state import DecisionBuilder, Policy, State, Task
from trireme.printable import counted

MOST_WORKERS = 1024  # a job grows to so many workers at most: a larger number is a mistyped one

DISMISSAL = "the job was made smaller and needs this task no more"  # what a dismissed task hears


def scale(builder: DecisionBuilder, connection: int, message: Scale, sequence: int) -> None:
    """Changes how many tasks the job shall have, and answers."""
    wanted = {"ps": message.servers, "worker": message.workers}
    why = _objection(builder.state, message)
    if why:
        builder.send(connection, RequestRefused("scale", why), sequence)
        builder.add_reason(f"the job is not scaled: {why}")
        return
    builder.state = replace(builder.state, requests=builder.state.requests + 1)
    for role, count in wanted.items():
        if count is not None:
            _resize(builder, role, count)
    builder.send(connection, _answer(builder.state), sequence)
    servers, workers = (len(builder.state.wanted(role)) for role in wanted)
    builder.add_reason(
        f"the job shall have {counted(servers, 'server')} and {counted(workers, 'worker')}"
    )


def admit_further(builder: DecisionBuilder, role: str, index: int) -> bool:
    """Makes room for a task that joins a running job by itself; returns whether there is room.

    It must be the next one, so that a mistyped index is found.
    """
    state = builder.state
    if role not in ("ps", "worker") or state.phase != "running" or not state.policy.elastic:
        return False
    if index != len(state.of(role)) or _too_many(state.policy, role, len(state.wanted(role)) + 1):
        return False
    _add(builder, Task(role, index))
    builder.add_reason(f"{task_name(role, index)} makes the job larger")
    return True


def dismiss_those_to_leave(builder: DecisionBuilder) -> None:
    """Informs the dismissed tasks on which nothing depends any more."""
    for task in builder.state.tasks.values():
        if not task.dismissed or task.notified or task.connection is None or not task.active:
            continue
        if task.role == "ps" and is_needed(builder.state, task.index):
            continue
        builder.update_task(replace(task, notified=True))
        builder.send(task.connection, Dismissed(DISMISSAL))
        builder.add_reason(f"{task} is dismissed")


def _objection(state: State, message: Scale) -> str:
    """Returns why the job cannot be scaled so; "" if it can."""
    policy = state.policy
    if state.over is not None:
        return "the job is over"
    if not policy.elastic:
        return "this job keeps the number of tasks that it began with: its strategy needs that"
    if message.workers is not None and message.workers < 1:
        return "a job needs at least 1 worker"
    if message.workers is not None and message.workers > MOST_WORKERS:
        return f"a job grows to {MOST_WORKERS} workers at most"
    if message.servers is None:
        return ""
    if not policy.servers:
        return "the job began without parameter servers, and its values are at its workers"
    if message.servers < policy.replicas:
        return (
            f"each shard has {policy.replicas} copies, on different servers: the job needs at "
            f"least {policy.replicas}"
        )
    if _too_many(policy, "ps", message.servers):
        return f"the parameters are cut into {policy.slots} slots: that is the most servers"
    return ""


def _too_many(policy: Policy, role: str, count: int) -> bool:
    return role == "ps" and (not policy.servers or count > policy.slots)


def _resize(builder: DecisionBuilder, role: str, count: int) -> None:
    """Dismisses the highest tasks, but those first that are not there; or makes room for more."""
    wanted = builder.state.wanted(role)
    leaving = sorted(wanted, key=lambda task: (task.state == "live", -task.index))
    for task in leaving[: max(0, len(wanted) - count)]:
        builder.update_task(replace(task, dismissed=True))
    for _ in range(count - len(wanted)):
        _make_room(builder, role)


def _make_room(builder: DecisionBuilder, role: str) -> None:
    """Keeps a task that was to leave and does not know it yet; else takes a free index."""
    tasks = builder.state.of(role)
    stay = (task for task in tasks if task.dismissed and not (task.active and task.notified))
    kept = next(stay, None)
    if kept is None:
        _add(builder, Task(role, len(tasks)))
        return
    if not kept.active and kept.incarnation:
        if kept.connection is not None:  # it has left, and stays to learn how the job ends
            builder.close(kept.connection)
        reason = "its process has ended, and there is room for another one"
        kept = replace(kept, state="lost", reason=reason, since=builder.now, connection=None)
    builder.update_task(replace(kept, dismissed=False, notified=False))


def _add(builder: DecisionBuilder, task: Task) -> None:
    tasks = {**builder.state.tasks, task.name: replace(task, since=builder.now)}
    roles = ("ps", "worker")
    ordered = sorted(tasks.values(), key=lambda each: (roles.index(each.role), each.index))
    builder.state = replace(builder.state, tasks={each.name: each for each in ordered})


def _answer(state: State) -> Scaled:
    servers, workers = state.wanted("ps"), state.wanted("worker")
    awaited = [task.name for task in (*servers, *workers) if task.state in ("expected", "lost")]
    dismissed = [task.name for task in state.tasks.values() if task.dismissed and task.active]
    return Scaled(len(servers), len(workers), tuple(awaited), tuple(dismissed))


DEPARTURE = "a signal asks this worker to leave, and the job goes on without it"
"""The reason that a worker hears which leaves alone."""


def take_signal(builder: DecisionBuilder, task: Task, message: Signalled) -> None:
    """Notes that a signal asks a task to end; stops the job if it is one that stops it."""
    if not task.signal:
        builder.update_task(replace(task, signal=(message.signal, builder.now)))
        builder.add_reason(f"{task} is asked to end by {message.signal}")
    if message.stops or task.role == "ps" or not builder.state.policy.elastic:
        stop_job(builder, task.name, f"{message.signal} to {task.name}")


def answer_signals(builder: DecisionBuilder) -> None:
    """Has workers leave alone that were asked to end, or stops the job if all were."""
    state = builder.state
    workers = state.left_to_go_on("worker")
    asked = [(worker, *worker.signal) for worker in workers if worker.signal]
    if not asked or state.phase != "running" or state.stopping:
        return
    if len(asked) == len(workers):
        first, signal, _ = asked[0]
        who = first.name if len(asked) == 1 else f"all {len(asked)} workers"
        stop_job(builder, first.name, f"{signal} to {who}")
        return
    for worker, _, since in asked:
        if builder.now - since >= state.policy.settle and worker.connection is not None:
            builder.update_task(replace(worker, notified=True))
            builder.send(worker.connection, Dismissed(DEPARTURE))
            builder.add_reason(f"{worker} leaves alone")


def stop_job(builder: DecisionBuilder, task: str, reason: str) -> None:
    """Has the workers end at a step that is saved; ends a job at once that has not begun."""
    state = builder.state
    if state.over is not None or state.stopping:
        return
    builder.state = replace(state, stopping=reason)
    builder.add_reason(f"the job stops: {reason}")
    if state.phase == "forming":
        builder.end(JobOver("interrupted", task, f"{reason}, before the job had begun"))
        return
    for worker in state.of("worker"):
        if worker.active and worker.connection is not None:
            builder.send(worker.connection, Interrupted(reason))
