"""The settings of a run by name, for the tools that compare runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trireme.ps.optimizers import members

if TYPE_CHECKING:
    from trireme.session.session import Session


def run_settings(session: Session, examples: int) -> dict[str, Any]:
    """Returns the settings of a run by name: numbers, strings and booleans."""
    options, task = session.options, session.task
    group = session.optimizer.param_groups[0]
    settings: dict[str, Any] = {
        "model": type(session.model).__name__,
        "parameters": sum(p.numel() for p in session.model.parameters()),
        "optimizer": ", ".join(type(each).__name__ for each in members(session.optimizer)),
        **{name: value for name, value in group.items() if name != "params"},
        "strategy": task.config.training.strategy or str(options.strategy),
        "workers": task.workers,
        "servers": task.servers,
        "batch_size": examples,
        "max_steps": session.max_steps,
        "precision": options.precision,
        "accumulate": options.accumulate if options.accumulate > 1 else None,
        "clip_norm": options.clip_norm,
        "l2": options.l2 or None,
        "seed": options.seed,
    }
    return {  # those that are off would crowd out the chosen ones
        name: value if isinstance(value, (bool, str, int, float)) else str(value)
        for name, value in settings.items()
        if value is not None and value is not False
    }
