"""The output of `--dry-run`: the layout over servers, and the bytes that a step would send."""

from __future__ import annotations

from trireme.launch.config.task_config import TaskConfig
from trireme.monitor.numbers import size
from trireme.ps.joint_optimizer import members
from trireme.ps.rule import Rule
from trireme.session.training_setup import TrainingSetup

__all__ = ["describe", "end_if_dry_run"]


def end_if_dry_run(setup: TrainingSetup) -> None:
    """Prints the description and ends the program, where the launch requests a dry run.

    Raises:
        SystemExit: with status 0, for a dry run.
    """
    if setup.settings.task.dry_run:
        print(describe(setup))
        raise SystemExit(0)


def describe(setup: TrainingSetup) -> str:
    """Returns the layout, the rule and the bytes of one step as readable lines."""
    layout, optimizer = setup.flat.layout, setup.optimizer
    task, rule = setup.settings.task, setup.settings.rule
    lines = [
        f"model: {layout.elements:,} parameters in {len(layout.spec.parameters)} tensors, "
        f"{size(layout.bytes)}",
        f"optimizer: {', '.join(type(each).__name__ for each in members(optimizer))}; "
        + ", ".join(f"group {i}: lr {g.get('lr')}" for i, g in enumerate(optimizer.param_groups)),
        f"rule: {_steps(rule, task)}{'; servers do not commit updates' * rule.uncommitted}",
    ]
    if task.servers == 0:
        lines.append("layout: one process holds everything; a step sends nothing")
        return "\n".join(lines)
    lines.append(f"layout: {layout.spec.slots} slots over {task.servers} servers")
    for server in range(task.servers):
        slots = layout.slots_of(server)
        held = sum(part.bytes for part in layout.parts(server))
        lines.append(f"  ps:{server}  slots {slots.start}-{slots.stop - 1}  {size(held)}")
    when = "a step" if rule.every is None else f"every {rule.every} steps"
    lines.append(
        f"{when}: each worker pushes {size(layout.bytes)} and pulls {size(layout.bytes)}; "
        f"{task.workers} workers"
    )
    return "\n".join(lines)


def _steps(rule: Rule, task: TaskConfig) -> str:
    if task.servers == 0:
        return "one worker, each update is a step"
    if rule.every is not None and not rule.synchronous:
        return (
            f"each worker trains locally for {rule.every} steps, then pushes a delta;"
            f" no worker is more than {rule.staleness} exchanges ahead of the slowest"
        )
    if rule.every is not None:
        return (
            f"each worker trains locally for {rule.every} steps, then synchronous rounds of "
            f"{rule.aggregate or 'all'} of {task.workers} workers"
        )
    if rule.synchronous:
        return f"synchronous rounds of {rule.aggregate or 'all'} of {task.workers} workers"
    if rule.staleness is not None:
        return (
            f"each update is a step; no worker is more than {rule.staleness} ahead of the slowest"
        )
    return "each update is a step, applied when it arrives"
