"""The output of `--dry-run`: the layout over servers, and the bytes that a step would send."""

from __future__ import annotations

from trireme.cluster.placement import first_division
from trireme.cluster.spec import task_name
from trireme.cluster.view import ShardEntry
from trireme.monitor.numbers import size
from trireme.ps.joint_optimizer import members
from trireme.ps.rule import Rule
from trireme.session.model.training_setup import TrainingSetup
from trireme.session.settings import Settings


def end_if_dry_run(setup: TrainingSetup) -> None:
    """Prints the description and ends the program, where the launch requests a dry run.

    A graph is drawn later, when there is a batch: see `drawing_computation.py`.
    """
    if setup.settings.task.dry_run and setup.settings.task.draw is None:
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
        f"rule: {_steps(rule, setup.settings)}",
    ]
    if task.servers == 0:
        return "\n".join([*lines, f"layout: {_held(setup)}"])
    servers = "1 server" if task.servers == 1 else f"{task.servers} servers"
    lines.append(f"layout: {layout.spec.slots} slots over {servers}")
    one_host = dict.fromkeys(range(task.servers), "")
    for shard in first_division(one_host, layout.spec.slots, task.config.tasks.replicas):
        held = sum(part.bytes for part in layout.parts(shard.primary))
        lines.append(
            f"  ps:{shard.primary}  slots {shard.start}-{shard.stop - 1}  {size(held)}"
            f"{_copies(shard)}"
        )
    if task.config.tasks.replicas > 1:
        lines.append("  (on several hosts, the copies of a shard are on different ones)")
    when = "a step" if rule.every is None else f"every {rule.every} steps"
    lines.append(
        f"{when}: each worker pushes {size(layout.bytes)} and pulls {size(layout.bytes)}; "
        f"{task.workers} workers"
    )
    return "\n".join(lines)


def _copies(shard: ShardEntry) -> str:
    """Returns which servers hold copies of a shard, besides its primary."""
    names = ", ".join(task_name("ps", server) for server in shard.backups)
    return f"; a copy on {names}" if names else ""


def _held(setup: TrainingSetup) -> str:
    """Returns what each process holds, and sends in a step, where there are no servers."""
    mesh, gradients = setup.settings.mesh, size(setup.flat.layout.bytes)
    if mesh.size == 1:
        return "one process holds everything; a step sends nothing"
    if setup.settings.placed:
        return f"operations are placed on {mesh.graph} tasks: `trireme graph` shows where"
    if mesh.sharded:
        return f"the model is split over {mesh.size} processes, by the mesh {mesh}"
    return f"each process holds everything; a step averages {gradients} of gradients"


def _steps(rule: Rule, settings: Settings) -> str:
    task, mesh = settings.task, settings.mesh
    if task.servers == 0:
        if mesh.size == 1:
            return "one worker, each update is a step"
        batches = "a batch" if mesh.replicas == 1 else f"{mesh.replicas} batches"
        return f"{mesh.size} processes make each step together, from {batches}"
    local = f"each worker trains locally for {rule.every} steps, then " if rule.every else ""
    if rule.synchronous:
        return f"{local}synchronous rounds of {rule.aggregate or 'all'} of {task.workers} workers"
    if rule.staleness is None:
        return "each update is a step, applied when it arrives"
    update = f"{local}pushes a delta" if local else "each update is a step"
    ahead = f"{rule.staleness} exchanges" if local else str(rule.staleness)
    return f"{update}; no worker is more than {ahead} ahead of the slowest"
