"""The options of a session, as frozen values that are validated on creation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from trireme.errors import ConfigurationError, suggestion
from trireme.ps.rule import Average
from trireme.session.hooks import Hook
from trireme.strategies import Strategy, strategy_class

if TYPE_CHECKING:
    import torch


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
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None and not value > 0:
                raise ConfigurationError(f"Checkpoint({each.name}={value}): it must be above 0")


class OptionValues(TypedDict, total=False):
    """The keywords of `Session` that `Options` explains."""

    precision: Literal["float32", "bfloat16"]
    accumulate: int
    clip_norm: float | None
    ema: float | Average | None
    scheduler: Callable[[Any], Any] | torch.optim.lr_scheduler.LRScheduler | None
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
    pipeline: object
    graph: object
    tensor_plan: Mapping[str, str] | None
    weight: Callable[[Any, Any], Any] | None


@dataclass(frozen=True)
class Options:
    """The options of a session: the keywords of `trireme.Session`, which explains each.

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
    pipeline: object = None  # a `PipelineConfig` and a `GraphConfig`, checked by their plug-ins
    graph: object = None
    tensor_plan: Mapping[str, str] | None = None
    weight: Callable[[Any, Any], Any] | None = None

    def __post_init__(self) -> None:
        given: Any = self  # whatever a program has given
        if isinstance(self.strategy, str) and self.strategy != "auto":
            strategy_class(self.strategy)
        check_whole("accumulate", self.accumulate)
        check_whole("log_every", self.log_every)
        check_whole("seed", self.seed, least=None)
        number, hooks, average = (int, float), given.hooks, given.ema_rule
        hooks_are = isinstance(hooks, Sequence) and all(isinstance(each, Hook) for each in hooks)
        limit, scheduler = given.clip_norm, given.scheduler
        built = hasattr(scheduler, "step") and hasattr(scheduler, "optimizer")
        decays = isinstance(average, Average) and 0 <= average.decay < 1
        a_strategy = "a name, such as 'sync', or a strategy, such as trireme.Sync()"
        a_scheduler = "a function that builds one from the optimizer, or a scheduler of torch.optim"
        a_checkpoint = "a Checkpoint, such as Checkpoint(every_steps=1000), or None"
        saves = isinstance(given.checkpoint, (Checkpoint, type(None)))
        for name, right, must in (
            ("precision", self.precision in ("float32", "bfloat16"), "float32 or bfloat16"),
            ("nan", self.nan in ("raise", "skip", "ignore"), "raise, skip or ignore"),
            ("strategy", isinstance(given.strategy, str | Strategy), a_strategy),
            ("l2", isinstance(given.l2, number) and given.l2 >= 0, "at least 0"),
            ("clip_norm", limit is None or (isinstance(limit, number) and limit > 0), "above 0"),
            ("hooks", hooks_are, "a list of objects of classes derived from trireme.Hook"),
            ("scheduler", scheduler is None or callable(scheduler) or built, a_scheduler),
            ("weight", given.weight is None or callable(given.weight), "a function"),
            ("ema", average is None or decays, "a decay in [0, 1), or an Average"),
            ("checkpoint", saves, a_checkpoint),
        ):
            if not right:
                raise ConfigurationError(f"{name}={getattr(self, name)!r}: it must be {must}")

    @property
    def ema_rule(self) -> Average | None:
        """The moving average as an `Average`; None for none."""
        return Average(self.ema) if isinstance(self.ema, (int, float)) else self.ema


def make_options(
    values: OptionValues, *, caller: str = "Session", without: Sequence[str] = ()
) -> Options:
    """Returns the options of the keywords of `caller`, which has no options `without`.

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


def check_whole(name: str, value: object, *, least: int | None = 1) -> int:
    """Returns a whole number of at least `least`, of NumPy's types too, as an `int`."""
    number = None if isinstance(value, bool) or not isinstance(value, Integral) else int(value)
    if number is None or (least is not None and number < least):
        bound = "" if least is None else f" from {least}"
        raise ConfigurationError(f"{name}={value!r}: it must be a whole number{bound}")
    return number
