"""Watches a simulated job and stops it at the first thing that must never happen.

It sees what workers make, what each optimizer is given and what servers answer, and shares no
state and no code with the shards.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tests.simulation.dealing import Dealing
from tests.simulation.expected_values import (
    Account,
    Made,
    PushId,
    Vectors,
    Violation,
    Watched,
    push_id,
)
from tests.simulation.schedule import Schedule
from tests.simulation.server import Route
from trireme.cluster.view import View
from trireme.ps.layout import Layout
from trireme.ps.messages import (
    Applied,
    Duplicate,
    FencedVerdict,
    Lease,
    Leased,
    OptimizerSpec,
    Pull,
    PullReply,
    Push,
    PushReply,
    Refused,
    RejectedVerdict,
    Retire,
    Span,
    Stale,
    StopJob,
    Stopping,
    Verdict,
    Waiting,
    WorkerProgress,
)
from trireme.ps.rule import Rule
from trireme.ps.shard.instructions import Reply
from trireme.ps.shard.values.parameters import Values
from trireme.ps.snapshot import ModelState
from trireme.ps.snapshot_messages import Freeze, Load, Loaded, Snapshot, TensorSpec
from trireme.wire.handshake import Identity


class InvariantChecker:
    """All that a job must keep to.

    Args:
        schedule: the job.
        layout: of its model.
        start: the state that it goes on from.

    Attributes:
        counts: how often what happened.
        end: the step at which the job ends, once that is known.
    """

    def __init__(self, schedule: Schedule, layout: Layout, start: ModelState) -> None:
        self.counts: Counter[str] = Counter()
        self.end = schedule.rule.max_steps
        self.made: dict[PushId, Made] = {}
        self.lost: set[tuple[int, int]] = set()
        self.acknowledged: dict[PushId, type[Applied] | type[Stale]] = {}
        self.dealing = Dealing(start.consumed)
        self.accounts = [
            Account(server, layout, schedule.momentum, self.made)
            for server in range(layout.spec.shards)
        ]
        self._rule = schedule.rule
        self._uncommitted = schedule.rule.uncommitted
        self._rate_at = schedule.rate_at
        self._members: dict[int, list[PushId]] = {}
        self._before = set(self.dealing.applied)
        self._applied_before = {row.worker: row.applied for row in start.workers}
        self._loading: tuple[Load, Sequence[tuple[TensorSpec, torch.Tensor]]] | None = None

    def make_values(
        self, layout: Layout, server: int, optimizer: OptimizerSpec, rule: Rule
    ) -> Values:
        """Makes a server's values, with an optimizer that is watched."""
        values = Values(layout, server, optimizer, rule)
        account = self.accounts[server]
        values.optimizer = Watched(account, optimizer, layout, server, values.buffer)
        return values

    # -- what workers do --------------------------------------------------------------------------

    def make(self, who: PushId, push: Push, spans: tuple[Span, ...], gradient: Vectors) -> None:
        """A worker has made a push."""
        self.made[who] = Made(push, spans, gradient)
        self.counts["pushes"] += 1
        for account in self.accounts:
            account.know(who, gradient)

    def acknowledge(self, who: PushId, verdicts: Sequence[Verdict]) -> None:
        """A worker has the verdicts of all servers on a push: they must agree."""
        decided = [v.original if isinstance(v, Duplicate) else v for v in verdicts]
        kinds = {type(verdict) for verdict in decided}
        one_step = kinds == {Applied} and not self._uncommitted
        if len(kinds) > 1 or (one_step and len(set(decided)) > 1):
            raise Violation(f"the servers do not agree on push {who}: {decided}")
        for account, verdict in zip(self.accounts, decided, strict=True):
            first = account.verdicts.get(who)
            if first != verdict:
                account.fail(f"push {who} was told {verdict}, and first {first}")
        kind = kinds.pop()
        assert kind is Applied or kind is Stale
        self.acknowledged[who] = kind
        self.counts["applied" if kind is Applied else "stale"] += 1

    @property
    def applied(self) -> set[PushId]:
        """The pushes whose workers know that they are applied."""
        return {who for who, kind in self.acknowledged.items() if kind is Applied}

    def check_held(self, who: tuple[int, int], spans: Sequence[Span]) -> None:
        """A worker leaves: what it holds unpushed must be what it thinks it holds."""
        if who in self.accounts[0].live:
            self.dealing.check_held(who, spans)

    # -- what happens at a server -----------------------------------------------------------------

    def viewed(self, server: int, view: View) -> None:
        """A server is about to take a view."""
        account = self.accounts[server]
        gone = account.live - {(entry.index, entry.incarnation) for entry in view.workers}
        account.take(view)
        if server == 0:
            for who in sorted(gone):
                self.dealing.release(who)

    def received(
        self, server: int, identity: Identity, message: Any, payload: Sequence[Any]
    ) -> None:
        """A message is about to happen to a server."""
        account = self.accounts[server]
        if isinstance(message, Load) and account.values is None:
            self._loading = (message, payload)
        if isinstance(message, Retire):
            account.retired |= {
                worker
                for worker, start in account.live
                if (worker, start) == (identity.index, identity.incarnation)
            }

    def happened(self, server: int, step: int, replies: Sequence[Reply]) -> None:
        """An event is over."""
        account = self.accounts[server]
        if any(isinstance(reply.message, Loaded) for reply in replies) and self._loading:
            load, tensors = self._loading
            account.load(load.step, tensors)
        self._loading = None
        if self._rule.synchronous:
            self._explain_rounds(account, step, replies)
        else:
            self._explain_updates(account, step)
        for reply in replies:
            assert isinstance(reply.route, Route)
            self._check(account, reply.route, reply)

    def _explain_updates(self, account: Account, step: int) -> None:
        """Asynchronous: each step is one push's, and server 0 makes it first, where it commits."""
        while account.given:
            who = account.identify(account.advance(given=True))
            decides = account.server == 0 or self._uncommitted
            if decides and who[:2] not in account.live:
                account.fail(f"push {who} was applied, and its worker is not in {account.view}")
            self._apply(account, who)
            first = self.accounts[0].applied.get(who)
            if first != account.step and not self._uncommitted:
                account.fail(f"push {who} made this step, and at ps:0 it made {first}")
        if account.step != step:
            account.fail(f"it says that it is at step {step}")

    def _explain_rounds(self, account: Account, step: int, replies: Sequence[Reply]) -> None:
        """Synchronous: each step is the mean of those that are told so."""
        while account.step < step:
            before = account.step
            members = _told_applied(replies, before)
            if account.server:  # of those that are out by now, no answer of this server tells
                reached = min((end for end in self._members if end > before), default=None)
                members = members if reached is None else self._members[reached]
            steps = max((self.made[who].push.steps for who in members), default=1)
            if account.server == 0:
                self._members[before + steps] = members
            weighty = [who for who in members if self.made[who].push.weight > 0]
            given = account.advance(given=bool(weighty), steps=steps)
            if weighty:
                self._check_mean(account, weighty, given)
                if account.used_rate != self._rate_at(before):
                    account.fail(f"the round had the learning rate {account.used_rate}")
            for who in members:
                if self.made[who].push.pulled != before:
                    account.fail(f"push {who} is of step {self.made[who].push.pulled}")
                self._apply(account, who)
        if account.step != step:
            account.fail(f"it says that it is at step {step}")
        if account.given:
            account.fail("an update was applied that belongs to no round")

    def _check_mean(self, account: Account, members: Sequence[PushId], given: Vectors) -> None:
        gradients = [self.made[who].gradient for who in members]
        whole: Vectors = tuple(
            np.asarray(np.mean([gradient[i] for gradient in gradients], axis=0, dtype=np.float64))
            for i in range(len(given))
        )
        mean = account.part(whole)
        limit = self._rule.clip_norm
        if limit is None:
            same = all(np.array_equal(m, g) for m, g in zip(mean, given, strict=True))
        else:
            norm = math.sqrt(sum(float((vector**2).sum()) for vector in whole))
            scale = min(1.0, limit / (norm + 1e-6))
            self.counts["clipped"] += int(scale < 1)
            same = all(
                np.allclose(m * scale, g, rtol=1e-6, atol=0)
                for m, g in zip(mean, given, strict=True)
            )
        if not same:
            account.fail(f"the update applied is not the mean of the pushes {members}")

    def _apply(self, account: Account, who: PushId) -> None:
        account.apply(who)
        account.clocks[who[:2]] = account.clocks.get(who[:2], 0) + 1
        if account.server == 0:
            self.dealing.apply(self.made[who].spans)

    # -- what a server answers --------------------------------------------------------------------

    def _check(self, account: Account, route: Route, reply: Reply) -> None:
        message, request = reply.message, route.message
        if isinstance(message, Waiting):
            self.counts["waiting"] += 1
        elif isinstance(message, PushReply):
            assert isinstance(request, Push)
            self._check_verdict(account, request, reply)
        elif isinstance(message, PullReply):
            assert isinstance(request, Pull)
            if message.step < request.at_least:
                account.fail(f"{request} was answered with step {message.step}")
            self._check_values(account, message.step, reply)
        elif isinstance(message, Refused):
            self.counts[message.code] += 1
            early = isinstance(request, Freeze) and account.values is None
            if message.code not in ("fenced", "busy") and not early:
                account.fail(f"{request} was refused: {message}")
        elif isinstance(message, Leased):
            assert isinstance(request, Lease)
            who = route.link.identity
            self.dealing.deal((who.index, who.incarnation), request, message.spans)
        elif isinstance(message, Stopping) and isinstance(request, StopJob):
            self.end = message.step
        elif isinstance(message, Snapshot):
            self._check_snapshot(account, message, reply)

    def _check_values(self, account: Account, step: int, reply: Reply) -> None:
        if self._rule.synchronous and step != account.step:
            account.fail(f"values of step {account.step} are told to be of step {step}")
        account.check_values(reply.payload)

    def _check_verdict(self, account: Account, push: Push, reply: Reply) -> None:
        assert isinstance(reply.message, PushReply) and isinstance(reply.route, Route)
        verdict = reply.message.verdict
        who = push_id(reply.route.link.identity, push)
        if isinstance(verdict, RejectedVerdict) and reply.route.link.wire.whole:
            account.fail(f"push {who} was rejected: {verdict.reason}")
        if isinstance(verdict, FencedVerdict):
            self.counts["fenced"] += 1
            if push.view == account.view.number and who[:2] in account.live:
                account.fail(f"push {who} was fenced off in its own view")
            return
        if isinstance(verdict, Duplicate):
            self.counts["duplicate"] += 1
            if account.verdicts.get(who) != verdict.original:
                account.fail(f"{verdict} on push {who}, which had {account.verdicts.get(who)}")
        elif isinstance(verdict, (Applied, Stale)):
            if who in account.verdicts:
                account.fail(f"a second verdict on push {who}: {verdict}")
            account.verdicts[who] = verdict
            if isinstance(verdict, Applied):
                self._check_applied(account, who, verdict)
            else:
                self._check_stale(account, who)
        if reply.payload:
            self._check_values(account, reply.message.step, reply)

    def _check_applied(self, account: Account, who: PushId, verdict: Applied) -> None:
        made = account.applied.get(who)
        if made is None:
            account.fail(f"push {who} is told to be applied and is not")
        if made != verdict.step:
            account.fail(f"push {who} was applied at step {made} and told {verdict}")
        bound = self._rule.staleness
        if bound and not (account.server == 0 and self._ended(account)) and who[:2] in account.live:
            slowest = min(
                account.clocks[other] for other in account.live if other[0] not in account.retired
            )
            ahead = account.clocks[who[:2]] - slowest
            if ahead > bound:
                account.fail(f"worker {who[:2]} may go on, and is {ahead} pushes ahead")

    def _check_stale(self, account: Account, who: PushId) -> None:
        push = self.made[who].push
        account.clocks[who[:2]] = account.clocks.get(who[:2], 0) + 1
        if account.server == 0:
            self.dealing.give_back(who[:2], self.made[who].spans)
        if who in account.applied:
            account.fail(f"push {who} is told to be stale and was applied")
        over = account.server == 0 and self._ended(account)
        if not over and not (self._rule.synchronous and push.pulled < account.step):
            account.fail(f"push {who} is told to be stale, and its round is open")
        if self._rule.aggregate == 0 and not self._ended(account) and who[:2] not in self.lost:
            account.fail(f"push {who} of a live worker is stale, though all must be in each round")

    def _ended(self, account: Account) -> bool:
        return self.end is not None and account.step >= self.end

    def _check_snapshot(self, account: Account, message: Snapshot, reply: Reply) -> None:
        tensors = list(zip(message.tensors, reply.payload, strict=True))
        account.check_snapshot(message.step, tensors)
        if account.server == 0:
            applied = account.decided_at(message.step)
            spans = [span for who in applied for span in self.made[who].spans]
            positions = {p for span in spans for p in range(span.start, span.stop)}
            self.dealing.check_consumed(message.consumed, positions | self._before)

    # -- a cut, and the end -----------------------------------------------------------------------

    def check_cut(self, parts: Sequence[Snapshot]) -> None:
        """All servers have answered a cut: they must have copied the same state."""
        self.counts["cuts"] += 1
        if len({part.step for part in parts}) > 1 and not self._uncommitted:
            raise Violation(f"a cut has several steps: {[part.step for part in parts]}")
        copied = [
            self._surviving(account.decided_at(part.step))
            for account, part in zip(self.accounts, parts, strict=True)
        ]
        for server, applied in enumerate(copied):
            if applied != copied[0]:
                different = sorted(applied ^ copied[0])
                raise Violation(f"the copies of ps:0 and ps:{server} differ in pushes {different}")

    def _surviving(self, applied: set[PushId]) -> set[PushId]:
        """Leaves out what only servers that commit nothing may differ in: pushes of the lost."""
        if not self._uncommitted:
            return applied
        return {who for who in applied if who[:2] not in self.lost or who in self.acknowledged}

    def check_end(
        self, tables: Sequence[Sequence[WorkerProgress]], *, finished: bool, half_applied: float
    ) -> None:
        """The job is over.

        Args:
            tables: each server's exactly-once table.
            finished: whether some worker got as far as the end.
            half_applied: how many pushes server 0 says are on some servers only.
        """
        for account, table in zip(self.accounts, tables, strict=True):
            for row in table:
                count = sum(1 for who in account.applied if who[0] == row.worker)
                count += self._applied_before.get(row.worker, 0)
                if count != row.applied:
                    account.fail(f"{row} in the table, and {count} were applied")
        for who, kind in self.acknowledged.items():
            for account in self.accounts:
                if (who in account.applied) != (kind is Applied):
                    account.fail(f"push {who} was acknowledged as {kind.__name__} and is not so")
        unknown = {who for account in self.accounts for who in account.applied}
        for who in unknown - self.acknowledged.keys():
            if who[:2] not in self.lost:
                raise Violation(f"push {who} was applied, and its live worker never knew")
        if finished:
            self._check_last_step()
            self._check_whole(half_applied)
        if self._rule.aggregate == 0 and not self.lost:
            self._check_batches()
        if self._rule.synchronous:
            for account in self.accounts:
                most = self._rule.aggregate
                for step, count in Counter(account.applied.values()).items():
                    if 0 < most < count:
                        account.fail(f"{count} updates made step {step}, and {most} should")

    def _check_whole(self, counted: float) -> None:
        """No push is on some servers only, whoever died, and each made the same step on all.

        Where the servers commit nothing, those that are have been counted.
        """
        everywhere = set.intersection(*(set(account.applied) for account in self.accounts))
        somewhere = {who for account in self.accounts for who in account.applied}
        half = somewhere - everywhere
        self.counts["half-applied"] += len(half)
        if counted != len(half):
            raise Violation(f"{counted} pushes are counted as half-applied; these are: {half}")
        for account in [] if self._uncommitted else self.accounts:
            other = account.applied.items() ^ self.accounts[0].applied.items()
            if other:
                partly = sorted({who for who, _ in other})
                raise Violation(f"pushes are on ps:0 or ps:{account.server} only: {partly}")

    def _check_last_step(self) -> None:
        """All servers must end at the job's last step; where they commit nothing, server 0 must.

        Unless staleness is bounded: then what a lost worker had begun is not made good for. A job
        that is asked to stop ends with the round that is open, however many steps that makes.
        """
        steps = [account.step for account in self.accounts]
        whole = not self._uncommitted or not self.lost
        exact = self._rule.synchronous or self._rule.staleness is None or not self.lost
        beyond = 0 if self.end is None else steps[0] - self.end
        most = self._rule.period - 1 if self._rule.max_steps is None else 0
        if (whole and len(set(steps)) > 1) or (exact and not 0 <= beyond <= most):
            raise Violation(f"the job ended at steps {steps}; it should at {self.end}")

    def _check_batches(self) -> None:
        """Where nobody was lost, each round used the examples that one process would have used."""
        if self._before != set(range(len(self._before))):
            return
        position = len(self._before)
        for step, members in sorted(self._members.items()):
            spans = [span for who in members for span in self.made[who].spans]
            used = sorted(p for span in spans for p in range(span.start, span.stop))
            if used != list(range(position, position + len(used))):
                raise Violation(f"round {step} used examples {used}, and {position} was next")
            position += len(used)


def _told_applied(replies: Sequence[Reply], before: int) -> list[PushId]:
    """Returns the pushes that these answers say made the first update after a step."""
    told = [
        (reply.message.verdict.step, push_id(reply.route.link.identity, reply.route.message))
        for reply in replies
        if isinstance(reply.message, PushReply)
        and isinstance(reply.message.verdict, Applied)
        and reply.message.verdict.step > before
        and isinstance(reply.route, Route)
        and isinstance(reply.route.message, Push)
    ]
    first = min((step for step, _ in told), default=before)
    return [who for step, who in told if step == first]
