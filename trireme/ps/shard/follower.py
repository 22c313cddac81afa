"""Follows the leader's decisions at one shard, and holds what they are about."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from trireme.ps.leader.decisions import Apply, Decided, Decision, Held, Measure, PushId
from trireme.ps.leader.leader import Live, Square
from trireme.ps.shard.participants import Participant
from trireme.ps.shard.push_table import Pending


class Follower:
    """What one shard holds, and the decisions that it has received and not carried out.

    What it has reported that it holds it keeps until the leader has decided about it, whoever is
    lost meanwhile; see `Held`.
    """

    def __init__(self) -> None:
        # the pushes that are not decided, by participant, in the order in which they came
        self.held: dict[Participant, Pending] = {}
        self.decided: deque[Decision] = deque()  # the decisions to carry out next, in their order
        self.proposed: tuple[PushId, ...] = ()  # the pushes that the leader wants measured
        self.known = 0  # how many decisions were received
        self.news = False  # whether there is something else to report
        self._leader_view = 0
        self._reported: set[PushId] = set()
        self._out: dict[PushId, int] = {}  # whose worker is out of the job, since which view

    # -- what it holds ---------------------------------------------------------------------------

    def hold(self, pending: Pending) -> None:
        self.held[pending.owner] = pending
        self.news = True

    def propose(self, pushes: tuple[PushId, ...]) -> None:
        self.proposed = pushes
        self.news = True

    def drop(self, pending: Pending, view: int, *, leads: bool) -> None:
        """Drops the push of a worker that is out since a view, unless the leader may apply it.

        Args:
            leads: whether the leader is at this shard: it drops the push too.
        """
        if leads or pending.id not in self._reported:
            self._forget(pending)
            return
        self._out[pending.id] = view
        self._forget_undecided()
        if pending.id in self._out:  # its worker may write to the memory again
            self.held[pending.owner] = pending.kept()

    def take(self, push: PushId) -> Pending:
        pending = self.held[Participant(*push[:2])]
        self._forget(pending)
        return pending

    def take_all(self) -> list[Pending]:
        taken = [pending for _, pending in sorted(self.held.items())]
        for pending in taken:
            self._forget(pending)
        return taken

    def _forget(self, pending: Pending) -> None:
        del self.held[pending.owner]
        self._reported.discard(pending.id)
        self._out.pop(pending.id, None)
        if pending.id in self.proposed:
            self.proposed = ()

    def _forget_undecided(self) -> None:
        """Drops pushes that the leader, which has taken their view, will never decide to apply."""
        out = [push for push, view in self._out.items() if view <= self._leader_view]
        if out:
            decided = {push for each in self.decided for push in _pushes_of(each)}
            for push in out:
                if push not in decided:
                    self.take(push)

    def counting(self, live: Live) -> tuple[PushId, ...]:
        """Returns the pushes of workers that still train, by worker."""
        return tuple(sorted(p.id for who, p in self.held.items() if live.get(who[0]) == who[1]))

    # -- the leader ------------------------------------------------------------------------------

    def hear(self, message: Decided) -> None:
        """Takes decisions of the leader at shard 0. A late or repeated message changes nothing.

        Neither does one with a gap before it, or about pushes that this shard does not hold: the
        leader decides only about what was reported to it.
        """
        new = message.decisions[max(self.known - message.first, 0) :]
        if message.first > self.known or not all(map(self._has, new)):
            return
        self.decided.extend(new)
        self.known += len(new)
        self._leader_view = max(self._leader_view, message.view)
        self._forget_undecided()

    def _has(self, decision: Decision) -> bool:
        if isinstance(decision, Apply) and not decision.pushes:
            return False
        held = {pending.id for pending in self.held.values()}
        return held.issuperset(_pushes_of(decision))

    def report(
        self,
        needed: int,
        live: Live,
        snapshots: Collection[tuple[int, int]],
        square: Square | None,
        additions: tuple[tuple[int, int], ...] = (),
    ) -> Held | None:
        """Returns what to report to the leader, if there is anything new that is of use to it.

        Args:
            snapshots: the requests for snapshots that are held: (worker, token).
            square: measures pushes that are held; None where nothing is clipped.
            additions: the requests to add parameters that are held: (worker, token).
        """
        wanted = bool(snapshots or additions or self.proposed)
        if not self.news or not (wanted or 0 < needed <= len(self.held)):
            return None
        counting = self.counting(live)
        if len(counting) < needed and not wanted:
            return None
        self.news = False
        pushes = tuple(pending.id for pending in self.held.values())
        self._reported.update(pushes)
        measured = () if square is None else self.proposed or counting
        norm = square(measured) if square is not None and measured else 0.0
        return Held(self.known, pushes, tuple(snapshots), measured, norm, additions)


def _pushes_of(decision: Decision) -> tuple[PushId, ...]:
    return decision.pushes if isinstance(decision, Apply | Measure) else ()
