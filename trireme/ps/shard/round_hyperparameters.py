"""The hyper-parameters of synchronous rounds, which all workers of a round should state alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trireme.ps.messages import GroupSpec, Push
from trireme.ps.shard.dedup import Pending
from trireme.ps.shard.participants import Participant

__all__ = ["RoundHyperparameters"]

_Settings = tuple[Mapping[str, object], ...]
"""Hyper-parameters by name, group by group."""


class RoundHyperparameters:
    """What the hyper-parameters of the rounds are.

    Args:
        groups: the optimizer's, before the first round.

    Attributes:
        notice: what the answers of the last round say of workers that disagree; else empty.
        disagreements: in how many rounds workers have disagreed.
    """

    def __init__(self, groups: Sequence[GroupSpec] = ()) -> None:
        self.notice = ""
        self.disagreements = 0
        self._settled: _Settings = tuple(group.values for group in groups)  # in the last round

    def of(self, members: Sequence[Pending]) -> Sequence[GroupSpec] | None:
        """Returns the hyper-parameters of a round, where they have changed: its first worker's."""
        self.notice = ""
        first = next((each for each in members if each.push.hyper is not None), None)
        if first is None:
            return None
        before = self._settled
        self._settled = _settings_of(first.push, before)
        for other in members:
            settings = _settings_of(other.push, before)
            if settings != self._settled:
                self.disagreements += 1
                self.notice = _disagreement(first.owner, self._settled, other.owner, settings)
                break
        return first.push.hyper


def _settings_of(push: Push, before: _Settings) -> _Settings:
    """Returns the hyper-parameters of a push; those of the last round where they are unchanged."""
    return before if push.hyper is None else tuple(group.values for group in push.hyper)


def _disagreement(
    first: Participant, settings: _Settings, other: Participant, others: _Settings
) -> str:
    """Returns the first hyper-parameter that differs between two workers, in words."""
    name, mine, theirs = next(
        (name, group.get(name), another.get(name))
        for group, another in zip(settings, others, strict=True)
        for name in group
        if group.get(name) != another.get(name)
    )
    return (
        f"the workers of a round disagree about {name}: it is {mine} at worker:{first.worker} and "
        f"{theirs} at worker:{other.worker}, and the first counts. Whoever changes it must do so "
        "alike in every worker: let a session do it (scheduler=...), or go by global_step"
    )
