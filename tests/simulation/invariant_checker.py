"""Watches a simulated job and stops it at the first thing that must never happen.

Every copy of a shard has a `ShardChecker`. This module compares them with each other, and with
what workers make and hear.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from tests.simulation.counting import Counting
from tests.simulation.expected_values import BEGUN, Account, Made, PushId, Vectors, Violation
from tests.simulation.model import COUNTED
from tests.simulation.schedule import Schedule
from tests.simulation.shard_checker import Members, ShardChecker
from trireme.cluster.view import View
from trireme.ps.layout import Layout
from trireme.ps.messages import Applied, Duplicate, Push, Span, Stale, Verdict, WorkerProgress
from trireme.ps.snapshot_messages import Snapshot

Seen = tuple[int, tuple[int, int, int], int]
"""Values that somebody has seen: the life, the vector with a range of it, and the step."""


class InvariantChecker:
    """All that a job must keep to.

    Args:
        schedule: the job.
        layout: returns the model's layout over shards that begin at these slots.

    Attributes:
        schedule: the argument.
        counts: how often what happened.
        made: all pushes.
        lost: the incarnations of workers that were lost.
        ends: at which steps the job may end.
        orders: by push: the steps that it makes at copies of shard 0.
        rounds: by life and step: the rounds on top of it at copies of shard 0, with their ends.
        acknowledged: what workers were told of their pushes.
        added: the first values of parameters that were added.
        counting: compares what workers have seen, where values count the updates in them.
    """

    def __init__(self, schedule: Schedule, layout: Callable[..., Layout]) -> None:
        self.schedule = schedule
        self.counts: Counter[str] = Counter()
        self.made: dict[PushId, Made] = {}
        self.lost: set[tuple[int, int]] = set()
        self.ends = set[int]() if schedule.rule.max_steps is None else {schedule.rule.max_steps}
        self.orders: dict[PushId, set[int]] = {}
        self.rounds: dict[tuple[int, int], set[tuple[int, Members]]] = {}
        self.acknowledged: dict[PushId, type[Applied] | type[Stale]] = {}
        self.counting = Counting()
        self.added: set[float] = set()
        self._rule = schedule.rule
        self._layout = layout
        self._views: dict[int, View] = {}
        self._speakers: dict[tuple[int, int], int] = {}  # by view and slot: who has answered
        self._seen: dict[Seen, bytes] = {}
        self._seen_rows: dict[tuple[int, tuple[int, ...], int], bytes] = {}
        # By generation and slots, and the view that announced the next ones.
        self._quiet: dict[tuple[int, int, int, int], Account] = {}
        self._copied: dict[tuple[int, int, int, int], list[set[PushId]]] = {}

    def watch(self, server: str, number: int) -> ShardChecker:
        """Returns the checker of a new copy of a shard."""
        return ShardChecker(self, number, f"the copy of shard {number} at {server}")

    # -- views, and who may answer ----------------------------------------------------------------

    def viewed(self, view: View) -> None:
        """The coordinator has made a view."""
        if self._views.setdefault(view.number, view) != view:
            raise Violation(f"two views have the number {view.number}")

    def answered(self, server: int, shard: int, view: View) -> None:
        """A server has answered a task about a shard, by a view that it has."""
        if not view.shards:
            return
        if shard >= len(view.shards) or view.shards[shard].primary != server:
            raise Violation(f"ps:{server} answers for shard {shard}, which is not its in {view}")
        entry = view.shards[shard]
        for slot in range(entry.start, entry.stop):
            if self._speakers.setdefault((view.number, slot), server) != server:
                raise Violation(f"two servers answer for slot {slot} in view {view.number}")

    # -- what workers do --------------------------------------------------------------------------

    def make(self, who: PushId, push: Push, spans: tuple[Span, ...], gradient: Vectors) -> None:
        """A worker has made a push."""
        self.made[who] = Made(push, spans, gradient)
        self.counts["pushes"] += 1
        self.counting.begun[who[3], who[0]] += 1

    def acknowledge(self, who: PushId, verdicts: Sequence[Verdict]) -> None:
        """A worker has the verdicts of all shards on a push: they must agree."""
        decided = [v.original if isinstance(v, Duplicate) else v for v in verdicts]
        kinds = {type(verdict) for verdict in decided}
        if len(kinds) > 1 or (kinds == {Applied} and len(set(decided)) > 1):
            raise Violation(f"the shards do not agree on push {who}: {decided}")
        kind = kinds.pop()
        assert kind is Applied or kind is Stale
        self.acknowledged[who] = kind
        self.counts["applied" if kind is Applied else "stale"] += 1
        if kind is Applied:
            self.counting.acknowledged[who[3], who[0]] += 1

    def see(self, life: int, layout: Layout, shard: int, step: int, vectors: Vectors) -> None:
        """A worker has received values of a shard: two of one step are the same."""
        bounds = layout.spec.bounds
        for which, (part, values) in enumerate(zip(layout.parts(shard), vectors, strict=True)):
            count = bounds[shard + 1] - bounds[shard]
            length = part.length // count
            for at in range(count):
                start = part.start + at * length
                told = values[at * length : (at + 1) * length].tobytes()
                if (
                    self._seen.setdefault((life, (which, start, start + length), step), told)
                    != told
                ):
                    raise Violation(f"shard {shard} had two kinds of values of step {step}")

    def see_rows(self, life: int, bounds: Sequence[int], step: int, rows: bytes) -> None:
        """A worker has received the rows of some slots: two of one step are the same."""
        key = life, tuple(bounds), step
        if self._seen_rows.setdefault(key, rows) != rows:
            raise Violation(f"the slots {key[1]} had two kinds of rows at step {step}")

    def loaded(self, account: Account) -> None:
        """A copy has its first values."""
        entry = account.view.shards[account.shard]
        if self.schedule.counts and account.values is not None:
            slots = account.values[COUNTED].reshape(entry.stop - entry.start, -1)
            for slot, counts in enumerate(slots, entry.start):
                self.counting.load(account.view.life, slot, counts)

    # -- copies of a shard, and shards that follow others -----------------------------------------

    def stopped(self, account: Account, view: int) -> None:
        """A copy has stopped at the cut of the reconfiguration that a view has announced."""
        entry = account.view.shards[account.shard]
        key = (account.view.generation, entry.start, entry.stop, view)
        other = self._quiet.setdefault(key, account.quiet())
        if not other.same_as(account):
            account.fail(f"it has stopped in another state than {other.where}")
        self.counts["stopped"] += 1

    def before(self, account: Account, view: View) -> tuple[Sequence[Account], Layout]:
        """Returns what a shard goes on from that a view names, and its layout."""
        entry, found, announced = view.shards[account.shard], list[Account](), 0
        for (generation, start, stop, number), quiet in sorted(self._quiet.items()):
            overlaps = start < entry.stop and entry.start < stop
            if generation != view.generation - 1 or not overlaps or number >= view.number:
                continue
            if number > announced:
                found, announced = [], number
            if number == announced:
                found.append(quiet)
        if not found:
            raise Violation(f"{account.where} goes on from shards that have not stopped")
        self.counts["resumed shards"] += 1
        return found, self._layout(view.bounds, grown=len(found[0].values or ()) > BEGUN)

    # -- a cut ------------------------------------------------------------------------------------

    def copied(self, account: Account, step: int, applied: set[PushId]) -> None:
        """A shard has made its part of a copy."""
        view = account.view
        key = (view.life, view.generation, account.shard, step)
        self._copied.setdefault(key, []).append(applied)

    def check_cut(self, life: int, generation: int, parts: Sequence[Snapshot]) -> None:
        """All shards have answered a cut: they must have copied the same state."""
        self.counts["cuts"] += 1
        if len({part.step for part in parts}) > 1:
            raise Violation(f"a cut has several steps: {[part.step for part in parts]}")
        first, *others = (
            self._copied[life, generation, shard, part.step] for shard, part in enumerate(parts)
        )
        for shard, copies in enumerate(others, 1):
            if not any(one == other for one in first for other in copies):
                different = sorted(first[-1] ^ copies[-1])
                raise Violation(f"the copies of shards 0 and {shard} differ in pushes {different}")

    # -- the end ----------------------------------------------------------------------------------

    def check_end(
        self,
        life: int,
        accounts: Sequence[Account],
        tables: Sequence[Sequence[WorkerProgress]],
        *,
        finished: bool,
    ) -> None:
        """The job is over.

        Args:
            life: the last.
            accounts: of the primaries, in the order of their slots.
            tables: each shard's exactly-once table.
            finished: whether some worker got as far as the end.
        """
        for account, table in zip(accounts, tables, strict=True):
            for row in table:
                count = sum(1 for who in account.applied if who[0] == row.worker)
                count += account.inherited.get(row.worker, 0)
                if count != row.applied:
                    account.fail(f"{row} in the table, and {count} were applied")
        self._check_acknowledged(life, accounts)
        self._check_seen(life, accounts)
        self.counting.check()
        if finished:
            self._check_last_step(accounts)
            self._check_whole(accounts)
        stay = not (self.lost or self.schedule.resizes_workers or self.counts["departed"])
        if self._rule.aggregate == 0 and stay:
            self._check_batches(life, accounts)
        if self._rule.synchronous:
            for account in accounts:
                most = self._rule.aggregate
                for step, number in Counter(account.applied.values()).items():
                    if 0 < most < number:
                        account.fail(f"{number} updates made step {step}, and {most} should")

    def _check_acknowledged(self, life: int, accounts: Sequence[Account]) -> None:
        """What workers were told is so; what is so they were told, if they lived."""
        for who, kind in self.acknowledged.items():
            for account in accounts:
                if who[3] == life and (who in account.applied) != (kind is Applied):
                    account.fail(f"push {who} was acknowledged as {kind.__name__} and is not so")
        unknown = {who for account in accounts for who in account.applied}
        for who in unknown - self.acknowledged.keys():
            if who[:2] not in self.lost:
                raise Violation(f"push {who} was applied, and its live worker never knew")

    def _check_seen(self, life: int, accounts: Sequence[Account]) -> None:
        """Nobody has seen values that are lost, but in an earlier life."""
        for (of, slot, step), told in self._seen.items():
            if of != life:
                continue
            shown = [account.shown_at(slot, step) for account in accounts]
            if told not in shown:
                raise Violation(f"values of step {step} at {slot} were seen and are lost")

    def _check_whole(self, accounts: Sequence[Account]) -> None:
        """No push is on some shards only, whoever died, and each made the same step on all."""
        for account in accounts:
            other = account.applied.items() ^ accounts[0].applied.items()
            if other:
                partly = sorted({who for who, _ in other})
                raise Violation(f"pushes are on one of shards 0 and {account.shard}: {partly}")

    def _check_last_step(self, accounts: Sequence[Account]) -> None:
        """All shards must end at the job's last step.

        A job that is asked to stop ends with the round that is open, however many steps that makes;
        and one whose updates are deltas, each by itself, when a delta has reached the last step.
        """
        steps = [account.step for account in accounts]
        asked = self._rule.max_steps is None or len(self.ends) > 1
        most = self._rule.period - 1 if asked or not self._rule.synchronous else 0
        ends = {end for end in self.ends if 0 <= steps[0] - end <= most} or not self.ends
        if len(set(steps)) > 1 or not ends:
            raise Violation(f"the job ended at steps {steps}; it should at {self.ends}")

    def _check_batches(self, life: int, accounts: Sequence[Account]) -> None:
        """Where nobody was lost or left early, the rounds used examples as one process does."""
        before = accounts[0].dealing.before
        if before != set(range(len(before))):
            return
        position = len(before)
        rounds: dict[int, list[PushId]] = {}
        for who, step in accounts[0].applied.items():
            rounds.setdefault(step, []).append(who)
        for step, members in sorted(rounds.items()):
            spans = [span for who in members for span in self.made[who].spans]
            used = sorted(p for span in spans for p in range(span.start, span.stop))
            if used != list(range(position, position + len(used))):
                raise Violation(f"round {step} used examples {used}, and {position} was next")
            position += len(used)
