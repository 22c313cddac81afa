"""Synchronous rounds: whose updates make a step, agreed by all servers.

A worker may die when its update has reached some servers and not others, and servers learn of a
new view at different times. So no server closes a round by itself, unless it is the only one.
Each of the others tells shard 0 whose updates it holds; as soon as those that everybody holds
suffice, shard 0 takes as many as make a round, first come, and tells the members. What a server
has said that it holds it keeps until the round is closed, whoever dies meanwhile. So every server
applies the same updates.

Where the mean gradient is clipped, each server also tells the squared norm of its part of the mean
of what it holds. If shard 0 settles on other members, it proposes them and asks once more.

All workers of a round should state its hyper-parameters alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from trireme.cluster.view import View
from trireme.ps.flat import PartBuffer
from trireme.ps.messages import GroupSpec, Push
from trireme.ps.row_messages import RowUpdates
from trireme.ps.rule import Rule
from trireme.ps.server_messages import RoundClose, RoundReady
from trireme.ps.shard.instructions import Send
from trireme.ps.shard.participants import Participant
from trireme.ps.shard.push_table import Pending
from trireme.ps.shard.values.gradient_sums import Total, squared_norm, total_of
from trireme.tables.spec import TableSpec

Live = Mapping[int, int]
"""The workers that still train, by index, with their incarnations."""


class Decision(msgspec.Struct, frozen=True):
    """The decision about a round: whose updates make it, and the factor for their mean."""

    members: tuple[Participant, ...]
    scale: float


@dataclass(slots=True)
class Round:
    """The round that makes global step `step + 1`, at one server.

    Attributes:
        step: the global step of the values that its gradients are computed from.
        spare: returns memory for a sum or a mean; called only when one is needed.
        tables: the sparse tables.
        pending: the updates that are here, by participant.
        written: the first worker whose update `compares`, and its digest of written values.
    """

    step: int
    spare: Callable[[], PartBuffer]
    tables: tuple[TableSpec, ...] = ()
    pending: dict[Participant, Pending] = field(default_factory=dict)
    written: tuple[int, int] | None = None
    _mean: tuple[tuple[Participant, ...], PartBuffer | None] = ((), None)

    def add(self, pending: Pending) -> None:
        """Takes an update."""
        self.pending[pending.owner] = pending
        if self.written is None and compares(pending.push):
            self.written = pending.owner.worker, pending.push.written

    def keep(self, member: Participant) -> None:
        """Copies an update whose worker is out, as the worker will write to its memory again."""
        self.pending[member] = self.pending[member].kept()
        self._mean = (), None  # it may be that very memory

    def held(self, live: Live) -> tuple[Participant, ...]:
        """Returns the participants whose updates are here and count, by worker."""
        return tuple(sorted([m for m in self.pending if live.get(m.worker) == m.incarnation]))

    def mean(self, members: tuple[Participant, ...]) -> PartBuffer | None:
        """Returns the weighted mean of the members' gradients; None if they weigh nothing.

        It stays as it is until the mean of others is asked for, or an `update`.
        """
        if self._mean[0] != members:
            total = self._total(members)
            self._mean = members, None if total is None else total.mean()
        return self._mean[1]

    def _total(
        self, members: tuple[Participant, ...], absent: tuple[int, ...] = ()
    ) -> Total | None:
        """Returns the sum of those of the members' gradients that weigh anything."""
        updates = [self.pending[member] for member in members]
        weighty = [update for update in updates if update.push.weight > 0]
        if not weighty:
            return None
        weights = [update.push.weight for update in weighty]
        return total_of(weights, [update.gradients for update in weighty], self.spare(), absent)

    def update(self, decision: Decision) -> Total | None:
        """Returns the update that a decision makes; None where it weighs nothing.

        The gradients are not written to. Means that were returned before may be overwritten.
        """
        absent = self.absent(decision.members)
        if decision.scale == 1.0 and self._mean[0] != decision.members:
            self._mean = (), None
            return self._total(decision.members, absent)
        mean = self.mean(decision.members)
        if mean is None or decision.scale == 1.0:
            return None if mean is None else Total(mean, absent=absent)
        scaled = self.spare()
        for source, target in zip(mean.vectors, scaled.vectors, strict=True):
            target.copy_(source).mul_(decision.scale)
        self._mean = (), None
        return Total(scaled, absent=absent)

    def rows(self, decision: Decision) -> tuple[RowUpdates, ...]:
        """Returns the mean updates of rows of tables that a decision makes."""
        return self._rows(decision.members, decision.scale)

    def _rows(self, members: tuple[Participant, ...], scale: float = 1.0) -> tuple[RowUpdates, ...]:
        if not self.tables:
            return ()
        from trireme.ps.rows import mean_of

        pushes = [self.pending[member].push for member in members]
        updates = [(push.weight, push.rows) for push in pushes if push.weight > 0]
        return mean_of(updates, self.tables, scale) if updates else ()

    def absent(self, members: tuple[Participant, ...]) -> tuple[int, ...]:
        """Returns the parameters of which none of the members' updates has a gradient.

        Updates of weight 0 are left out.
        """
        pushes = [self.pending[member].push for member in members]
        absent = [push.absent for push in pushes if push.weight > 0]
        if not absent or not all(absent):
            return ()
        return tuple(sorted(set(absent[0]).intersection(*absent[1:])))

    def square(self, members: tuple[Participant, ...]) -> float:
        """Returns the squared L2 norm of this server's part of the members' mean gradient."""
        mean = self.mean(members)
        total = 0.0 if mean is None else squared_norm(mean)
        if self.tables:
            from trireme.ps.rows import square

            total += square(self._rows(members), self.tables)
        return total


