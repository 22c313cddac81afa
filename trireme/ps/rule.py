"""The one rule by which a shard turns pushes into steps. Every strategy is a preset of it."""

from __future__ import annotations

import msgspec

from trireme.errors import ConfigurationError
from trireme.ps.packing import PACKING


class Average(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An exponential moving average of the parameters, kept by the server.

    Attributes:
        decay: the weight of the old average at each step, in [0, 1).
        warm_up: use min(decay, (1 + n) / (10 + n)) at step n, so that early steps count
            (as `tf.train.ExponentialMovingAverage` does with `num_updates`).
    """

    decay: float
    warm_up: bool = True

    def decay_at(self, step: int) -> float:
        """Returns the decay for the update that makes the global step `step`."""
        return min(self.decay, (1 + step) / (10 + step)) if self.warm_up else self.decay


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a shard turns pushes into steps.

    A field that this version does not know is refused: to ignore it would be another rule.

    Attributes:
        aggregate: how many updates make a round; 0 means one of every live worker.
        staleness: 0: synchronous rounds, an update for a closed round is stale and dropped.
            K >= 1: each update is applied by itself, and the answer is withheld while its worker
            is more than K pushes ahead of the slowest live one. None: each update is applied by
            itself and answered at once.
        deterministic: add the updates of a round in the order of the workers, so that a run is
            bit-equal to its repeat.
        clip_norm: scale the mean gradient of a round down to this global L2 norm; None for no
            clipping. Only synchronous rounds clip on the server: elsewhere each worker can.
        average: keep an exponential moving average of the parameters.
        codec: what pushed gradients are packed with, by the name in `trireme.compression.codec`.
        max_steps: no update makes the global step larger than this; None for no end. Where deltas
            are applied one by one, the last of them may overshoot it by less than `every`.
        every: None: pushes are gradients, each of one step. H: workers train locally, and push
            deltas of at most H steps.
    """

    aggregate: int = 1
    staleness: int | None = None
    deterministic: bool = False
    clip_norm: float | None = None
    average: Average | None = None
    max_steps: int | None = None
    codec: str = "none"
    every: int | None = None

    @property
    def period(self) -> int:
        """How many steps of its worker a push is of, at most."""
        return self.every or 1

    @property
    def synchronous(self) -> bool:
        """Whether updates are gathered in rounds, and those that come too late are dropped."""
        return self.staleness == 0

    @property
    def deflates(self) -> bool:
        """Whether packed pushes are deflated: deltas in int8, which are rare enough for it."""
        return self.every is not None and self.codec == "int8"

    def check(self) -> None:
        """Checks that the values make sense together.

        Raises:
            ConfigurationError: names the value and what it may be.
        """
        if self.aggregate < 0:
            raise ConfigurationError(
                f"aggregate is {self.aggregate}: give the number of updates that make a round, "
                "or 0 for one of every live worker"
            )
        if self.staleness is not None and self.staleness < 0:
            raise ConfigurationError(
                f"staleness is {self.staleness}: it counts pushes, so 0 or more"
            )
        if not self.synchronous and self.aggregate != 1:
            raise ConfigurationError(
                f"aggregate is {self.aggregate} and staleness {self.staleness}: only synchronous "
                "rounds (staleness 0) gather several updates into one"
            )
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigurationError(f"clip_norm is {self.clip_norm}: it must be above 0")
        if self.average is not None and not 0 <= self.average.decay < 1:
            raise ConfigurationError(
                f"the moving average's decay is {self.average.decay}: it must be in [0, 1)"
            )
        if self.every is not None and self.every < 1:
            raise ConfigurationError(
                f"every is {self.every}: it counts a worker's steps between two exchanges, so 1 or "
                "more"
            )
        if self.every is not None and self.clip_norm is not None:
            raise ConfigurationError(
                f"clip_norm is {self.clip_norm} and every {self.every}: where workers train by "
                "themselves, each clips its own gradients, and servers clip no deltas"
            )
        if self.codec != "none":
            PACKING.load("codecs").check(self.codec)
        if self.max_steps is not None and self.max_steps < 0:
            raise ConfigurationError(f"max_steps is {self.max_steps}: it must be 0 or more")
