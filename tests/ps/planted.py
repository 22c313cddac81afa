"""Shards, servers and clients with one bug each, which the simulator must find.

Some are mistakes that anybody could make; some were in the real code until the simulator met them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from trireme.cluster.view import View
from trireme.ps.commit import CommitFollower, CommitLeader
from trireme.ps.dense import PartBuffer
from trireme.ps.ending import Ending
from trireme.ps.examples import ExampleBook
from trireme.ps.hold import Hold
from trireme.ps.instructions import Instruction, Reply, Send
from trireme.ps.layout import Layout
from trireme.ps.messages import (
    Applied,
    Attach,
    Cut,
    Lease,
    Load,
    Push,
    Retire,
    Retired,
    RoundClose,
    RoundReady,
    Span,
    WorkerProgress,
)
from trireme.ps.push_table import Pending, PushTable, WorkerRecord
from trireme.ps.round import Decision, Follower, Leader, Live, Member, Round
from trireme.ps.shard import Shard, _Answer
from trireme.ps.values import Tensors, Total, ValuesFactory, make_values
from trireme.simulate.client import Client, Lane
from trireme.simulate.server import Route, Server


class AppliesRepeats(Shard):
    """A push that was decided is decided again when it is repeated."""

    def push(
        self, now: float, route: object, push: Push, gradients: PartBuffer
    ) -> list[Instruction]:
        record = self._table.records.get(push.worker)
        if record is not None and push.sequence == record.sequence:
            record.sequence -= 1
        return super().push(now, route, push, gradients)


class AnswersFirst(Shard):
    """A push is answered when it has come, and applied at the next tick."""

    def __init__(self, server: int, factory: ValuesFactory = make_values) -> None:
        super().__init__(server, factory)
        self.postponed: list[Pending] = []

    def _apply_one(self, pending: Pending) -> None:
        self.postponed.append(msgspec.structs.replace(pending, gradients=pending.gradients.copy()))
        self.step += 1
        self._decide(pending, Applied(self.step))
        self._withheld[pending.push.worker] = _Answer(pending, Applied(self.step), 0)

    def tick(self, now: float) -> list[Instruction]:
        for pending in self.postponed:
            assert self._values is not None
            self._values.apply(Total(pending.gradients), None, self.step)
        self.postponed.clear()
        return super().tick(now)


class AppliesStale(Shard):
    """An update for a closed round goes into the open one."""

    def _consider(self, pending: Pending) -> None:
        if pending.push.pulled < self.step:
            pending.push = msgspec.structs.replace(pending.push, pulled=self.step)
        super()._consider(pending)


class IgnoresFence(Shard):
    """Whoever was once in a view may ask for anything."""

    def __init__(self, server: int, factory: ValuesFactory = make_values) -> None:
        super().__init__(server, factory)
        fence = self._roster.fence
        self._roster.fence = lambda worker, incarnation, view: (  # type: ignore[method-assign]
            None if worker in self._table.records else fence(worker, incarnation, view)
        )


class AnswersNobodyDropped(Shard):
    """A worker taken for lost never hears what became of its push."""

    def _drop(self, worker: int) -> list[Reply]:
        super()._drop(worker)
        return []


class RunsAhead(Shard):
    """Nobody is ever too far ahead."""

    def _release(self) -> list[Reply]:
        return [self._answer(self._withheld.pop(worker)) for worker in list(self._withheld)]


class NamesOldStep(Shard):
    """Answers are made before all is done that an event leads to."""

    def _proceed(self) -> list[Instruction]:
        due, self._due = self._due, []
        early = [self._answer(answer) for answer in due]
        return [*early, *super()._proceed()]


class _WithParts(Shard):
    """A shard some of whose collaborators are replaced."""

    book: type[ExampleBook] = ExampleBook
    hold: type[Hold] = Hold
    table: type[PushTable] = PushTable
    ending: type[Ending] = Ending
    leader: type[Leader] = Leader
    follower: type[Follower] = Follower
    commit_leader: type[CommitLeader] = CommitLeader
    commit_follower: type[CommitFollower] = CommitFollower

    def __init__(self, server: int, factory: ValuesFactory = make_values) -> None:
        super().__init__(server, factory)
        self._examples = self.book()
        self._hold = self.hold()
        self._table = self.table()
        self._ending = self.ending(decides=server == 0)

    def _create(self, request: Attach, layout: Any) -> None:
        super()._create(request, layout)
        rule = request.rule
        servers = layout.spec.servers
        self._judge = (
            self.follower(rule, self.server) if self.server else self.leader(rule, servers)
        )
        if self._commits is not None:
            self._commits = (
                self.commit_follower(self.server) if self.server else self.commit_leader(servers)
            )


class _NeverReleases(ExampleBook):
    def release(self, worker: int) -> None:
        pass


class KeepsExamplesOfTheLost(_WithParts):
    """What a worker held when it was started anew is never dealt again."""

    book = _NeverReleases


class _NeverGivesBack(ExampleBook):
    def give_back(self, worker: int, spans: Iterable[Span]) -> None:
        pass


class KeepsExamplesOfTheStale(_WithParts):
    """What a dropped update was computed from stays with its worker."""

    book = _NeverGivesBack


class _DealsAgain(ExampleBook):
    def lease(self, request: Lease) -> tuple[Span, ...]:
        return super().lease(msgspec.structs.replace(request, number=0))


class LosesLeases(_WithParts):
    """A lease that is asked for again gets other examples."""

    book = _DealsAgain


class _HoldsNothing(Hold):
    def holds(self, push: Push) -> bool:
        return False

    def stops_round(self, step: int) -> bool:
        return False


class CutsWithoutHold(_WithParts):
    """Training goes on between freeze and copy."""

    hold = _HoldsNothing


class _ForgetsAll(PushTable):
    def forget_acknowledged(self, push: Push) -> None:
        self.records[push.worker].verdicts.clear()


class ForgetsVerdicts(_WithParts):
    """A verdict is forgotten before the worker has it."""

    table = _ForgetsAll


class _TakesAllOver(PushTable):
    def restore(self, rows: Iterable[WorkerProgress]) -> None:
        self.records = {
            row.worker: WorkerRecord(row.incarnation, row.sequence, clock=row.sequence)
            for row in rows
        }


class TakesSequencesOver(_WithParts):
    """A resumed job goes on counting the pushes of processes that are gone."""

    table = _TakesAllOver


class _CountsNobody(Ending):
    def _others(self, worker: int) -> int:
        return 0


class EndsLate(_WithParts):
    """More updates are let begin than the job has steps left."""

    ending = _CountsNobody


class _WaitsForNobody(Ending):
    def undecided(self, worker: int, step: int) -> bool:
        return False


class EndsEarly(_WithParts):
    """Nobody makes the last updates in the place of workers that are lost with theirs."""

    ending = _WaitsForNobody


class _StopsAtOnce(Ending):
    def stop(self, step: int) -> int:
        self.last = step
        return step


class StopsAtOnce(_WithParts):
    """The job ends while updates are under way."""

    ending = _StopsAtOnce


class _TakesAll(Leader):
    def judge(self, current: Round, live: Live) -> tuple[list[Send], Decision | None]:
        told, decision = super().judge(current, live)
        common = self._common(current, live)
        if decision is None or len(decision.members) == len(common):
            return told, decision
        return self._close(current, Decision(common, 1.0))


class TakesAll(_WithParts):
    """A round takes whatever all servers hold, though fewer make a round."""

    leader = _TakesAll


class _AsksNobody(Leader):
    def _common(self, current: Round, live: Live) -> tuple[Member, ...]:
        return current.held(live)


class _TakesWhatIsThere(Follower):
    def judge(self, current: Round, live: Live) -> tuple[Sequence[Send], Decision | None]:
        decision = self._decision
        if decision is None:
            return [], None
        there = tuple(m for m in decision.members if m in current.pending)
        missing = set(decision.members) - set(there)
        if any(live.get(worker) == start for worker, start in missing):
            return [], None
        return [], Decision(there, decision.scale)


class LeaderDecidesAlone(_WithParts):
    """Server 0 does not ask whether the others have the updates that it counts on."""

    leader = _AsksNobody
    follower = _TakesWhatIsThere


class _ByItself(Follower):
    """Closes its rounds as server 0 would if it were the only one."""

    def judge(self, current: Round, live: Live) -> tuple[Sequence[Send], Decision | None]:
        return Leader(self._rule, 1).judge(current, live)

    def hear(self, step: int, message: RoundClose) -> None:
        pass


class _Alone(Leader):
    def __init__(self, rule: Any, servers: int) -> None:
        super().__init__(rule, 1)


class EachDecidesAlone(_WithParts):
    """Every server closes a round when it has all updates that it expects."""

    leader = _Alone
    follower = _ByItself


class _KeepsNoCopy(Follower):
    def drop(self, current: Round, member: Member) -> None:
        current.pending[member].answered = True


class ReadsOverwrittenGradients(_WithParts):
    """An update is counted on while its worker, which was fenced off, writes the next one there."""

    follower = _KeepsNoCopy


class AppliesAtOnce(Shard):
    """Each server applies an asynchronous push by itself, as one server does."""

    def _create(self, request: Attach, layout: Layout) -> None:
        super()._create(request, layout)
        self._commits = None


class _AsksAnybody(CommitLeader):
    def _lacking(self, pending: Pending) -> list[int]:
        lacking = super()._lacking(pending)
        return lacking if len(lacking) == len(self._others) else []


class _TakesWhatItHas(CommitFollower):
    @property
    def decided(self) -> tuple[Pending, bool] | None:
        while self._decided and self._decided[0][:2] not in self._staged:
            self._decided.popleft()
        return super().decided


class CommitsWithoutAll(_WithParts):
    """Server 0 commits a push that one other server has, and not each."""

    commit_leader = _AsksAnybody
    commit_follower = _TakesWhatItHas


class _ForgetsTheLost(CommitFollower):
    def drop(self, pending: Pending, view: int) -> None:
        self._staged.pop(pending.member)


class DropsWhatItSaidItHas(_WithParts):
    """A server drops a push with its worker, though server 0 may have committed it."""

    commit_follower = _ForgetsTheLost


class _CommitsTheLost(CommitLeader):
    def drop(self, pending: Pending, view: int) -> None:
        pending.answered = True


class CommitsTheLost(_WithParts):
    """Server 0 still commits the push of a worker that is out, which others may have dropped."""

    commit_leader = _CommitsTheLost


class _LendsStill(CommitFollower):
    def drop(self, pending: Pending, view: int) -> None:
        super().drop(pending, view)
        kept = self._staged.get(pending.member)
        if kept is not None:
            self._staged[pending.member] = msgspec.structs.replace(
                kept, gradients=pending.gradients
            )


class AppliesOverwrittenPushes(_WithParts):
    """A push is kept in memory to which its worker, which was fenced off, writes the next one."""

    commit_follower = _LendsStill


class LateCopyTakesTheAnswer(Server):
    """What an old connection still brings counts like what the new one has brought."""

    def receive(self, route: Route, payload: Sequence[Any]) -> None:
        self._newest.clear()
        super().receive(route, payload)


class NeverRepeats(Server):
    """What was said to another server over a connection that broke is not said again."""

    def hear(self, message: Any) -> None:
        self.untold.clear()
        super().hear(message)

    def view(self, view: View) -> None:
        self.untold.clear()
        super().view(view)

    def receive(self, route: Route, payload: Sequence[Any]) -> None:
        self.untold.clear()
        super().receive(route, payload)


class WaitsInOrder(Client):
    """What went wrong with one server is repaired when those before it have answered."""

    def retry(self, lane: Lane) -> None:
        before = self.lanes[: self.lanes.index(lane)]
        if any(other.request is not None for other in before):
            self.network.loop.after(0.1, lambda: self.retry(lane))
        else:
            super().retry(lane)


class LoadsTwice(Shard):
    """A repeated load, or that of a chief that takes over late, begins the values anew."""

    def load(self, now: float, route: object, request: Load, tensors: Tensors) -> list[Instruction]:
        self.loaded = False
        return super().load(now, route, request, tensors)


class WaitsForTheRetired(Shard):
    """Who trains no more is waited for."""

    def retire(self, now: float, route: object, request: Retire) -> list[Instruction]:
        return [Reply(route, Retired())]


class AppliesWhatTheLostHadHeld(Shard):
    """What a cut held back is decided after it, though its worker is out by then."""

    def _consider(self, pending: Pending) -> None:
        record = self._table.records[pending.push.worker]
        record.pending = pending
        super()._consider(pending)


class CutsTooEarly(Shard):
    """A copy does not wait for what other servers have decided."""

    def cut(self, now: float, route: object, request: Cut) -> list[Instruction]:
        return super().cut(now, route, msgspec.structs.replace(request, step=0, decided=()))


class ForgetsWhatWasConsumed(Shard):
    """A resumed job deals examples again that are in the values."""

    def load(self, now: float, route: object, request: Load, tensors: Tensors) -> list[Instruction]:
        request = msgspec.structs.replace(request, consumed=())
        return super().load(now, route, request, tensors)


class RepeatsGoUnanswered(Shard):
    """A worker that asks again while its answer is withheld is answered where it asked first."""

    def push(
        self, now: float, route: object, push: Push, gradients: PartBuffer
    ) -> list[Instruction]:
        record = self._table.records.get(push.worker)
        waiting = None if record is None else record.pending
        kept = None if waiting is None else waiting.route
        out = super().push(now, route, push, gradients)
        if waiting is not None and record is not None and record.pending is waiting:
            waiting.route = kept
        return out


class AppliesWithoutCounting(Shard):
    """An update that is applied under a staleness bound or without one makes no step."""

    def _apply_one(self, pending: Pending) -> None:
        super()._apply_one(pending)
        if pending.push.sequence % 5 == 0:
            self.step -= pending.push.steps


class _KeepsSequences(PushTable):
    def admit(self, worker: int, incarnation: int, clock: int) -> WorkerRecord:
        sequence = self.records[worker].sequence if worker in self.records else 0
        record = super().admit(worker, incarnation, clock)
        record.sequence = max(record.sequence, sequence)
        return record


class KeepsSequences(_WithParts):
    """A worker that was started anew goes on with the numbers of the process before."""

    table = _KeepsSequences


class _KeepsVerdicts(PushTable):
    def admit(self, worker: int, incarnation: int, clock: int) -> WorkerRecord:
        record = self.records.setdefault(worker, WorkerRecord())
        kept = dict(record.verdicts)
        pushed = record.sequence
        super().admit(worker, incarnation, clock)
        if incarnation > 1 and kept and not record.sequence:
            record.verdicts, record.sequence = kept, min(1, pushed)
        return record


class AnswersForTheProcessBefore(_WithParts):
    """A new process's first push gets the verdict of the old one's."""

    table = _KeepsVerdicts


class _BeginsAtZero(PushTable):
    def admit(self, worker: int, incarnation: int, clock: int) -> WorkerRecord:
        return super().admit(worker, incarnation, 10**6)


class NewcomersAreAhead(_WithParts):
    """A newcomer counts as further than everybody: it waits for the others, and nobody for it."""

    table = _BeginsAtZero


class _ClosesAnother(Follower):
    def hear(self, step: int, message: RoundClose) -> None:
        super().hear(message.step, message)


class ClosesAnotherRound(_WithParts):
    """A decision on one round is taken for one on the next."""

    follower = _ClosesAnother


class _HearsOld(Leader):
    def hear(self, step: int, message: RoundReady) -> list[Send]:
        return super().hear(message.step, message)


class HearsOfOldRounds(_WithParts):
    """What a server has said of an earlier round counts for the open one."""

    leader = _HearsOld


class _KeepsHeard(Leader):
    def begin(self) -> None:
        self._proposed = ()


class RemembersTheRoundBefore(_WithParts):
    """What servers held in one round they are believed to hold in the next."""

    leader = _KeepsHeard


class _Lane(Lane):
    def _hear(self, route: Route, message: Any, payload: Sequence[Any]) -> None:
        self.wire, self._sequence = route.wire, route.sequence
        super()._hear(route, message, payload)


class TakesAnyAnswer(Client):
    """A late answer, of an earlier request or connection, is taken for the one that is due."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.lanes = [_Lane(self, lane._server) for lane in self.lanes]
