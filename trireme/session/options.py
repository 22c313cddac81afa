"""The options of a session, as frozen values that are validated on creation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from trireme.errors import ConfigurationError, suggestion
from trireme.parallel.config import GraphConfig, PipelineConfig
from trireme.ps.rule import Average
from trireme.strategies import Strategy, check_name

if TYPE_CHECKING:
    import torch

    from trireme.session.hooks import Hook


@dataclass(frozen=True)
class Checkpoint:
    """When to write checkpoints and which to keep.

    Attributes:
        every_seconds: the seconds between two checkpoints; None for no limit by time.
        every_steps: the job saves when the global step reaches or passes a multiple of this number;
            None for no limit by steps. With neither, only the end of the run is saved. A
            synchronous job saves at exactly the multiples. In an asynchronous job the global step
            advances while the chief computes, so that it saves some steps later, such as at steps
            103 and 201 for 100: later by at most the updates that are made between two of the
            chief's. Workers that average save at the end of the period in which the multiple lies.
        keep: the number of newest checkpoints to keep. The newest undamaged one is always kept.
        keep_every_steps: also keep one checkpoint for each multiple of this number of steps.

    Raises:
        ConfigurationError: a value is out of range.
    """

    every_seconds: float | None = 600
    every_steps: int | None = None
    keep: int = 5
    keep_every_steps: int | None = None

    def __post_init__(self) -> None:
        for name in ("every_seconds", "every_steps", "keep", "keep_every_steps"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigurationError(f"Checkpoint({name}={value}): it must be above 0")


class OptionValues(TypedDict, total=False):
    """The keywords of `Session` that `Options` explains."""

    precision: Literal["float32", "bfloat16"]
    accumulate: int
    clip_norm: float | None
    ema: float | Average | None
    scheduler: (
        Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]
        | torch.optim.lr_scheduler.LRScheduler
        | None
    )
    l2: float
    seed: int
    deterministic: bool
    checkpoint: Checkpoint | None
    resume: str | Path
    hooks: Sequence[Hook]
    strategy: str | Strategy
    nan: Literal["raise", "skip", "ignore"]
    log_every: int
    device: str | torch.device | None
    pipeline: PipelineConfig
    graph: GraphConfig
    tensor_plan: Mapping[str, str] | None


@dataclass(frozen=True)
class Options:
    """The options of a session: how it trains its model.

    Attributes:
        precision (default "float32"): `bfloat16` computes forward and loss under autocast;
            parameters and updates keep their dtype.
        accumulate (default 1): the number of pieces in which each batch is computed, one after the
            other, to save memory; the update is the same.
        clip_norm (default None): the global L2 norm to which gradients are scaled down. Synchronous
            strategies clip the mean of the round, as one process would; others clip each push.
        ema (default None): the decay of an exponential moving average of the parameters, or an
            `Average`; `evaluate` uses the average. A number includes warm-up: min(decay, (1 + n) /
            (10 + n)).
        scheduler (default None): a learning-rate scheduler over the optimizer, or a function that
            builds one from it; it counts global steps.
        l2 (default 0.0): adds l2 / 2 times the sum of the squares of all trained parameters with
            two or more dimensions to the loss (not of biases). The displayed loss does not include
            it.
        seed (default 0): the seed of all randomness, including the order of the examples.
        deterministic (default False): whether a run is bit-equal to its repetition, and a resumed
            run to an uninterrupted one; for synchronous strategies, and for one worker. Pass a
            function that builds the model, or seed torch before building it: the session cannot
            seed the initial values of an existing module.
        checkpoint (default Checkpoint()): when to save and which checkpoints to keep; None never
            saves.
        resume (default "auto"): `auto` continues from the newest undamaged checkpoint of the run
            directory, if there is one; `never` refuses a run directory with checkpoints; a path
            names a checkpoint.
        hooks (default ()): the hooks; see `trireme.session.hooks`.
        strategy (default "auto"): the strategy; `auto` takes that of the launch.
        nan (default "raise"): the policy for a NaN or infinite loss: `raise` fails the job, `skip`
            leaves the update out and counts it, `ignore` does not check.
        log_every (default 100): the number of a worker's steps between two lines of progress, and
            of the chief's steps between two records of the metrics.
        device (default None): the device of the model; None leaves it where it is, or, where
            several processes compute together, takes a GPU for each process.
        pipeline (default PipelineConfig()): the configuration of the pipeline, where there is one.
        graph (default GraphConfig()): the placement of the model as a dataflow graph, under the
            strategy `graph`.
        tensor_plan (default None): under tensor parallelism, pattern of a module's name ->
            `column`, `row` or `gathered`; None derives a plan for transformer blocks and chains of
            linear layers.

    Raises:
        ConfigurationError: a value is out of range.
    """

    precision: Literal["float32", "bfloat16"] = "float32"
    accumulate: int = 1
    clip_norm: float | None = None
    ema: float | Average | None = None
    scheduler: Callable[[Any], Any] | torch.optim.lr_scheduler.LRScheduler | None = None
    l2: float = 0.0
    seed: int = 0
    deterministic: bool = False
    checkpoint: Checkpoint | None = Checkpoint()
    resume: str | Path = "auto"
    hooks: Sequence[Hook] = ()
    strategy: str | Strategy = "auto"
    nan: Literal["raise", "skip", "ignore"] = "raise"
    log_every: int = 100
    device: str | torch.device | None = None
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    graph: GraphConfig = field(default_factory=GraphConfig)
    tensor_plan: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        _one_of("precision", self.precision, ("float32", "bfloat16"))
        _one_of("nan", self.nan, ("raise", "skip", "ignore"))
        if isinstance(self.strategy, str) and self.strategy != "auto":
            check_name(self.strategy)
        if not isinstance(self.strategy, str | Strategy):
            raise ConfigurationError(
                f"strategy={self.strategy!r}: give a name, such as 'sync', or a strategy, such as "
                "trireme.Sync()"
            )
        check_whole("accumulate", self.accumulate)
        check_whole("log_every", self.log_every)
        check_whole("seed", self.seed, least=None)
        _above("l2", self.l2, 0, equal=True)
        if not _are_hooks(self.hooks):
            raise ConfigurationError(
                f"hooks={self.hooks!r}: give a list of hooks, such as [EarlyStopping(...)], each "
                "an object of a class derived from trireme.session.hooks.Hook"
            )
        built = hasattr(self.scheduler, "step") and hasattr(self.scheduler, "optimizer")
        if self.scheduler is not None and not callable(self.scheduler) and not built:
            raise ConfigurationError(
                f"scheduler={self.scheduler!r}: give a function that builds one from the "
                "optimizer, such as lambda optimizer: ExponentialLR(optimizer, 0.99), or a "
                "scheduler of torch.optim.lr_scheduler over the session's optimizer"
            )
        if self.clip_norm is not None:
            _above("clip_norm", self.clip_norm, 0)
        if not isinstance(self.ema, (int, float, Average, type(None))):
            raise ConfigurationError(f"ema={self.ema!r}: give a decay in [0, 1), or an Average")
        if not isinstance(self.checkpoint, (Checkpoint, type(None))):
            raise ConfigurationError(
                f"checkpoint={self.checkpoint!r}: give a Checkpoint, such as "
                "Checkpoint(every_steps=1000), or None for no checkpoints"
            )
        if self.ema is not None and not 0 <= self.ema_rule.decay < 1:  # type: ignore[union-attr]
            raise ConfigurationError(f"ema={self.ema}: the decay must be in [0, 1)")

    @property
    def ema_rule(self) -> Average | None:
        """The moving average as an `Average`; None for none."""
        return Average(self.ema) if isinstance(self.ema, (int, float)) else self.ema


def make_options(
    values: OptionValues, *, caller: str = "Session", without: Sequence[str] = ()
) -> Options:
    """Returns the options of a session's keywords.

    Args:
        values: the keywords.
        caller: what has been called with them, for messages.
        without: the options that it does not have.

    Raises:
        ConfigurationError: there is no option of that name, with a suggestion; or a value is out
            of range.
    """
    own = [field.name for field in fields(Options) if field.name not in without]
    known = [*["metrics"] * (caller == "Session"), "run_dir", "max_steps", *own]
    for name in values:
        if name not in own:
            raise ConfigurationError(
                f"{caller} has no option {name!r}{suggestion(name, known)}: it has "
                f"{', '.join(known)}"
            )
    return Options(**values)


def _one_of(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ConfigurationError(f"{name}={value!r}: it must be one of {', '.join(allowed)}")


def _are_hooks(hooks: object) -> bool:
    """Returns whether all are hooks, checked by attribute: importing `Hook` would be circular."""
    return isinstance(hooks, Sequence) and all(hasattr(hook, "before_step") for hook in hooks)


def check_whole(name: str, value: object, *, least: int | None = 1) -> int:
    """Returns a whole number, of NumPy's types too, as an `int`.

    Raises:
        ConfigurationError: it is no whole number, or is below `least`.
    """
    number = None if isinstance(value, bool) or not isinstance(value, Integral) else int(value)
    if number is None or (least is not None and number < least):
        bound = "" if least is None else f" from {least}"
        raise ConfigurationError(f"{name}={value!r}: it must be a whole number{bound}")
    return number


def _above(name: str, value: object, bound: float, *, equal: bool = False) -> None:
    if not isinstance(value, (int, float)) or not (value >= bound if equal else value > bound):
        how = "at least" if equal else "above"
        raise ConfigurationError(f"{name}={value!r}: it must be {how} {bound}")
