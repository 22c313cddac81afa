"""Strategies of distributed training: each is a frozen value, tested against one process."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from inspect import isabstract
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec

from trireme.errors import ConfigurationError, TriremeError
from trireme.job_config import OPTIONS, STRATEGIES, JobConfig
from trireme.mesh import Mesh
from trireme.plugins import Plugins
from trireme.ps.rule import Rule

_T = TypeVar("_T")


@dataclass(frozen=True)
class Strategy(ABC):
    """A strategy of distributed training: a frozen dataclass of its options.

    An option that the launch also has has the same name there. A strategy checks its options when
    it is created, and raises `ConfigurationError`.

    Attributes:
        name: the strategy's name for `--strategy`.
    """

    name: ClassVar[str]

    @abstractmethod
    def rule(self) -> Rule:
        """Returns the parameter server's rule for this strategy."""

    def check(self, *, workers: int, servers: int) -> None:
        """Checks that the strategy can run on a cluster; a `ConfigurationError` says why not."""
        if not servers and workers > 1:
            raise ConfigurationError(
                f"strategy {self.name} with {workers} workers needs a parameter server: add --ps "
                "1, or use --strategy allreduce"
            )
        aggregate = self.rule().aggregate
        if aggregate > workers:
            raise ConfigurationError(
                f"{self.name} with aggregate {aggregate} and {workers} workers: a round could "
                f"never fill; give at most --aggregate {workers}"
            )

    def mesh(self, inside: Mesh, processes: int) -> Mesh:
        """Returns the mesh of the processes that hold one model together."""
        inside.check_processes(processes)
        return inside

    def backend(self, mesh: Mesh) -> str:
        """Returns the backend by which processes hold one model together; "" for one process.

        It is the name of an entry point in the group `trireme.backends`.
        """
        if mesh.size == 1:
            return ""
        return "graph" if mesh.graph > 1 else "parallel"

    def outer(self, workers: int) -> Mapping[str, float | bool] | None:
        """Returns the servers' optimizer where workers push deltas, as arguments of SGD.

        None where workers push gradients, and servers run the user's optimizer. `workers` is the
        number of workers of the job.
        """
        return None

    def _at_least_one(self, *options: str) -> None:
        for option in options:
            value = getattr(self, option)
            if value is not None and value < 1:
                raise ConfigurationError(
                    f"{self.name} with {option} {value}: give 1 or more, or leave it out"
                )


@dataclass(frozen=True)
class Async(Strategy):
    """Each worker pushes its gradient and receives the newest values, without waiting for others.

    A gradient may be computed from values that other workers have changed since. With one worker
    it equals plain training. Source: Dean et al., Large Scale Distributed Deep Networks (NIPS
    2012), section 4.1, "Downpour SGD" with one step between pushes.

    Attributes:
        prefetch: whether a worker computes the next gradient while a push is under way, from the
            values of the previous push. Workers then do not wait for servers, and the staleness of
            each gradient grows by one of the worker's own updates.
    """

    name: ClassVar[str] = "async"
    prefetch: bool = False

    def rule(self) -> Rule:
        return Rule(aggregate=1, staleness=None)


@dataclass(frozen=True)
class SSP(Strategy):
    """As `Async`, but a worker waits while it is more than `staleness` pushes ahead of the slowest.

    Source: Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel Parameter
    Server (NIPS 2013), section 2.

    Attributes:
        staleness: the number of pushes that a worker may be ahead, at least 1.
        prefetch: see `Async`.
    """

    name: ClassVar[str] = "ssp"
    staleness: int = 3
    prefetch: bool = False

    def __post_init__(self) -> None:
        self._at_least_one("staleness")

    def rule(self) -> Rule:
        return Rule(aggregate=1, staleness=self.staleness)


@dataclass(frozen=True)
class Sync(Strategy):
    """The mean gradient of a round is applied as one update; then all receive the new values.

    With every worker in each round it equals one process that trains on all their batches
    together. With fewer, the others are backup workers: an update that arrives after its round has
    closed is stale; it is dropped and counted, and its examples are dealt again. Source: Chen et
    al., Revisiting Distributed Synchronous SGD (ICLR workshop 2016), section 3.2.

    Attributes:
        aggregate: the number of updates in a round; None for one from each live worker.
    """

    name: ClassVar[str] = "sync"
    aggregate: int | None = None

    def __post_init__(self) -> None:
        self._at_least_one("aggregate")

    def rule(self) -> Rule:
        return Rule(aggregate=self.aggregate or 0, staleness=0)


@dataclass(frozen=True, slots=True)
class BackendType:
    """A way to hold one model in several processes. Its module should import fast."""

    # the class, derived from `trireme.session.backends.together.Together`, as
    # `package.module:class`. It is imported when the model is assembled. That of the name `local`
    # is the backend of workers that push deltas
    open: str


