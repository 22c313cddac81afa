"""The answers of one shard: what they say, and until when they are withheld.

The answer to a push waits where its worker is too far ahead of the slowest, or where it depends on
updates under way whether the worker may compute one more. The answer to a pull waits for values of
the step that it asks for. Everybody who waits hears from time to time what for, and for whom.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import torch

from trireme.ps.messages import Pull, PullReply, PushReply, Stopping, Verdict, Waiting
from trireme.ps.shard.dedup import Pending
from trireme.ps.shard.instructions import Reply
from trireme.ps.shard.participants import Participant
from trireme.ps.shard.state import ShardState

__all__ = ["Answer", "Answers", "Wait"]

_ONLOOKERS = 64
"""So many tasks that are no workers may wait for the end of a job."""


class Answer(msgspec.Struct, frozen=True):
    """The answer to a push, but for what is only known when it goes out."""

    pending: Pending
    verdict: Verdict
    staleness: int


@dataclass(frozen=True, slots=True)
class Wait:
    """A worker whose answer is withheld, and what it is told about it from time to time."""

    worker: int
    notice: Waiting


class _WithheldPull(msgspec.Struct, frozen=True):
    """A pull that is not answered yet: whose, where the answer goes, and since when it waits."""

    owner: Participant
    route: object
    pull: Pull
    since: float


class Answers:
    """The answers of one shard to pushes, pulls and those who wait for the end.

    Args:
        state: the shard's.

    Attributes:
        notice: what the answers to pushes say besides.
        due: what goes out when the event under way is over.
        withheld: the answers to pushes that are decided, by worker.
    """

    def __init__(self, state: ShardState) -> None:
        self.notice = ""
        self.due: list[Answer] = []
        self.withheld: dict[int, Answer] = {}
        self._state = state
        self._pulls: list[_WithheldPull] = []
        self._drains: list[tuple[object, float]] = []  # and since when

    def give(self, answer: Answer) -> list[Reply]:
        """Answers a push at once; withholds the answer where its worker, or another one, waits."""
        worker = answer.pending.owner.worker
        if not self.withheld and self._may_go_on(worker, self._highest_clock()):
            return [self.reply(answer)]
        self.withheld[worker] = answer
        return []

    def pull(self, now: float, route: object, who: Participant, pull: Pull) -> list[Reply]:
        """Answers a pull once there are values of the step that it asks for.

        A worker waits for one answer at a time: it has given up those that it asked for before.
        """
        if self._pulls:
            self._pulls = [each for each in self._pulls if each.owner.worker != who.worker]
        self._pulls.append(_WithheldPull(who, route, pull, now))
        return self._answer_pulls()

    def drain(self, now: float, route: object) -> bool:
        """Has somebody wait until no worker trains any more; returns False where too many do."""
        if len(self._drains) > 2 * len(self._state.participants.incarnations) + _ONLOOKERS:
            return False
        self._drains.append((route, now))
        return True

    def take_fenced_pulls(self) -> list[object]:
        """Takes out the pulls that a new view fences off; returns where their answers go.

        Those are of workers that are out; and all before values are loaded, as the chief may be
        another one now.
        """
        state = self._state
        holds = state.participants.holds
        fenced = [each for each in self._pulls if not (state.loaded and holds(each.owner))]
        self._pulls = [each for each in self._pulls if each not in fenced]
        return [each.route for each in fenced]

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
            drains, self._drains = self._drains, []
            out += [Reply(route, Stopping(self._state.step)) for route, _ in drains]
        return out

    def reply(self, answer: Answer) -> Reply:
        """Makes the answer to a push as it goes out now."""
        state, push = self._state, answer.pending.push
        stop = not state.ending.grant(answer.pending.owner.worker, state.step)
        since: int | None = None
        payload: Sequence[torch.Tensor] = ()
        if push.pull:
            assert state.values is not None
            since, payload = state.values.since(push.pulled)
        message = PushReply(answer.verdict, state.step, answer.staleness, stop, since, self.notice)
        return Reply(answer.pending.route, message, payload)

    def _highest_clock(self) -> float:
        """Returns how many pushes a worker that is answered may have made: the staleness bound."""
        state, bound = self._state, self._state.rule.staleness
        if bound is None or state.ending.reached(state.step):
            return math.inf
        return state.table.slowest(state.participants.live) + bound

    def _may_go_on(self, worker: int, highest: float) -> bool:
        """Returns whether a worker is not too far ahead, and it is known if it goes on."""
        state = self._state
        ahead = state.table.records[worker].clock > highest
        return not ahead and not state.ending.undecided(worker, state.step)

    def _answer_pulls(self) -> list[Reply]:
        """Answers pulls for a step that is reached, of whom it is known if they go on."""
        state, out = self._state, list[Reply]()
        if not state.loaded or state.values is None:
            return out
        pulls, self._pulls = self._pulls, []
        for each in pulls:
            pull, worker = each.pull, each.owner.worker
            undecided = pull.train and state.ending.undecided(worker, state.step)
            if state.step < pull.at_least or undecided:
                self._pulls.append(each)
                continue
            if pull.train:
                stop = not state.ending.grant(worker, state.step)
            else:
                stop = state.ending.reached(state.step)
            out.append(Reply(each.route, PullReply(state.step, stop), state.values.served))
        return out

    # -- what those who wait are told -------------------------------------------------------------

    def waiting_pulls(self, now: float) -> Iterator[tuple[object, Wait]]:
        """Yields whose pulls are withheld, with where the answer will go, why and for whom."""
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
        """Yields who is too far ahead, or of whom it is not known if they go on."""
        state, live = self._state, self._state.participants.live
        slowest = state.table.slowest(live)
        behind = tuple(f"worker:{w}" for w in live if state.table.records[w].clock == slowest)
        last = tuple(f"worker:{worker}" for worker in sorted(state.ending.under_way))
        for worker, answer in self.withheld.items():
            reason, names = f"staleness bound {state.rule.staleness}", behind
            if state.ending.undecided(worker, state.step):
                reason, names = "the last updates", last
            notice = Waiting(reason, names, now - answer.pending.since)
            yield answer.pending.route, Wait(worker, notice)

    def waiting_for_the_end(self, now: float) -> Iterator[Reply]:
        """Yields notices for those who wait until no worker trains any more."""
        for route, since in self._drains:
            names = self._state.participants.training
            yield Reply(route, Waiting("the last updates", names, now - since))