def compares(push: Push) -> bool:
    """Returns whether an update says what all workers of a round must have written."""
    return push.weight > 0 and push.sequence > 1


class RoundLeader:
    """Coordinates rounds at shard 0, which decides for all servers; alone, it asks nobody.

    Args:
        rule: when a round has enough updates, and how it is clipped.
        servers: how many there are.
    """

    def __init__(self, rule: Rule, servers: int) -> None:
        self._rule = rule
        self._servers = servers
        self._heard: dict[int, RoundReady] = {}
        self._proposed: tuple[Participant, ...] = ()
        self._told: RoundClose | None = None

    def begin(self) -> None:
        """Begins a new round."""
        self._heard.clear()
        self._proposed = ()

    def hear(self, step: int, server: int, message: RoundReady) -> list[Send]:
        """Takes what another server holds; repeats the last decision if it has missed that.

        Args:
            step: the step of the open round.
            server: the other server.
            message: its message.
        """
        if not 0 < server < self._servers:
            return []  # a job has no such server
        if message.step == step:
            self._heard[server] = message
        elif self._told is not None and message.step == self._told.step:
            return [Send(server, self._told)]
        return []

    def decide(self, current: Round, live: Live) -> tuple[list[Send], Decision | None]:
        """Returns messages to other servers, and the decision once there is one."""
        needed = _needed(self._rule, live)
        if not 0 < needed <= len(current.pending):  # mostly: one update of several has come
            return [], None
        common = self._common(current, live)
        if len(common) < needed:
            return [], None
        everywhere = set(common)
        came = [member for member in current.pending if member in everywhere]
        members = tuple(sorted(came[:needed]))  # those whose updates came here first
        if len(self._proposed) >= needed and everywhere.issuperset(self._proposed):
            members = self._proposed  # their norms are known already, or on their way
        if self._rule.clip_norm is None:
            return self._close(current, Decision(members, 1.0))
        squares = [m.square for _, m in sorted(self._heard.items()) if m.measured == members]
        if len(squares) < self._servers - 1:
            if self._proposed == members:
                return [], None
            self._proposed = members
            return self._tell(RoundClose(current.step, members, -1.0)), None
        square = current.square(members) + sum(squares)
        return self._close(current, Decision(members, clip_factor(square, self._rule.clip_norm)))

    def drop(self, current: Round, member: Participant) -> None:
        """Takes the update of a worker that is out from the round."""
        current.pending.pop(member, None)

    def missing(self, current: Round, live: Live, view: View) -> tuple[str, ...]:
        """Returns the tasks that the round waits for; the view knows where each shard is."""
        silent = (shard for shard in range(1, self._servers) if shard not in self._heard)
        return _absent(current, live) or tuple(map(view.primary_name, silent))

    def _common(self, current: Round, live: Live) -> tuple[Participant, ...]:
        """Returns the participants whose updates every server holds, once all have reported."""
        if len(self._heard) < self._servers - 1:
            return ()
        held = current.held(live)
        for message in self._heard.values():
            there = set(message.members)
            held = tuple(member for member in held if member in there)
        return held

    def _close(self, current: Round, decision: Decision) -> tuple[list[Send], Decision]:
        self._told = RoundClose(current.step, decision.members, decision.scale)
        return self._tell(self._told), decision

    def _tell(self, message: RoundClose) -> list[Send]:
        return [Send(server, message) for server in range(1, self._servers)]