BACKENDS = Plugins("trireme.backends", "backend", BackendType)  # by `Strategy.backend`


def strategy_class(name: str) -> type[Strategy]:
    """Returns the class of a strategy, by the name of its entry point."""
    found: Any = STRATEGIES.load(name)
    derived = isinstance(found, type) and issubclass(found, Strategy)
    whole = derived and "__dataclass_fields__" in vars(found) and not isabstract(found)
    if not whole or getattr(found, "name", "") != name:
        raise STRATEGIES.refused(
            name, f"is no frozen dataclass derived from Strategy, with rule() and name = {name!r}"
        )
    chosen: type[Strategy] = found
    return chosen


def resolve(name: str, config: JobConfig) -> Strategy:
    """Returns the strategy of a name, with the options of the launch, which it must have."""
    chosen = strategy_class(name)
    given: dict[str, Any] = {}
    for option in OPTIONS:
        value = config.value(option)
        if value == option.default:
            continue
        if option.field in chosen.__dataclass_fields__:
            given[option.field] = value
        elif option.group == "training" and option.field not in ("strategy", "compress"):
            having = option.help.partition(":")[0]
            also = ", also where the program chooses it" * (config.training.strategy is None)
            raise ConfigurationError(
                f"{option.name} is {value} ({config.origin(option.field)}), which {name} does not "
                f"have, only {having}: add --strategy {having.replace(', ', ' or ')}{also}, or "
                "leave it out"
            )
    return _asked(chosen, "its constructor", lambda: chosen(**given))


_LARGEST = sys.float_info.max
_Number = Annotated[float, msgspec.Meta(ge=0, le=_LARGEST)]


class _Outer(msgspec.Struct, forbid_unknown_fields=True):
    """The arguments of SGD that `Strategy.outer` may return."""

    lr: _Number
    momentum: _Number = 0.0
    dampening: Annotated[float, msgspec.Meta(ge=-_LARGEST, le=_LARGEST)] = 0.0
    weight_decay: _Number = 0.0
    nesterov: bool = False
    maximize: bool = False

    def __post_init__(self) -> None:
        if self.nesterov and (not self.momentum or self.dampening):
            raise ValueError("nesterov needs a momentum above 0, and no dampening")


def _refused(strategy: type[Strategy], why: str) -> ConfigurationError:
    """Returns the error that a strategy is wrong, which names its package where it is of one."""
    name = getattr(strategy, "name", "")
    if name in STRATEGIES and STRATEGIES.load(name) is strategy:
        return STRATEGIES.refused(name, why)
    return ConfigurationError(
        f"the strategy {name}, {strategy.__module__}.{strategy.__qualname__}, {why}; mend it"
    )


def _asked(strategy: type[Strategy], what: str, call: Callable[[], _T]) -> _T:
    try:
        return call()
    except TriremeError:
        raise
    except Exception as error:  # whatever another's code raises
        why = f"fails: {what} raised {type(error).__name__}: {error}"
        raise _refused(strategy, why) from error


def _check_answers(strategy: Strategy, workers: int) -> None:
    """Checks what a strategy, perhaps of another package, has servers do."""
    kind = type(strategy)
    rule = _asked(kind, "rule()", strategy.rule)
    outer = _asked(kind, "outer()", partial(strategy.outer, workers))
    try:
        msgspec.convert(msgspec.structs.asdict(rule), Rule).check()
        if outer is not None:
            msgspec.convert(outer, _Outer)
        if (outer is None) != (rule.every is None):
            raise ConfigurationError("a rule with `every` needs outer(), and only that")
    except (msgspec.ValidationError, TypeError, ConfigurationError) as error:
        raise _refused(kind, f"has the rule {rule} and, for deltas, {outer}: {error}") from error


def choose(
    config: JobConfig, own: str | Strategy = "auto", *, workers: int, servers: int
) -> Strategy:
    """Returns the strategy of the launch, else the program's `own`, else the cluster's default.

    Without servers, every process is a worker. A `ConfigurationError` says why a strategy cannot
    run on this cluster.
    """
    default = "async" if servers or workers == 1 else "allreduce"
    chosen = config.training.strategy or (default if own == "auto" else own)
    try:
        strategy = chosen if isinstance(chosen, Strategy) else resolve(chosen, config)
        _check_answers(strategy, workers)
        check = partial(strategy.check, workers=workers, servers=servers)
        _asked(type(strategy), "check()", check)
    except ConfigurationError as error:
        if config.training.strategy is None:
            raise
        raise ConfigurationError(f"{error} (strategy: {config.origin('strategy')})") from error
    return strategy
