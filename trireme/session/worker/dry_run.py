"""The output of `--dry-run`: the layout over servers, and the bytes that a step would send."""

from __future__ import annotations

from trireme.cluster.placement import first_division
from trireme.cluster.spec import task_name
from trireme.printable import counted, size
from trireme.ps.optimizers import members
from trireme.session.model.training_setup import TrainingSetup


def end_if_dry_run(setup: TrainingSetup) -> None:
    """Prints the description and ends the program, where the launch requests a dry run.

    A graph is drawn later, when there is a batch: see `drawing_computation.py`.
    """
    if setup.settings.task.dry_run and setup.settings.task.draw is None:
        print(describe(setup))
        raise SystemExit(0)


def describe(setup: TrainingSetup) -> str:
    """Returns the layout, the strategy and the bytes of one step as readable lines."""
    layout, optimizer, settings = setup.flat.layout, setup.optimizer, setup.settings
    task, mesh, nbytes = settings.task, settings.mesh, size(layout.bytes)
    lines = [
        f"model: {layout.elements:,} parameters in {len(layout.spec.parameters)} tensors, {nbytes}",
        f"optimizer: {', '.join(type(each).__name__ for each in members(optimizer))}; "
        + ", ".join(f"group {i}: lr {g.get('lr')}" for i, g in enumerate(optimizer.param_groups)),
        f"strategy: {settings.strategy}",
    ]
    if task.servers == 0:
        held = f"each of {mesh.size} processes holds everything; a step averages {nbytes}"
        if mesh.size == 1:
            held = "one process holds everything; a step sends nothing"
        elif settings.placed:
            held = f"operations are placed on {mesh.graph} tasks: `trireme graph` shows where"
        elif mesh.sharded:
            held = f"the model is split over {mesh.size} processes, by the mesh {mesh}"
        return "\n".join([*lines, f"layout: {held}"])
    lines.append(f"layout: {layout.spec.slots} slots over {counted(task.servers, 'server')}")
    one_host = dict.fromkeys(range(task.servers), "")
    for shard in first_division(one_host, layout.spec.slots, task.config.tasks.replicas):
        held = size(sum(part.bytes for part in layout.parts(shard.primary)))
        copies = ", ".join(task_name("ps", server) for server in shard.backups)
        lines.append(
            f"  ps:{shard.primary}  slots {shard.start}-{shard.stop - 1}  {held}"
            + (f"; a copy on {copies}" if copies else "")
        )
    when = "a step" if settings.rule.every is None else f"every {settings.rule.every} steps"
    lines.append(
        f"{when}: each of {counted(task.workers, 'worker')} pushes {nbytes} and pulls {nbytes}"
    )
    return "\n".join(lines)
