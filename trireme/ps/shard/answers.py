"""The answers of one shard: their contents, and until when they are withheld.

The answer to a push is withheld while its worker is too far ahead of the slowest worker, or while
updates under way decide whether the worker may compute another one. The answer to a pull is
withheld until the values are of the step that it asks for. From time to time a worker whose answer
is withheld gets a notice with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import torch

from trireme.ps.extra import Extra
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

_ONLOOKERS = 64  # the most tasks that are not workers and wait for the end of a job


class PushAnswer(msgspec.Struct, frozen=True):
    """The answer to a push, without what is only known when it is sent."""

    pending: Pending
    verdict: Verdict
    staleness: int


class Wait(msgspec.Struct, frozen=True):
    """A worker whose answer is withheld, and the notice that it gets from time to time."""

    route: object
    worker: int
    notice: Waiting


class Asked(msgspec.Struct, frozen=True):
    """A request that is not answered yet."""

    owner: Participant
    route: object
    since: float
    request: Any = None


class Answers:
    """Gives and withholds the answers of one shard to pushes, pulls and `Drain`."""

    def __init__(self, state: ShardState) -> None:
        self.notice = ""  # the notice that answers to pushes carry; empty as a rule
        self.due: list[PushAnswer] = []  # the answers that go out when the event under way is over
        # the answers to pushes that are decided, by worker
        self.withheld: dict[int, PushAnswer] = {}
        self._state = state
        self._pulls: list[Asked] = []
        self._drains: dict[int, Asked] = {}  # by worker

    def give(self, answer: PushAnswer) -> list[Reply]:
        """Answers a push at once, or withholds the answer if this worker or another must wait."""
        owner = answer.pending.owner
        if not self.withheld and self._may_go_on(owner, self._highest_clock()):
            return [self.reply(answer)]
        self.withheld[owner.worker] = answer
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
        if state.synchronous or self._may_go_on(pending.owner, self._highest_clock()):
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
        self._pulls = [each for each in self._pulls if each.owner.worker != who.worker]
        self._pulls.append(Asked(who, route, now, pull))
        return self.proceed()

    def drain(self, now: float, route: object, who: Participant) -> bool:
        """Has a task wait until no worker trains any more; returns False if too many wait.

        A worker that asks again has given up its wait before, and waits since then.
        """
        before = self._drains.get(who.worker)
        many = 2 * len(self._state.participants.incarnations) + _ONLOOKERS
        if before is None and len(self._drains) > many:
            return False
        self._drains[who.worker] = Asked(who, route, now if before is None else before.since)
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

    def take_routes(self) -> list[object]:
        """Drops all pulls, and all who wait for the end; returns their routes."""
        held = [*self._pulls, *self._drains.values()]
        self._pulls, self._drains = [], {}
        return [each.route for each in held]

    def proceed(self) -> list[Reply]:
        out: list[Reply] = []
        if self.due:
            due, self.due = self.due, []
            out += map(self.reply, due)
        if self.withheld:
            highest = self._highest_clock()
            for worker, each in tuple(self.withheld.items()):
                if self._may_go_on(each.pending.owner, highest):  # an answer may hold back others
                    out.append(self.reply(self.withheld.pop(worker)))
        if self._pulls:
            out += self._answer_pulls()
        if self._drains and not self._state.participants.live:
            drains, self._drains = self._drains, {}
            out += [Reply(each.route, Stopping(self._state.step)) for each in drains.values()]
        return out

    def reply(self, answer: PushAnswer) -> Reply:
        """Returns the answer to a push as it is sent now."""
        state, push = self._state, answer.pending.push
        stop = self._is_last(answer.pending.owner.worker)
        payload: Sequence[torch.Tensor] = ()
        digest = 0
        if push.pull and state.values is not None:
            payload = state.values_for(answer.pending.owner.worker)
            digest = state.watch.digest(state.values, payload)
        extra: Extra = ()
        if push.extra and state.extension is not None and state.shows_extra:
            extra = state.extension.pull(push.extra)
        message = PushReply(
            answer.verdict, state.step, answer.staleness, stop, self.notice, extra, digest
        )
        return Reply(answer.pending.route, message, payload)

    def _highest_clock(self) -> float:
        state, bound = self._state, self._state.rule.staleness
        if bound is None or state.over:
            return math.inf
        return state.table.slowest() + bound

    def _may_go_on(self, who: Participant, highest: float) -> bool:
        """Returns whether a worker is not too far ahead, and it is decided whether it goes on."""
        ahead = self._state.table.clocks.get(who, 0) > highest
        return not ahead and not self._undecided(who.worker)

    def _undecided(self, worker: int) -> bool:
        """Returns whether updates under way decide if a worker goes on, which shard 0 tells."""
        state, leader = self._state, self._state.leader
        return leader is not None and leader.ending.undecided(worker, state.step)

    def _is_last(self, worker: int) -> bool:
        state, leader = self._state, self._state.leader
        return leader is not None and not leader.ending.grant(worker, state.step)

    def _answer_pulls(self) -> list[Reply]:
        """Answers the pulls for a step that is reached, if their workers need not wait."""
        state, out = self._state, list[Reply]()
        if not state.loaded or state.values is None:
            return out
        held, self._pulls = self._pulls, []
        for each in held:
            pull, worker = each.request, each.owner.worker
            if state.step < pull.at_least or (pull.train and self._undecided(worker)):
                self._pulls.append(each)
                continue
            if pull.train:
                stop = self._is_last(worker)
            else:
                stop = state.leader is not None and state.leader.ending.reached(state.step)
            payload = state.values_for(worker)
            digest = state.watch.digest(state.values, payload)
            out.append(Reply(each.route, PullReply(state.step, stop, digest), payload))
        return out

    # -- notices ---------------------------------------------------------------------------------

    def waits(self, now: float) -> Iterator[Wait]:
        state, live = self._state, self._state.participants.live
        chief, table = state.participants.view.chief, state.table
        for each in self._pulls:
            reason, workers = "the last updates", [*live]
            if state.step < each.request.at_least:
                reason = f"step {each.request.at_least}"
            if not state.loaded:
                reason, workers = "its first values", [] if chief is None else [chief]
            yield wait(now, each, reason, _names(workers))
        for worker, answer in self.withheld.items():
            reason = f"staleness bound {state.rule.staleness}"
            workers = [w for (w, _), clock in table.clocks.items() if clock == table.slowest()]
            if state.leader is not None and self._undecided(worker):
                reason, workers = "the last updates", [*state.leader.ending.under_way]
            yield wait(now, answer.pending, reason, _names(workers))

    def waits_for_the_end(self, now: float) -> Iterator[Wait]:
        for each in self._drains.values():
            yield wait(now, each, "the last updates", _names(self._state.participants.live))


def wait(now: float, asked: Asked | Pending, reason: str, names: tuple[str, ...]) -> Wait:
    """Returns the wait for an answer, with the tasks waited for."""
    return Wait(asked.route, asked.owner.worker, Waiting(reason, names, now - asked.since))


def _names(workers: Iterable[int]) -> tuple[str, ...]:
    return tuple(f"worker:{worker}" for worker in sorted(workers))
