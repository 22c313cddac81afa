"""From what the launch and the program say to the one rule of the parameter server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import msgspec
import torch

from trireme.cluster.mesh import Mesh
from trireme.errors import ConfigurationError
from trireme.launch.detect import TaskConfig
from trireme.parallel.config import PartConfig
from trireme.ps.messages import GroupSpec, OptimizerSpec
from trireme.ps.rule import Rule
from trireme.session.options import Options
from trireme.strategies import SSP, AllReduce, Async, Collective, Strategy, resolve

__all__ = [
    "OptimizerFactory",
    "Optimizers",
    "mesh_of",
    "outer_of",
    "overlaps",
    "part_of",
    "prefetches",
    "rule_of",
    "strategy_of",
    "updates_per_step",
]

OptimizerFactory = Callable[[Any], torch.optim.Optimizer]
"""Builds an optimizer from parameters."""

Optimizers: TypeAlias = (
    OptimizerFactory
    | torch.optim.Optimizer
    | Sequence[torch.optim.Optimizer]
    | Mapping[str, OptimizerFactory | torch.optim.Optimizer]
)
"""What a program gives as its optimizer, or its several ones: see `Session`."""


def strategy_of(task: TaskConfig, options: Options) -> Strategy:
    """Returns the strategy: the launch's, else the program's, else the default of the cluster.

    Raises:
        ConfigurationError: the name is unknown, or the strategy cannot run on this cluster.
    """
    chosen: str | Strategy = task.strategy or options.strategy
    if isinstance(chosen, Strategy):
        strategy = chosen
    elif chosen == "auto":
        if task.aggregate is not None or task.staleness is not None or task.every is not None:
            raise ConfigurationError("--aggregate, --staleness and --every need a --strategy")
        strategy = Async(task.prefetch) if task.servers or task.processes == 1 else AllReduce()
    else:
        strategy = resolve(
            chosen,
            aggregate=task.aggregate,
            staleness=task.staleness,
            every=task.every,
            prefetch=task.prefetch,
        )
    strategy.check(workers=task.workers, servers=task.servers)
    if task.processes > 1 and not task.servers and not isinstance(strategy, Collective):
        raise ConfigurationError(
            f"strategy {strategy.name} with {task.processes} processes needs a parameter server: "
            "add --ps 1, or use --strategy allreduce"
        )
    return strategy


def mesh_of(task: TaskConfig, options: Options) -> Mesh:
    """Returns the degrees of parallelism of the processes that hold one model together.

    Raises:
        ConfigurationError: they do not fit the processes, or the strategy.
    """
    inside = Mesh.parse(task.mesh)
    strategy = strategy_of(task, options)
    if isinstance(strategy, Collective):
        return strategy.mesh(inside, task.processes)
    inside.check_processes(task.processes)
    if task.servers:
        inside.check_inside()
    return inside


def part_of(task: TaskConfig, options: Options) -> PartConfig:
    """Returns how a model is cut; what the launch says counts before what the program does."""
    pipeline = options.pipeline
    if task.schedule is not None:
        pipeline = replace(pipeline, schedule=task.schedule)
    if task.microbatches is not None:
        pipeline = replace(pipeline, microbatches=task.microbatches)
    return PartConfig(pipeline, options.tensor_plan)


def updates_per_step(task: TaskConfig, options: Options, rule: Rule) -> int:
    """Returns how many batches make one global step."""
    if task.servers == 0:
        return mesh_of(task, options).replicas
    return (rule.aggregate or task.workers) if rule.synchronous else 1


def prefetches(task: TaskConfig, options: Options) -> bool:
    """Returns whether workers compute while a push is under way; a lone process has no need."""
    strategy = strategy_of(task, options)
    return task.servers > 0 and isinstance(strategy, Async | SSP) and strategy.prefetch


def overlaps(task: TaskConfig, options: Options) -> bool:
    """Returns whether backward's gradients are what is pushed, so that they may leave meanwhile.

    They are not where a worker changes them first, adds up several, or uses them itself; nor is
    there a need where it computes while its push is under way.
    """
    rule = rule_of(task, options, None)
    clips = options.clip_norm is not None and rule.clip_norm is None
    changed = clips or options.l2 or options.accumulate > 1 or rule.every is not None
    return task.servers > 0 and not changed and not prefetches(task, options)


def outer_of(
    task: TaskConfig, options: Options, optimizer: torch.optim.Optimizer
) -> OptimizerSpec | None:
    """Returns the servers' optimizer where workers push deltas; None where they push gradients.

    Args:
        task: who this is.
        options: the session's.
        optimizer: the user's, whose groups the servers' has too.
    """
    outer = strategy_of(task, options).outer(task.workers) if task.servers else None
    if outer is None:
        return None
    return OptimizerSpec("SGD", tuple(GroupSpec(dict(outer)) for _ in optimizer.param_groups))


def rule_of(task: TaskConfig, options: Options, max_steps: int | None) -> Rule:
    """Returns the rule that every worker of the job shows its servers.

    Without servers one worker is alone: whatever the strategy, each update is a step.

    Raises:
        ConfigurationError: as `strategy_of`, or a value is out of range.
    """
    strategy = strategy_of(task, options)
    alone = task.servers == 0 and task.processes == 1
    rule = Rule() if alone else strategy.rule()
    rule = msgspec.structs.replace(
        rule,
        deterministic=options.deterministic,
        clip_norm=options.clip_norm if rule.synchronous and rule.every is None else None,
        average=options.ema_rule,
        max_steps=max_steps,
        codec=task.compress if task.servers else "none",
    )
    rule.check()
    return rule
