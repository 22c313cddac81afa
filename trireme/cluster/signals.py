"""What a signal to a task means: the task leaves alone, or the whole job stops.

A signal to one worker, as of a host that is taken away, has that worker leave: the others go on,
and another process may take its place. The job stops, at a step that is saved, where

- a worker says so, after Ctrl-C, or the coordinator itself is asked to end,
- a parameter server is asked to end, whose values the workers have to save first,
- all workers are, or one of a job whose number of workers is fixed.

Signals to all tasks come one after the other. So a worker leaves only when `settle` seconds have
passed and the others were not asked too.
"""

from __future__ import annotations

from msgspec.structs import replace

from trireme.cluster.decision import DecisionBuilder
from trireme.cluster.messages import Dismissed, Interrupted, JobOver, Signalled
from trireme.cluster.state import Task

DEPARTURE = "a signal asks this worker to leave, and the job goes on without it"
"""The reason that a worker hears which leaves alone."""


def take_signal(builder: DecisionBuilder, task: Task, message: Signalled) -> None:
    """Notes that a signal asks a task to end; stops the job if it is one that stops it."""
    if not task.signal:
        builder.update_task(replace(task, signal=message.signal, signalled=builder.now))
        builder.add_reason(f"{task} is asked to end by {message.signal}")
    if message.stops or task.role == "ps" or not builder.state.policy.elastic:
        stop_job(builder, task.name, f"{message.signal} to {task.name}")


def answer_signals(builder: DecisionBuilder) -> None:
    """Has workers leave alone that were asked to end, or stops the job if all were."""
    state = builder.state
    workers = state.left_to_go_on("worker")
    asked = [worker for worker in workers if worker.signal]
    if not asked or state.phase != "running" or state.stopping:
        return
    if len(asked) == len(workers):
        who = asked[0].name if len(asked) == 1 else f"all {len(asked)} workers"
        stop_job(builder, asked[0].name, f"{asked[0].signal} to {who}")
        return
    for worker in asked:
        waited = builder.now - worker.signalled
        if waited >= state.policy.settle and worker.connection is not None:
            builder.update_task(replace(worker, told=True))
            builder.send(worker.connection, Dismissed(DEPARTURE))
            builder.add_reason(f"{worker} leaves alone")


def stop_job(builder: DecisionBuilder, task: str, reason: str) -> None:
    """Has the workers end at a step that is saved; ends the job at once if it has not begun.

    Args:
        builder: the decision.
        task: the name of the task that was asked to end.
        reason: why the job stops, in words.
    """
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
