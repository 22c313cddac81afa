"""Watches one copy of a shard and stops the job at the first thing that must never happen.

It sees what the copy's optimizer is given and what the shard answers, whether or not somebody hears
of it, and shares no state and no code with the shard.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from tests.simulation.expected_values import Account, Made, PushId, Vectors, Watched
from tests.simulation.schedule import Schedule
from trireme.cluster.view import View
from trireme.ps.extra import Extra, bytes_in
from trireme.ps.layout import Layout
from trireme.ps.messages import (
    Applied,
    Duplicate,
    FencedVerdict,
    Lease,
    Leased,
    OptimizerSpec,
    Pull,
    PulledExtra,
    PullReply,
    Push,
    PushReply,
    Refused,
    RejectedVerdict,
    Retire,
    Stale,
    StopJob,
    Stopping,
    Waiting,
)
from trireme.ps.rule import Rule
from trireme.ps.shard.instructions import Instruction, Reply
from trireme.ps.shard.participants import Participant
from trireme.ps.shard.push_table import Decided
from trireme.ps.shard.values.parameters import Values
from trireme.ps.snapshot_messages import Load, Loaded, Snapshot, TakeSnapshot
from trireme.wire.message import Message

Members = tuple[PushId, ...]
"""The pushes of a round."""


class Job(Protocol):
    """What the checkers of a job's copies share.

    Attributes:
        schedule: the job.
        counts: how often what happened.
        made: all pushes.
        lost: the incarnations of workers that were lost.
        ends: at which steps the job may end.
        orders: by push: the steps that it makes at copies of shard 0.
        rounds: by life and step: the rounds on top of it at copies of shard 0, with their ends.
        added: the first values of parameters that were added.
    """

    schedule: Schedule
    counts: Counter[str]
    made: Mapping[PushId, Made]
    lost: set[tuple[int, int]]
    ends: set[int]
    orders: dict[PushId, set[int]]
    rounds: dict[tuple[int, int], set[tuple[int, Members]]]
    added: set[float]

    def loaded(self, account: Account) -> None:
        """A copy has its first values."""

    def stopped(self, account: Account, view: int) -> None:
        """A copy has stopped at the cut of the reconfiguration that a view has announced."""

    def before(self, account: Account, view: View) -> tuple[Sequence[Account], Layout]:
        """Returns what a shard goes on from that a view names, and its layout."""

    def copied(self, account: Account, step: int, applied: set[PushId]) -> None:
        """A shard has made its part of a copy."""


class ShardChecker:
    """Checks one copy.

    Args:
        job: what it shares with other copies.
        shard: the shard's number.
        where: names the copy in messages.
    """

    def __init__(self, job: Job, shard: int, where: str) -> None:
        self.account = Account(shard, where, job.schedule.momentum, job.made)
        self._job = job
        self._rule = job.schedule.rule
        self._asked: dict[object, tuple[Participant | None, Message]] = {}
        self._loading: tuple[Load, Any] | None = None
        # the workers that count from an update of this event on
        self._counted: list[tuple[int, Sequence[tuple[int, int]]]] = []

    def make_values(
        self, layout: Layout, server: int, optimizer: OptimizerSpec, rule: Rule
    ) -> Values:
        """Makes a shard's values, with an optimizer that is watched."""
        values = Values(layout, server, optimizer, rule)
        if not self.account.step and self.account.values is None:
            self.account.lay_out(layout)
        values.optimizer = Watched(self.account, optimizer, layout, server, values.buffer)
        return values

    def apply_rows(self, apply: Callable[..., None], *said: Any) -> None:
        """Rows of tables are about to be updated."""
        self.account.refuse_poison()
        apply(*said)

    # -- what happens to it -----------------------------------------------------------------------

    def viewed(self, view: View) -> None:
        """It is about to take a view."""
        account = self.account
        gone = account.live - {(entry.index, entry.incarnation) for entry in view.workers}
        account.take(view)
        for who in sorted(gone):
            account.dealing.release(who)

    def resumed(self, view: View) -> None:
        """It is about to begin where other shards have stopped."""
        before, layout = self._job.before(self.account, view)
        self.account.go_on_from(before, layout)
        self.account.loaded_in = 1
        self.viewed(view)

    def received(self, route: object, who: Participant | None, message: Message, what: Any) -> None:
        """A request is about to happen to it."""
        account = self.account
        if route is not None:
            self._asked[route] = who, message
        if isinstance(message, Load) and message.view > account.loaded_in:
            self._loading = message, what
        if isinstance(message, Retire) and who is not None and tuple(who) in account.live:
            account.retired.add(who.worker)
            account.dealing.release(who)

    def counted(self, count: Callable[..., None], members: Sequence[tuple[int, int]]) -> None:
        """Other workers are about to count for the staleness bound."""
        self._counted.append((len(self.account.given), members))
        count(members)

    def refused(self, pushes: Sequence[tuple[int, int, int]]) -> None:
        """The shard has refused to apply pushes: (worker, incarnation, sequence)."""
        account = self.account
        for push in pushes:
            who = (*push, account.view.life)
            if who in account.refused:
                continue
            if not self._job.schedule.poison:
                account.fail(f"push {who} is refused, and can be applied")
            account.refused.add(who)
            account.decided(who)
            if account.shard == 0:
                account.dealing.give_back(who[:2], self._job.made[who].spans)

    def grown(self, layout: Layout | None, values: Values | None) -> None:
        """An event is over, after which the shard has this layout."""
        account = self.account
        if layout is not None and values is not None and account.values is not None:
            account.grow(layout, values.buffer.vectors)
            self._job.added |= account.added
            if len(self._job.added) > 1:
                account.fail(f"shards have added the values {self._job.added} of several requests")

    def happened(self, step: int, instructions: Sequence[Instruction]) -> None:
        """An event is over: its step now, and what it asks for."""
        account = self.account
        replies = [each for each in instructions if isinstance(each, Reply)]
        if self._loading and any(isinstance(reply.message, Loaded) for reply in replies):
            load, tensors = self._loading
            account.load(load, tensors)
            self._job.loaded(account)
        self._loading = None
        if self._rule.synchronous:
            self._explain_rounds(step, replies)
        else:
            self._explain_updates(step)
        for reply in replies:
            if reply.route in self._asked:
                self._check(reply, *self._asked[reply.route])
        account.fewest = len(account.values or ())

    def stopped(self, view: int) -> None:
        """It has stopped to be divided anew, as this view has announced."""
        self._job.stopped(self.account, view)

    def _push_id(self, who: Participant, push: Push) -> PushId:
        return who.worker, who.incarnation, push.sequence, self.account.view.life

    def _explain_updates(self, step: int) -> None:
        """Asynchronous: each update is one push's, and shard 0 makes it first."""
        account, orders = self.account, self._job.orders
        for explained in itertools.count():
            self._count(explained)
            if not account.given:
                break
            if account.given[0] is None:
                account.advance(given=True)
                continue
            who = account.identify(account.given[0][0])
            account.advance(given=True, steps=self._job.made[who].push.steps)
            if account.shard == 0 and who[:2] not in account.live:
                account.fail(f"push {who} was applied, and its worker is not in {account.view}")
            self._apply(who)
            if account.shard == 0:
                orders.setdefault(who, set()).add(account.step)
            elif account.step not in orders.get(who, ()):
                account.fail(f"push {who} made this step, and at shard 0 {orders.get(who)}")
        if account.step != step:
            account.fail(f"it says that it is at step {step}")

    def _count(self, explained: int) -> None:
        """Counts the workers that count from here on, after so many updates of this event."""
        while self._counted and self._counted[0][0] <= explained:
            self.account.count(self._counted.pop(0)[1])

    def _explain_rounds(self, step: int, replies: Sequence[Reply]) -> None:
        """Synchronous: each step is the mean of those that are told so."""
        account, job = self.account, self._job
        while account.step < step:
            before = account.step
            if account.given and account.given[0] is None:
                account.advance(given=True, steps=step - before)
                continue
            members = self._members(replies, before)
            steps = max((job.made[who].push.steps for who in members), default=1)
            if account.shard == 0:
                known = job.rounds.setdefault((account.view.life, before), set())
                known.add((before + steps, members))
            weighty = [who for who in members if job.made[who].push.weight > 0]
            given = account.advance(given=bool(weighty), steps=steps)
            if weighty:
                if not self._is_mean(weighty, given):
                    account.fail(f"the update applied is not the mean of the pushes {members}")
                if account.used_rate != job.schedule.rate_at(before):
                    account.fail(f"the round had the learning rate {account.used_rate}")
            for who in members:
                if job.made[who].push.pulled != before:
                    account.fail(f"push {who} is of step {job.made[who].push.pulled}")
                self._apply(who)
        if account.step != step:
            account.fail(f"it says that it is at step {step}")
        if account.given:
            account.fail("an update was applied that belongs to no round")

    def _members(self, replies: Sequence[Reply], before: int) -> Members:
        """Returns the pushes of the round on top of a step, as shard 0 has decided it.

        Of members that are out by now no answer of another shard tells. Copies of shard 0 may have
        decided otherwise before they were replaced, and nobody has heard of it.
        """
        account, told = self.account, tuple(self._told_applied(replies, before))
        if account.shard == 0:
            return told
        rounds = self._job.rounds.get((account.view.life, before), set())
        possible = [members for _, members in sorted(rounds) if set(told) <= set(members)]
        first = account.given[0] if account.given else None
        given = None if first is None else first[0]
        for members in possible:
            weighty = [who for who in members if self._job.made[who].push.weight > 0]
            if bool(weighty) == (given is not None) and (
                given is None or self._is_mean(weighty, given)
            ):
                return members
        return possible[0] if possible else told

    def _is_mean(self, members: Sequence[PushId], given: Vectors) -> bool:
        gradients = [self._job.made[who].gradient for who in members]
        whole: Vectors = tuple(
            np.asarray(np.mean([gradient[i] for gradient in gradients], axis=0, dtype=np.float64))
            for i in range(min(map(len, gradients)))
        )
        mean = self.account.part(whole)
        limit = self._rule.clip_norm
        if limit is None:
            return all(np.array_equal(m, g) for m, g in zip(mean, given, strict=True))
        norm = math.sqrt(sum(float((vector**2).sum()) for vector in whole))
        scale = min(1.0, limit / (norm + 1e-6))
        self._job.counts["clipped"] += int(scale < 1)
        return all(
            np.allclose(m * scale, g, rtol=1e-6, atol=0) for m, g in zip(mean, given, strict=True)
        )

    def _apply(self, who: PushId) -> None:
        account = self.account
        account.apply(who)
        account.decided(who)
        if account.shard == 0:
            account.dealing.apply(self._job.made[who].spans)

    # -- what it answers --------------------------------------------------------------------------

    def _check(self, reply: Reply, who: Participant | None, request: Message) -> None:
        account, message, counts = self.account, reply.message, self._job.counts
        if isinstance(message, Waiting):
            counts["waiting"] += 1
        elif isinstance(message, PushReply):
            assert isinstance(request, Push) and who is not None
            self._check_verdict(request, self._push_id(who, request), message)
            if reply.payload:
                self._check_values(message.step, reply.payload)
            self._check_rows(message.extra)
        elif isinstance(message, PulledExtra):
            self._check_rows(message.extra)
        elif isinstance(message, PullReply):
            assert isinstance(request, Pull)
            if message.step < request.at_least:
                account.fail(f"{request} was answered with step {message.step}")
            self._check_values(message.step, reply.payload)
        elif isinstance(message, Refused):
            counts[message.code] += 1
            early = isinstance(request, TakeSnapshot) and account.values is None
            late = (  # it came on a connection that its worker has replaced
                isinstance(request, Lease)
                and who is not None
                and account.dealing.is_late((who.worker, who.incarnation), request)
            )
            if message.code not in ("fenced", "busy") and not (early or late):
                account.fail(f"{request} was refused: {message}")
        elif isinstance(message, Leased):
            assert isinstance(request, Lease) and who is not None
            account.dealing.deal((who.worker, who.incarnation), request, message.spans)
        elif isinstance(message, Stopping) and isinstance(request, StopJob):
            self._job.ends.add(message.step)
        elif isinstance(message, Snapshot):
            self._check_snapshot(message, reply)

    def _check_rows(self, extra: Extra) -> None:
        for told in bytes_in(extra):
            self._job.counts["rows told"] += 1
            self.account.check_rows(told)

    def _check_values(self, step: int, payload: Sequence[torch.Tensor]) -> None:
        if self._rule.synchronous and step != self.account.step:
            self.account.fail(f"values of step {self.account.step} are told to be of step {step}")
        self.account.check_values(payload)

    def _check_verdict(self, push: Push, who: PushId, message: PushReply) -> None:
        account, verdict = self.account, message.verdict
        if isinstance(verdict, FencedVerdict):
            self._job.counts["fenced"] += 1
            if push.view == account.view.number and who[:2] in account.live:
                account.fail(f"push {who} was fenced off in its own view")
        elif isinstance(verdict, Duplicate):
            self._job.counts["duplicate"] += 1
            if who not in account.verdicts:  # it was not told before the shards were divided anew
                self._check_first(who, verdict.original)
            if account.verdicts.get(who) != verdict.original:
                account.fail(f"{verdict} on push {who}, which had {account.verdicts.get(who)}")
        elif isinstance(verdict, RejectedVerdict) and "could not be applied" not in verdict.reason:
            account.fail(f"push {who} was rejected: {verdict}")
        elif isinstance(verdict, (Applied, Stale, RejectedVerdict)):
            if who in account.verdicts:
                account.fail(f"a second verdict on push {who}: {verdict}")
            self._check_first(who, verdict)

    def _check_first(self, who: PushId, verdict: Decided) -> None:
        self.account.verdicts[who] = verdict
        if isinstance(verdict, Applied):
            self._check_applied(who, verdict)
        elif isinstance(verdict, Stale):
            self._check_stale(who)
        else:
            self._check_refused(who)

    def _check_refused(self, who: PushId) -> None:
        if who in self.account.applied or who not in self.account.refused:
            self.account.fail(f"push {who} is told to be refused, and was not")

    def _check_applied(self, who: PushId, verdict: Applied) -> None:
        account = self.account
        made = account.applied.get(who)
        if made is None:
            account.fail(f"push {who} is told to be applied and is not")
        if made != verdict.step:
            account.fail(f"push {who} was applied at step {made} and told {verdict}")
        bound = self._rule.staleness
        if bound and not self._ended and who[:2] in account.clocks:
            ahead = account.clocks[who[:2]] - min(account.clocks.values())
            if ahead > bound:
                account.fail(f"worker {who[:2]} may go on, and is {ahead} pushes ahead")

    def _check_stale(self, who: PushId) -> None:
        account, made = self.account, self._job.made[who]
        account.decided(who)
        if account.shard == 0:
            account.dealing.give_back(who[:2], made.spans)
        if who in account.applied:
            account.fail(f"push {who} is told to be stale and was applied")
        there = who[:2] in account.live and who[:2] not in self._job.lost
        if not self._rule.synchronous and there:
            account.fail(f"push {who} is stale, though each is applied that was let begin")
        if not self._ended and not (self._rule.synchronous and made.push.pulled < account.step):
            account.fail(f"push {who} is told to be stale, and its round is open")
        if self._rule.aggregate == 0 and not self._ended and who[:2] not in self._job.lost:
            account.fail(f"push {who} of a live worker is stale, though all must be in each round")

    @property
    def _ended(self) -> bool:
        return any(self.account.step >= end for end in self._job.ends)

    def _check_snapshot(self, message: Snapshot, reply: Reply) -> None:
        account = self.account
        account.check_snapshot(message.step, list(zip(message.tensors, reply.payload, strict=True)))
        applied = account.decided_at(message.step)
        if account.shard == 0:
            spans = [span for who in applied for span in self._job.made[who].spans]
            positions = {p for span in spans for p in range(span.start, span.stop)}
            account.dealing.check_consumed(message.consumed, positions | account.dealing.before)
        self._job.copied(account, message.step, applied)

    def _told_applied(self, replies: Sequence[Reply], before: int) -> list[PushId]:
        """Returns the pushes that these answers say made the first update after a step."""
        told = []
        for reply in replies:
            message, (who, push) = reply.message, self._asked.get(reply.route, (None, None))
            if (
                isinstance(message, PushReply)
                and isinstance(message.verdict, Applied)
                and message.verdict.step > before
                and isinstance(push, Push)
                and who is not None
            ):
                told.append((message.verdict.step, self._push_id(who, push)))
        first = min((step for step, _ in told), default=before)
        return [who for step, who in told if step == first]
