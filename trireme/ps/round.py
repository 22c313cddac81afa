"""One synchronous round: whose updates are in, and whether they suffice.

With one server, or when every live worker must contribute and nothing is clipped, each server
closes its rounds by itself: all see the same members. Otherwise server 0 decides. It announces the
members; where the mean gradient is clipped, each server answers with the squared norm of its part,
and server 0 announces the factor. So every server applies the same updates at the same scale.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from trireme.ps.push_table import Pending
from trireme.ps.rule import Rule

__all__ = ["Round", "clip_factor"]


@dataclass(slots=True)
class Round:
    """The round that makes global step `step + 1`.

    Attributes:
        step: the global step of the values that its gradients are computed from.
        pending: the contributions, by worker.
        members: whose contributions make the round, once that is decided.
        scale: what to multiply their mean by, once that is decided.
        squares: the squared norm of each server's part of the mean, at server 0 when clipping.
        announced: whether this server has told its own square.
    """

    step: int
    pending: dict[int, Pending] = field(default_factory=dict)
    members: tuple[int, ...] | None = None
    scale: float | None = None
    squares: dict[int, float] = field(default_factory=dict)
    announced: bool = False

    def enough(self, rule: Rule, live: Collection[int]) -> bool:
        """Returns whether the contributions of live workers suffice to close the round."""
        present = sum(1 for worker in self.pending if worker in live)
        needed = min(rule.aggregate, len(live)) if rule.aggregate else len(live)
        return present >= needed > 0

    def missing(self, live: Collection[int]) -> tuple[int, ...]:
        """Returns who could still contribute, by worker."""
        wanted = self.members if self.members is not None else live
        return tuple(worker for worker in sorted(wanted) if worker not in self.pending)

    def complete(self, live: Collection[int]) -> bool:
        """Returns whether each decided member has contributed here or has left the job."""
        return self.members is not None and all(
            worker in self.pending or worker not in live for worker in self.members
        )


def clip_factor(square: float, limit: float) -> float:
    """Returns what to multiply a gradient by so that its norm is at most `limit`.

    The same as `torch.nn.utils.clip_grad_norm_`.

    Args:
        square: the squared L2 norm of the whole gradient.
        limit: the largest norm wanted.
    """
    norm = math.sqrt(square) if square >= 0 else math.nan
    return min(1.0, limit / (norm + 1e-6)) if math.isfinite(norm) else math.nan