class RoundFollower:
    """Coordinates rounds at any other server, which reports what it holds and follows shard 0.

    Its methods are those of `RoundLeader`.

    Args:
        rule: when a round has enough updates, and whether it is clipped.
    """

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._said: RoundReady | None = None
        self._proposed: tuple[Participant, ...] = ()
        self._decision: Decision | None = None

    def begin(self) -> None:
        self._said = self._decision = None
        self._proposed = ()

    def hear(self, step: int, message: RoundClose) -> None:
        """Takes what shard 0 has proposed or decided.

        Args:
            step: the step of the open round.
            message: its message.
        """
        if message.step != step:
            return
        members = tuple(Participant(*pair) for pair in message.members)
        if message.scale >= 0 or math.isnan(message.scale):
            self._decision = Decision(members, message.scale)
        else:
            self._proposed = members

    def decide(self, current: Round, live: Live) -> tuple[list[Send], Decision | None]:
        if self._decision is not None:
            return [], self._decision
        few = not 0 < _needed(self._rule, live) <= len(current.pending)
        if few and not self._proposed:
            return [], None  # mostly: to look at all for each that comes is quadratic
        held = current.held(live)
        if not self._proposed and not 0 < _needed(self._rule, live) <= len(held):
            return [], None
        measured = () if self._rule.clip_norm is None else self._proposed or held
        said = self._said
        if said is not None and (said.members, said.measured) == (held, measured):
            return [], None
        square = current.square(measured) if measured else 0.0
        self._said = RoundReady(current.step, held, measured, square)
        return [Send(0, self._said)], None

    def drop(self, current: Round, member: Participant) -> None:
        """As `RoundLeader.drop`, unless shard 0 counts on the update."""
        if self._said is not None and member in self._said.members:
            current.keep(member)
        else:
            current.pending.pop(member, None)

    def missing(self, current: Round, live: Live, view: View) -> tuple[str, ...]:
        return _absent(current, live) or (view.primary_name(0),)


def _needed(rule: Rule, live: Collection[int]) -> int:
    return min(rule.aggregate, len(live)) if rule.aggregate else len(live)


def _absent(current: Round, live: Live) -> tuple[str, ...]:
    return tuple(f"worker:{w}" for w, i in sorted(live.items()) if (w, i) not in current.pending)


def clip_factor(square: float, limit: float) -> float:
    """Returns what to multiply a gradient by so that its norm is at most `limit`.

    The same as `torch.nn.utils.clip_grad_norm_`.

    Args:
        square: the squared L2 norm of the whole gradient.
        limit: the largest norm wanted.
    """
    norm = math.sqrt(square) if square >= 0 else math.nan
    return min(1.0, limit / (norm + 1e-6)) if math.isfinite(norm) else math.nan


_Settings = tuple[Mapping[str, object], ...]
"""Hyper-parameters by name, group by group."""


class RoundHyperparameters:
    """What the hyper-parameters of the rounds are.

    Args:
        groups: the optimizer's, before the first round.

    Attributes:
        notice: what the answers of the last round say of workers that disagree; else empty.
        disagreements: in how many rounds workers have disagreed.
        settled: the hyper-parameters of the last round, by group.
    """

    def __init__(self, groups: Sequence[GroupSpec] = ()) -> None:
        self.notice = ""
        self.disagreements = 0
        self.settled: _Settings = tuple(group.values for group in groups)

    def of(self, members: Sequence[Pending]) -> Sequence[GroupSpec] | None:
        """Returns the hyper-parameters of a round, where they have changed: its first worker's.

        A worker without examples says nothing of them.
        """
        self.notice = ""
        members = [each for each in members if each.push.weight]
        first = next((each for each in members if each.push.hyper is not None), None)
        if first is None:
            return None
        before = self.settled
        self.settled = _settings_of(first.push, before)
        for other in members:
            settings = _settings_of(other.push, before)
            if settings != self.settled:
                self.disagreements += 1
                self.notice = _disagreement(first.owner, self.settled, other.owner, settings)
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
