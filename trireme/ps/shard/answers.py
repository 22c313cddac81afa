"""The answers of one shard: their contents, and until when they are withheld.

The answer to a push is withheld while its worker is too far ahead of the slowest worker, or while
updates under way decide whether the worker may compute another one. The answer to a pull is
withheld until the values are of the step that it asks for. From time to time a worker whose answer
is withheld gets a notice with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import torch

from trireme.ps.messages import (
    Duplicate,
    Pull,
    PullReply,
    PushReply,
    RejectedVerdict,
    Stopping,
    Verdict,
    Waiting,
)
from trireme.ps.shard.instructions import Reply
from trireme.ps.shard.participants import Participant
from trireme.ps.shard.push_table import Pending
from trireme.ps.shard.state import ShardState

_ONLOOKERS = 64
"""The most tasks that are not workers and wait for the end of a job."""


class PushAnswer(msgspec.Struct, frozen=True):
    """The answer to a push, without what is only known when it is sent."""

    pending: Pending
    verdict: Verdict
    staleness: int


@dataclass(frozen=True, slots=True)
class Wait:
    """A worker whose answer is withheld, and the notice that it gets from time to time."""

    worker: int
    notice: Waiting


class _WithheldPull(msgspec.Struct, frozen=True):
    """A pull that is not answered yet, with its participant, its route and its time."""

    owner: Participant
    route: object
    pull: Pull
    since: float


class Answers:
    """Gives and withholds the answers of one shard to pushes, pulls and `Drain`."""

    def __init__(self, state: ShardState) -> None:
        self.notice = ""  # the notice that answers to pushes carry; empty as a rule
        self.due: list[PushAnswer] = []  # the answers that go out when the event under way is over
        # the answers to pushes that are decided, by worker
        self.withheld: dict[int, PushAnswer] = {}
        self._state = state
        self._pulls: list[_WithheldPull] = []
        self._drains: dict[int, tuple[object, float]] = {}  # by worker, and since when

    def give(self, answer: PushAnswer) -> list[Reply]:
        """Answers a push at once, or withholds the answer if this worker or another must wait."""
        worker = answer.pending.owner.worker
        if not self.withheld and self._may_go_on(worker, self._highest_clock()):
            return [self.reply(answer)]
        self.withheld[worker] = answer
        return []

    def repeat(self, pending: Pending) -> list[Reply]:
        """Answers a push that was decided before with its first verdict.

        The answer is withheld where its worker is too far ahead, or where it is not decided whether
        the worker goes on: then none was given before the shards were divided anew.
        """
        worker, sequence, state = pending.owner.worker, pending.push.sequence, self._state
        state.counters["duplicate"] += 1
        withheld = self.withheld.get(worker)
        if withheld is not None and withheld.pending.push.sequence == sequence:
            withheld.pending.route = pending.route
            return []
        original = state.table.records[worker].verdicts.get(sequence)
        if original is None:
            reason = f"push {sequence} was decided, and the worker said it knew how"
            rejected = PushReply(RejectedVerdict(reason), state.step, 0, False)
            return [Reply(pending.route, rejected)]
        answer = PushAnswer(pending, Duplicate(original), 0)
        if state.synchronous or self._may_go_on(worker, self._highest_clock()):
            return [self.reply(answer)]
        self.withheld[worker] = answer
        return []

    def pull(self, now: float, route: object, who: Participant, pull: Pull) -> list[Reply]:
        """Answers a pull, now or when the values are of the step that it asks for.

        A worker waits for one answer at a time: it has given up its pulls before this one. Neither
        does it compute an update that it was let begin: where the shards were divided anew before
        it had the values of all, it pulls again, and others must not wait for that update.
        """
        if pull.train and (leader := self._state.leader) is not None:
            leader.ending.done(who.worker)
        if self._pulls:
            self._pulls = [each for each in self._pulls if each.owner.worker != who.worker]
        self._pulls.append(_WithheldPull(who, route, pull, now))
        return self.proceed()

    def drain(self, now: float, route: object, who: Participant) -> bool:
        """Has a task wait until no worker trains any more; returns False if too many wait.

        A worker that asks again has given up its wait before, and waits since then.
        """
        _, since = self._drains.get(who.worker, (None, now))
        many = 2 * len(self._state.participants.incarnations) + _ONLOOKERS
        if who.worker not in self._drains and len(self._drains) > many:
            return False
        self._drains[who.worker] = route, since
        return True

    def take_fenced_pulls(self) -> list[object]:
        """Drops the pulls that a new view fences off; returns their routes.

        These are the pulls of workers that are out; before values are loaded all pulls, as the
        chief may be another worker now.
        """
        state = self._state
        holds = state.participants.holds
        fenced = [each for each in self._pulls if not (state.loaded and holds(each.owner))]
        self._pulls = [each for each in self._pulls if each not in fenced]
        return [each.route for each in fenced]

    def take_pulls(self) -> list[object]:
        """Drops all pulls; returns their routes."""
        pulls, self._pulls = self._pulls, []
        return [each.route for each in pulls]

    def take_drains(self) -> list[object]:
        """Drops all who wait for the end; returns their routes."""
        drains, self._drains = self._drains, {}
        return [route for route, _ in drains.values()]

    def proceed(self) -> list[Reply]:
        """Gives all answers that can go out now."""
        out: list[Reply] = []
        if self.due:
            due, self.due = self.due, []
            out += map(self.reply, due)
        if self.withheld:
            highest = self._highest_clock()
            for worker in tuple(self.withheld):
                if self._may_go_on(worker, highest):  # one that is answered may keep another
                    out.append(self.reply(self.withheld.pop(worker)))
        if self._pulls:
            out += self._answer_pulls()
        if self._drains and not self._state.participants.live:
            drains, self._drains = self._drains, {}
            out += [Reply(route, Stopping(self._state.step)) for route, _ in drains.values()]
        return out

    def reply(self, answer: PushAnswer) -> Reply:
        """Returns the answer to a push as it is sent now."""
        state, push = self._state, answer.pending.push
        stop = self._is_last(answer.pending.owner.worker)
        payload: Sequence[torch.Tensor] = ()
        if push.pull:
            assert state.values is not None
            payload = state.values.buffer.vectors
        rows: tuple[bytes | None, ...] = ()
        if push.wanted and state.tables is not None and state.shows_rows:
            rows = state.tables.pull(push.wanted)
        message = PushReply(answer.verdict, state.step, answer.staleness, stop, self.notice, rows)
        return Reply(answer.pending.route, message, payload)

    def _highest_clock(self) -> float:
        """Returns how many pushes a worker may have made that is answered now."""
        state, bound = self._state, self._state.rule.staleness
        if bound is None or state.over:
            return math.inf
        return state.table.slowest(state.participants.live) + bound

    def _may_go_on(self, worker: int, highest: float) -> bool:
        """Returns whether a worker is not too far ahead, and it is decided whether it goes on."""
        state = self._state
        ahead = state.table.records[worker].clock > highest
        return not ahead and not self._undecided(worker)

    def _undecided(self, worker: int) -> bool:
        """Returns whether updates under way decide if a worker goes on, which shard 0 tells."""
        state, leader = self._state, self._state.leader
        return leader is not None and leader.ending.undecided(worker, state.step)

    def _is_last(self, worker: int) -> bool:
        """Returns whether a worker is to stop training, which shard 0 tells."""
        state, leader = self._state, self._state.leader
        return leader is not None and not leader.ending.grant(worker, state.step)

    def _answer_pulls(self) -> list[Reply]:
        """Answers the pulls for a step that is reached, if their workers need not wait."""
        state, out = self._state, list[Reply]()
        if not state.loaded or state.values is None:
            return out
        pulls, self._pulls = self._pulls, []
        for each in pulls:
            pull, worker = each.pull, each.owner.worker
            if state.step < pull.at_least or (pull.train and self._undecided(worker)):
                self._pulls.append(each)
                continue
            if pull.train:
                stop = self._is_last(worker)
            else:
                stop = state.leader is not None and state.leader.ending.reached(state.step)
            out.append(Reply(each.route, PullReply(state.step, stop), state.values.buffer.vectors))
        return out

    # -- notices ---------------------------------------------------------------------------------

    def waiting_pulls(self, now: float) -> Iterator[tuple[object, Wait]]:
        """Yields the pulls that are withheld: their routes, with the workers and the reasons."""
        state = self._state
        chief = state.participants.view.chief
        for each in self._pulls:
            at_least, names = each.pull.at_least, state.participants.training
            reason = f"step {at_least}" if state.step < at_least else "the last updates"
            if not state.loaded:
                reason = "its first values"
                names = () if chief is None else (f"worker:{chief}",)
            yield each.route, Wait(each.owner.worker, Waiting(reason, names, now - each.since))

    def waiting_pushes(self, now: float) -> Iterator[tuple[object, Wait]]:
        """Yields the pushes whose answers are withheld: as `waiting_pulls`."""
        state, live = self._state, self._state.participants.live
        slowest = state.table.slowest(live)
        behind = tuple(f"worker:{w}" for w in live if state.table.records[w].clock == slowest)
        under_way = state.leader.ending.under_way if state.leader else ()
        last = tuple(f"worker:{worker}" for worker in sorted(under_way))
        for worker, answer in self.withheld.items():
            reason, names = f"staleness bound {state.rule.staleness}", behind
            if self._undecided(worker):
                reason, names = "the last updates", last
            notice = Waiting(reason, names, now - answer.pending.since)
            yield answer.pending.route, Wait(worker, notice)

    def waiting_for_the_end(self, now: float) -> Iterator[Reply]:
        """Yields notices for the tasks that wait until no worker trains any more."""
        for route, since in self._drains.values():
            names = self._state.participants.training
            yield Reply(route, Waiting("the last updates", names, now - since))
