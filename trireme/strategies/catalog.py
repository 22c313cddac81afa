"""The strategies by name, as the command line selects them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from trireme.errors import ConfigurationError
from trireme.job_config import OPTIONS, JobConfig
from trireme.strategies.base import Strategy
from trireme.strategies.collective import FSDP, AllReduce, PipelineParallel, TensorParallel
from trireme.strategies.parameter_server import SSP, Async, Averaging, DiLoCo, Sync
from trireme.suggestion import suggestion

__all__ = ["BUILT", "PLANNED", "choose", "resolve"]

_CLASSES: tuple[type[Strategy], ...] = (
    *(Async, SSP, Sync, Averaging, DiLoCo),
    *(AllReduce, FSDP, TensorParallel, PipelineParallel),
)
_OPTIONS = {each.name: {field.name for field in fields(each)} for each in _CLASSES}

BUILT = tuple(each.name for each in _CLASSES)
"""The names of the available strategies."""

PLANNED = ("graph",)
"""The names of strategies that are planned."""


def resolve(name: str, config: JobConfig) -> Strategy:
    """Returns the strategy of a name, with the options of the launch.

    Raises:
        ConfigurationError: the name is unknown or not built yet; or an option does not belong to
            the strategy, or has an invalid value.
    """
    if name in PLANNED:
        raise ConfigurationError(
            f"strategy {name!r} is not built yet: there are {', '.join(BUILT)}"
        )
    if name not in BUILT:
        raise ConfigurationError(
            f"unknown strategy {name!r}{suggestion(name, BUILT)}: there are {', '.join(BUILT)}"
        )
    chosen = _CLASSES[BUILT.index(name)]
    given: dict[str, Any] = {}
    for option in OPTIONS:
        value, having = getattr(config, option.field), _having(option.field)
        if not having or value == option.default:
            continue
        if chosen.name not in having:
            raise ConfigurationError(
                f"{option.name} is {value} ({config.origin(option.field)}), which {name} does not "
                f"have, only {', '.join(having)}: add --strategy {having[0]}, or leave it out"
            )
        given[option.field] = value
    return chosen(**given)


def _having(field: str) -> list[str]:
    """Returns the names of the strategies that have an option."""
    return [name for name, options in _OPTIONS.items() if field in options]


def choose(
    config: JobConfig, own: str | Strategy = "auto", *, workers: int, servers: int
) -> Strategy:
    """Returns the strategy of the launch, else of the program, else the cluster's default.

    Args:
        config: the configuration of the launch.
        own: the strategy of the program; `auto` takes that of the launch.
        workers: the number of workers; without servers, every process is a worker.
        servers: the number of parameter servers.

    Raises:
        ConfigurationError: there is no such strategy, an option is invalid for it, or it cannot
            run on this cluster.
    """
    default = "async" if servers or workers == 1 else "allreduce"
    chosen = config.strategy or (default if own == "auto" else own)
    try:
        strategy = chosen if isinstance(chosen, Strategy) else resolve(chosen, config)
        strategy.check(workers=workers, servers=servers)
    except ConfigurationError as error:
        if config.strategy is None:
            raise
        raise ConfigurationError(f"{error} (strategy: {config.origin('strategy')})") from error
    return strategy
