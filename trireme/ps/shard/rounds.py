"""The update that the pushes of a synchronous round make."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trireme.ps.extension import HeldExtension
from trireme.ps.extra import Extra
from trireme.ps.flat import PartBuffer
from trireme.ps.leader.decisions import PushId
from trireme.ps.shard.push_table import Pending
from trireme.ps.shard.values.gradient_sums import Total, squared_norm, total_of


class Mean:
    """The weighted mean of the updates of pushes: the last one is kept, to be asked for again.

    The gradients are not written to.

    Args:
        spare: returns memory for a sum or a mean; called only when one is needed.
    """

    def __init__(
        self, spare: Callable[[], PartBuffer], extension: HeldExtension | None = None
    ) -> None:
        self._spare = spare
        self._extension = extension
        self._kept: tuple[tuple[PushId, ...], PartBuffer | None] = ((), None)

    def forget(self) -> None:
        self._kept = (), None

    def update(self, members: Sequence[Pending], scale: float) -> Total | None:
        """Returns the mean gradient, multiplied by a factor; None where it weighs nothing."""
        absent = absent_in(members)
        if scale == 1.0 and self._kept[0] != _ids(members):
            return self._total(members, absent)
        mean = self._of(members)
        if mean is None or scale == 1.0:
            return None if mean is None else Total(mean, absent=absent)
        scaled = self._spare()
        for source, target in zip(mean.vectors, scaled.vectors, strict=True):
            target.copy_(source).mul_(scale)
        return Total(scaled, absent=absent)

    def extra(self, members: Sequence[Pending], scale: float = 1.0) -> Extra:
        """Returns the mean updates of extra values."""
        pushes = [pending.push for pending in members]
        updates = [(push.weight, push.extra) for push in pushes if push.weight > 0]
        if self._extension is None or not updates:
            return ()
        return self._extension.mean(updates, scale)

    def square(self, members: Sequence[Pending]) -> float:
        mean = self._of(members)
        total = 0.0 if mean is None else squared_norm(mean)
        if self._extension is not None:
            total += self._extension.square(self.extra(members))
        return total

    def _of(self, members: Sequence[Pending]) -> PartBuffer | None:
        if self._kept[0] != _ids(members):
            total = self._total(members)
            self._kept = _ids(members), None if total is None else total.mean()
        return self._kept[1]

    def _total(self, members: Sequence[Pending], absent: tuple[int, ...] = ()) -> Total | None:
        weighty = [update for update in members if update.push.weight > 0]
        if not weighty:
            return None
        weights = [update.push.weight for update in weighty]
        return total_of(weights, [update.gradients for update in weighty], self._spare(), absent)


def _ids(members: Sequence[Pending]) -> tuple[PushId, ...]:
    return tuple(pending.id for pending in members)


def absent_in(members: Sequence[Pending]) -> tuple[int, ...]:
    """Returns the parameters of which no update has a gradient, those of weight 0 left out."""
    absent = [pending.push.absent for pending in members if pending.push.weight > 0]
    if not absent or not all(absent):
        return ()
    return tuple(sorted(set(absent[0]).intersection(*absent[1:])))
