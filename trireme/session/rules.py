"""From what the launch and the program say to the one rule of the parameter server."""

from __future__ import annotations

import msgspec

from trireme.errors import ConfigurationError
from trireme.launch.detect import TaskConfig
from trireme.ps.rule import Rule
from trireme.session.options import Options
from trireme.strategies import SSP, Async, Strategy, resolve

__all__ = ["overlaps", "prefetches", "rule_of", "strategy_of"]


def strategy_of(task: TaskConfig, options: Options) -> Strategy:
    """Returns the strategy: the launch's, else the program's, else the default of the cluster.

    Raises:
        ConfigurationError: the name is unknown, or the strategy cannot run on this cluster.
    """
    chosen: str | Strategy = task.strategy or options.strategy
    if isinstance(chosen, Strategy):
        strategy = chosen
    elif chosen == "auto":
        if task.workers > 1 and task.servers == 0:
            raise ConfigurationError(
                f"{task.workers} workers and no parameter server: all-reduce is not built yet; "
                "start at least one server (--ps 1)"
            )
        if task.aggregate is not None or task.staleness is not None:
            raise ConfigurationError("--aggregate and --staleness need --strategy sync or ssp")
        strategy = Async(task.prefetch)
    else:
        strategy = resolve(
            chosen, aggregate=task.aggregate, staleness=task.staleness, prefetch=task.prefetch
        )
    strategy.check(workers=task.workers, servers=task.servers)
    return strategy


def prefetches(task: TaskConfig, options: Options) -> bool:
    """Returns whether workers compute while a push is under way; a lone process has no need."""
    strategy = strategy_of(task, options)
    return task.servers > 0 and isinstance(strategy, Async | SSP) and strategy.prefetch


def overlaps(task: TaskConfig, options: Options) -> bool:
    """Returns whether backward's gradients are what is pushed, so that they may leave meanwhile.

    They are not where a worker changes them first, or adds up several; nor is there a need where
    it computes while its push is under way.
    """
    clips = options.clip_norm is not None and not rule_of(task, options, None).synchronous
    changed = clips or options.l2 or options.accumulate > 1
    return task.servers > 0 and not changed and not prefetches(task, options)


def rule_of(task: TaskConfig, options: Options, max_steps: int | None) -> Rule:
    """Returns the rule that every worker of the job shows its servers.

    Without servers one worker is alone: whatever the strategy, each update is a step.

    Raises:
        ConfigurationError: as `strategy_of`, or a value is out of range.
    """
    strategy = strategy_of(task, options)
    rule = strategy.rule() if task.servers else Rule()
    rule = msgspec.structs.replace(
        rule,
        deterministic=options.deterministic,
        clip_norm=options.clip_norm if rule.synchronous else None,
        average=options.ema_rule,
        max_steps=max_steps,
        codec=task.compress if task.servers else "none",
    )
    rule.check()
    return rule
