"""Resolves the settings of the launch and of the program: strategy, mesh, rule and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import msgspec
import torch

from trireme.launch.environment.detect import TaskConfig
from trireme.mesh import Mesh
from trireme.parallel.config import PartConfig
from trireme.ps.messages import GroupSpec, OptimizerSpec
from trireme.ps.rule import Rule
from trireme.session.options import Options
from trireme.strategies import SSP, Async, Collective, Strategy, choose

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
    "with_profile",
]

OptimizerFactory = Callable[[Any], torch.optim.Optimizer]
"""Builds an optimizer from parameters."""

Optimizers: TypeAlias = (
    OptimizerFactory
    | torch.optim.Optimizer
    | Sequence[torch.optim.Optimizer]
    | Mapping[str, OptimizerFactory | torch.optim.Optimizer]
)
"""The optimizer of a program, or several optimizers: see `Session`."""


def strategy_of(task: TaskConfig, options: Options) -> Strategy:
    """Returns the strategy of the launch, else of the program, else the cluster's default.

    Raises:
        ConfigurationError: the name is unknown, or the strategy cannot run on this cluster.
    """
    return choose(task.config, options.strategy, workers=task.workers, servers=task.servers)


def mesh_of(task: TaskConfig, options: Options) -> Mesh:
    """Returns the degrees of parallelism of the processes that hold one model together.

    Raises:
        ConfigurationError: the degrees do not match the number of processes or the strategy.
    """
    inside = Mesh.parse(task.config.mesh)
    strategy = strategy_of(task, options)
    if isinstance(strategy, Collective):
        return strategy.mesh(inside, task.processes)
    inside.check_processes(task.processes)
    return inside


def part_of(task: TaskConfig, options: Options) -> PartConfig:
    """Returns how a model is split; settings of the launch precede those of the program."""
    pipeline = options.pipeline
    if task.config.schedule is not None:
        pipeline = replace(pipeline, schedule=task.config.schedule)
    if task.config.microbatches is not None:
        pipeline = replace(pipeline, microbatches=task.config.microbatches)
    return PartConfig(pipeline, options.tensor_plan)


def updates_per_step(task: TaskConfig, options: Options, rule: Rule) -> int:
    """Returns the number of batches in one global step."""
    updates = (rule.aggregate or task.workers) if task.servers and rule.synchronous else 1
    return updates * mesh_of(task, options).replicas


def prefetches(task: TaskConfig, options: Options) -> bool:
    """Returns whether workers compute the next gradient while a push is under way."""
    strategy = strategy_of(task, options)
    return task.servers > 0 and isinstance(strategy, Async | SSP) and strategy.prefetch


def overlaps(task: TaskConfig, options: Options) -> bool:
    """Returns whether gradients can be pushed while backward still computes others.

    They cannot where a worker changes or accumulates gradients before the push, or applies them
    itself. With prefetch there is no need to.
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
        task: the identity of this process.
        options: the session's options.
        optimizer: the user's optimizer; the servers' optimizer has the same groups.
    """
    outer = strategy_of(task, options).outer(task.workers) if task.servers else None
    if outer is None:
        return None
    return OptimizerSpec("SGD", tuple(GroupSpec(dict(outer)) for _ in optimizer.param_groups))


def rule_of(task: TaskConfig, options: Options, max_steps: int | None) -> Rule:
    """Returns the rule that every worker of the job registers at its servers.

    For a single worker without servers, each update is a step under every strategy.

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
        codec=task.config.compress if task.servers else "none",
    )
    rule.check()
    return rule


def with_profile(options: Options, task: TaskConfig) -> Options:
    """Returns the options, with a hook for the trace that the launch requests."""
    if task.config.profile is None:
        return options
    from trireme.session.observers.profile import Profile

    return replace(options, hooks=(*options.hooks, Profile(task.config.profile)))
