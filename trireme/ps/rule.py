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
    clip_norm: float | None = None
    average: Average | None = None
    max_steps: int | None = None
    codec: str = "none"
    every: int | None = None

    @property
    def period(self) -> int:
        """How many steps of its worker a push is of, at most."""
        return 1 if self.every is None else self.every

    def steps_from(self, step: int) -> int:
        """Returns how many local steps a worker makes from a global step to its next exchange.

        Synchronous periods end at multiples of `every`, so that a resumed job, or a worker that
        joins later, has the same periods. No period goes beyond the end of the job.
        """
        length = self.period - (step % self.period if self.synchronous else 0)
        return length if self.max_steps is None else max(1, min(length, self.max_steps - step))

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
        clips = self.clip_norm is not None
        decay = 0.0 if self.average is None else self.average.decay
        for name, fine, wanted in (
            ("aggregate", self.aggregate >= 0, "0 or more"),
            ("staleness", (self.staleness or 0) >= 0, "0 or more pushes"),
            ("aggregate", self.synchronous or self.aggregate == 1, "1 unless staleness is 0"),
            ("clip_norm", not clips or (self.clip_norm or 0) > 0, "above 0"),
            ("clip_norm", not clips or self.every is None, "left out: each worker clips its own"),
            ("average", 0 <= decay < 1, "of a decay in [0, 1)"),
            ("every", self.period >= 1, "1 step or more"),
            ("max_steps", (self.max_steps or 0) >= 0, "0 or more"),
        ):
            if not fine:
                raise ConfigurationError(f"{name} is {getattr(self, name)}: it must be {wanted}")
        if self.codec != "none":
            PACKING.load("codecs").check(self.codec)
