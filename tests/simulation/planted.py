"""Shards, servers and clients with one bug each, which the simulator must find.

Some are mistakes that anybody could make; some were in the real code until the simulator met them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from trireme.cluster.view import View
from trireme.ps.client.lanes import Lane, Lanes, Request, Transmit
from trireme.ps.client.protocol import ClientProtocol
from trireme.ps.flat import PartBuffer
from trireme.ps.messages import Applied, Done, FromServer, Lease, Push, Retire, Span, WorkerProgress
from trireme.ps.replication.dispatcher import Dispatcher
from trireme.ps.server_messages import PushesStaged, RoundClose, RoundReady
from trireme.ps.shard.answers import Answers, PushAnswer
from trireme.ps.shard.commit import CommitFollower, CommitLeader
from trireme.ps.shard.example_ledgers import ExampleLedgers
from trireme.ps.shard.instructions import Instruction, Reply, Send
from trireme.ps.shard.participants import Participant
from trireme.ps.shard.push_decider import PushDecider
from trireme.ps.shard.push_table import Pending, PushTable, WorkerRecord
from trireme.ps.shard.quiet_state import Quiet
from trireme.ps.shard.rounds import Decision, Live, Round, RoundFollower, RoundLeader
from trireme.ps.shard.shard import Shard
from trireme.ps.shard.snapshot_barrier import SnapshotBarrier
from trireme.ps.shard.state import ShardState, ShownModel
from trireme.ps.shard.values.gradient_sums import Total
from trireme.ps.shard.values.parameters import Values, ValuesFactory
from trireme.ps.shard.values.snapshot_tensors import Tensors
from trireme.ps.shard.values.tables import ShardTables
from trireme.ps.snapshot_messages import Cut, Load
from trireme.ps.termination import Ending


class AppliesRepeats(Shard):
    """A push that was decided is decided again when it is repeated."""

    def push(
        self, now: float, route: object, who: Participant, push: Push, gradients: PartBuffer
    ) -> list[Instruction]:
        record = self.state.table.records.get(who.worker)
        if record is not None and push.sequence == record.sequence:
            record.sequence -= 1
        return super().push(now, route, who, push, gradients)


class _WithParts(Shard):
    """A shard some of whose parts are replaced."""

    book: type[ExampleLedgers] = ExampleLedgers
    hold: type[SnapshotBarrier] = SnapshotBarrier
    table: type[PushTable] = PushTable
    ending: type[Ending] = Ending
    answers: type[Answers] = Answers
    decider: type[PushDecider] = PushDecider
    leader: type[RoundLeader] = RoundLeader
    follower: type[RoundFollower] = RoundFollower
    commit_leader: type[CommitLeader] = CommitLeader
    commit_follower: type[CommitFollower] = CommitFollower

    def __init__(self, server: int, factory: ValuesFactory = Values) -> None:
        super().__init__(server, factory)
        self.state.examples = self.book()
        self.state.barrier = self.hold()
        self.state.table = self.table()
        self.state.ending = self.ending(decides=server == 0)
        self._answers = self.answers(self.state)
        self._decider = self.decider(self.state, self._answers)

    def _create(self, shown: ShownModel) -> None:
        super()._create(shown)
        rule, servers, decider = shown.rule, shown.layout.spec.shards, self._decider
        decider._coordinator = self.follower(rule) if self.server else self.leader(rule, servers)
        if decider._commits is not None:
            decider._commits = (
                self.commit_follower() if self.server else self.commit_leader(servers)
            )


class _AppliesLater(PushDecider):
    def __init__(self, state: ShardState, answers: Answers) -> None:
        super().__init__(state, answers)
        self.postponed: list[Pending] = []

    def decide_one(self, pending: Pending, *, applied: bool) -> PushAnswer:
        if not applied:
            return super().decide_one(pending, applied=False)
        self.postponed.append(msgspec.structs.replace(pending, gradients=pending.gradients.copy()))
        self._state.step += 1
        return self._decide(pending, Applied(self._state.step), 0)


class AnswersFirst(_WithParts):
    """A push is answered when it has come, and applied at the next tick."""

    decider = _AppliesLater

    def tick(self, now: float) -> list[Instruction]:
        assert isinstance(self._decider, _AppliesLater)
        for pending in self._decider.postponed:
            assert self.state.values is not None
            self.state.values.apply(Total(pending.gradients), None, self.state.step)
        self._decider.postponed.clear()
        return super().tick(now)


class _TakesStale(PushDecider):
    def consider(self, pending: Pending) -> None:
        if pending.push.pulled < self._state.step:
            pending.push = msgspec.structs.replace(pending.push, pulled=self._state.step)
        super().consider(pending)


class AppliesStale(_WithParts):
    """An update for a closed round goes into the open one."""

    decider = _TakesStale


class IgnoresFence(Shard):
    """Whoever was once in a view may ask for anything."""

    def __init__(self, server: int, factory: ValuesFactory = Values) -> None:
        super().__init__(server, factory)
        fence = self.state.participants.fence
        self.state.participants.fence = lambda who, view: (  # type: ignore[method-assign]
            None if who.worker in self.state.table.records else fence(who, view)
        )


class AnswersNobodyDropped(Shard):
    """A worker taken for lost never hears what became of its push."""

    def _drop(self, worker: int) -> list[Reply]:
        super()._drop(worker)
        return []


class _HoldsNobodyBack(Answers):
    def _highest_clock(self) -> float:
        return math.inf


class RunsAhead(_WithParts):
    """Nobody is ever too far ahead."""

    answers = _HoldsNobodyBack


class NamesOldStep(Shard):
    """Answers are made before all is done that an event leads to."""

    def _proceed(self) -> list[Instruction]:
        due, self._answers.due = self._answers.due, []
        early = [self._answers.reply(answer) for answer in due]
        return [*early, *super()._proceed()]


class _NeverReleases(ExampleLedgers):
    def release(self, worker: int) -> None:
        pass


class KeepsExamplesOfTheLost(_WithParts):
    """What a worker held when it was started anew is never dealt again."""

    book = _NeverReleases


class _NeverGivesBack(ExampleLedgers):
    def give_back(self, worker: int, spans: Iterable[Span]) -> None:
        pass


class KeepsExamplesOfTheStale(_WithParts):
    """What a dropped update was computed from stays with its worker."""

    book = _NeverGivesBack


class _DealsAgain(ExampleLedgers):
    def lease(self, worker: int, request: Lease) -> tuple[Span, ...]:
        return super().lease(worker, msgspec.structs.replace(request, number=0))


class LosesLeases(_WithParts):
    """A lease that is asked for again gets other examples."""

    book = _DealsAgain


class _HoldsNothing(SnapshotBarrier):
    def holds(self, pending: Pending) -> bool:
        return False

    def stops_round(self, step: int) -> bool:
        return False


class CutsWithoutHold(_WithParts):
    """Training goes on between freeze and copy."""

    hold = _HoldsNothing


class _ForgetsAll(PushTable):
    def forget_acknowledged(self, worker: int, acknowledged: int) -> None:
        self.records[worker].verdicts.clear()


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


class _TakesAll(RoundLeader):
    def decide(self, current: Round, live: Live) -> tuple[list[Send], Decision | None]:
        told, decision = super().decide(current, live)
        common = self._common(current, live)
        if decision is None or len(decision.members) == len(common):
            return told, decision
        return self._close(current, Decision(common, 1.0))


class TakesAll(_WithParts):
    """A round takes whatever all servers hold, though fewer make a round."""

    leader = _TakesAll


class _AsksNobody(RoundLeader):
    def _common(self, current: Round, live: Live) -> tuple[Participant, ...]:
        return current.held(live)


class _TakesWhatIsThere(RoundFollower):
    def decide(self, current: Round, live: Live) -> tuple[Sequence[Send], Decision | None]:
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


class _ByItself(RoundFollower):
    """Closes its rounds as server 0 would if it were the only one."""

    def decide(self, current: Round, live: Live) -> tuple[Sequence[Send], Decision | None]:
        return RoundLeader(self._rule, 1).decide(current, live)

    def hear(self, step: int, message: RoundClose) -> None:
        pass


class _Alone(RoundLeader):
    def __init__(self, rule: Any, servers: int) -> None:
        super().__init__(rule, 1)


class EachDecidesAlone(_WithParts):
    """Every server closes a round when it has all updates that it expects."""

    leader = _Alone
    follower = _ByItself


class _KeepsNoCopy(RoundFollower):
    def drop(self, current: Round, member: Participant) -> None:
        current.pending[member].answered = True


class ReadsOverwrittenGradients(_WithParts):
    """An update is counted on while its worker, which was fenced off, writes the next one there."""

    follower = _KeepsNoCopy


class AppliesAtOnce(Shard):
    """Each server applies an asynchronous push by itself, as one server does."""

    def _create(self, shown: ShownModel) -> None:
        super()._create(shown)
        self._decider._commits = None


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
        self._staged.pop(pending.owner)


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
        kept = self._staged.get(pending.owner)
        if kept is not None:
            self._staged[pending.owner] = msgspec.structs.replace(kept, gradients=pending.gradients)


class AppliesOverwrittenPushes(_WithParts):
    """A push is kept in memory to which its worker, which was fenced off, writes the next one."""

    commit_follower = _LendsStill


class LateCopyTakesTheAnswer(Dispatcher[Any]):
    """What an old connection still brings counts like what the new one has brought."""

    def _supersede(self, link: Any) -> None:
        pass


class NeverRepeats(Dispatcher[Any]):
    """What was said to another server over a connection that broke is not said again."""

    def speaks(self, link: Any, shard: int) -> list[FromServer]:
        super().speaks(link, shard)
        return []


class LeadsOverTheFirst(Dispatcher[Any]):
    """A server is talked to over the first connection that it has made."""

    def speaks(self, link: Any, shard: int) -> Any:
        before = dict(self._shards)
        word = super().speaks(link, shard)
        self._shards.update(before)
        return word

    def closed(self, link: Any) -> None:
        pass

    def sender(self, link: Any, message: Any) -> Participant:
        if isinstance(message, FromServer):
            return Participant(link.identity.index, 0)
        return super().sender(link, message)

    def _check_server(self, link: Any) -> None:
        pass


class TakesReadyForClose(Dispatcher[Any]):
    """A late word of one server is led to where those of another belong."""

    def sender(self, link: Any, message: Any) -> Participant:
        if isinstance(message, (RoundReady, PushesStaged)):
            return Participant(1, 0)
        return super().sender(link, message)


class WaitsInOrder(Lanes):
    """What went wrong with one server is repaired when those before it have answered."""

    def tick(self, now: float) -> list[Any]:
        for lane in self.waiting[1:]:
            if lane.due <= now:
                lane.due = now + 0.1
        return super().tick(now)


class LoadsTwice(Shard):
    """A repeated load, or that of a chief that takes over late, begins the values anew."""

    def load(
        self, now: float, route: object, who: Participant, request: Load, tensors: Tensors
    ) -> list[Instruction]:
        self.state.loaded_in = 0
        return super().load(now, route, who, request, tensors)


class WaitsForTheRetired(Shard):
    """Who trains no more is waited for."""

    def retire(
        self, now: float, route: object, who: Participant, request: Retire
    ) -> list[Instruction]:
        return [Reply(route, Done())]


class _KeepsTheLost(PushDecider):
    def consider(self, pending: Pending) -> None:
        self._state.table.records[pending.owner.worker].pending = pending
        super().consider(pending)


class AppliesWhatTheLostHadHeld(_WithParts):
    """What a cut held back is decided after it, though its worker is out by then."""

    decider = _KeepsTheLost


class CutsTooEarly(Shard):
    """A copy does not wait for what other servers have decided."""

    def cut(self, now: float, route: object, request: Cut) -> list[Instruction]:
        return super().cut(now, route, msgspec.structs.replace(request, step=0, decided=()))


class ForgetsWhatWasConsumed(Shard):
    """A resumed job deals examples again that are in the values."""

    def load(
        self, now: float, route: object, who: Participant, request: Load, tensors: Tensors
    ) -> list[Instruction]:
        request = msgspec.structs.replace(request, consumed=())
        return super().load(now, route, who, request, tensors)


class RepeatsGoUnanswered(Shard):
    """A worker that asks again while its answer is withheld is answered where it asked first."""

    def push(
        self, now: float, route: object, who: Participant, push: Push, gradients: PartBuffer
    ) -> list[Instruction]:
        record = self.state.table.records.get(who.worker)
        waiting = None if record is None else record.pending
        kept = None if waiting is None else waiting.route
        out = super().push(now, route, who, push, gradients)
        if waiting is not None and record is not None and record.pending is waiting:
            waiting.route = kept
        return out


class _MakesNoStep(PushDecider):
    def decide_one(self, pending: Pending, *, applied: bool) -> PushAnswer:
        answer = super().decide_one(pending, applied=applied)
        if applied and pending.push.sequence % 5 == 0:
            self._state.step -= pending.push.steps
        return answer


class AppliesWithoutCounting(_WithParts):
    """An update that is applied under a staleness bound or without one makes no step."""

    decider = _MakesNoStep


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


class _ClosesAnother(RoundFollower):
    def hear(self, step: int, message: RoundClose) -> None:
        super().hear(message.step, message)


class ClosesAnotherRound(_WithParts):
    """A decision on one round is taken for one on the next."""

    follower = _ClosesAnother


class _HearsOld(RoundLeader):
    def hear(self, step: int, server: int, message: RoundReady) -> list[Send]:
        return super().hear(message.step, server, message)


class HearsOfOldRounds(_WithParts):
    """What a server has said of an earlier round counts for the open one."""

    leader = _HearsOld


class _KeepsHeard(RoundLeader):
    def begin(self) -> None:
        self._proposed = ()


class RemembersTheRoundBefore(_WithParts):
    """What servers held in one round they are believed to hold in the next."""

    leader = _KeepsHeard


class TakesAnyAnswer(Lanes):
    """A late answer, of an earlier request, is taken for the one that is due."""

    def heard(self, now: float, server: int, sequence: int, *answer: Any) -> Any:
        return super().heard(now, server, self.lanes[server].sequence, *answer)


class NumbersNothing(Lanes):
    """A request has the number of the one before: a late answer to that one is believed."""

    def ask(self, now: float, requests: Any, **options: Any) -> Any:
        for server in requests:
            self.lanes[server].sequence = 0
        return super().ask(now, requests, **options)


class NeverAsksAgain(Lanes):
    """What was under way when a connection broke is not sent again."""

    def broke(self, now: float, server: int, error: Any) -> None:
        super().broke(now, server, error)
        self.lanes[server].due = math.inf


class TakesAnyFence(Lanes):
    """A fence ends the request, though this worker is in the newest view."""

    def heard(self, now: float, server: int, *answer: Any) -> Any:
        self._again = False
        return super().heard(now, server, *answer)


class NeverIsOut(Lanes):
    """Who is out of the job asks on under its old incarnation."""

    def _check_membership(self, number: int, reason: str) -> None:
        pass


class KeepsItsView(Lanes):
    """What was fenced off is asked again under the view that it was asked under first."""

    def ask(self, now: float, requests: Any, **options: Any) -> Any:
        self._first = self.known_view().number
        return super().ask(now, requests, **options)

    def _transmit(self, lane: Lane) -> Transmit:
        order = super()._transmit(lane)
        if not hasattr(order.message, "view"):
            return order
        message = msgspec.structs.replace(order.message, view=self._first)
        return msgspec.structs.replace(order, message=message)


class CountsRepeats(Lanes):
    """A push that is sent again is sent as another one."""

    def _send_again(self, lane: Lane) -> Transmit:
        if lane.request is not None and isinstance(push := lane.request.message, Push):
            another = msgspec.structs.replace(push, sequence=push.sequence + 1)
            lane.request = Request(another, lane.request.payload)
        return super()._send_again(lane)


class CountsTwice(ClientProtocol):
    """A sequence number is used for two pushes, now and then."""

    def next_push(self, *said: Any, **options: Any) -> Push:
        if self._sequence % 3 == 2:
            self._sequence -= 1
        return super().next_push(*said, **options)


class AcknowledgesTooEarly(ClientProtocol):
    """A worker says that it has the verdict of the push that it makes."""

    def next_push(self, *said: Any, **options: Any) -> Push:
        update = super().next_push(*said, **options)
        return msgspec.structs.replace(update, acknowledged=update.sequence)


class KeepsSettingsOfTheStale(ClientProtocol):
    """Hyper-parameters that were dropped with a stale update are not sent again."""

    def wait(self) -> Any:
        kept = self._hyper
        result = yield from super().wait()
        self._hyper = kept
        return result


class KeepsSettingsOfTheOneBefore(ClientProtocol):
    """Hyper-parameters are sent once, though they change."""

    def next_push(self, weight: float, hyper: Any, examples: Any, **options: Any) -> Push:
        return super().next_push(weight, self._hyper or hyper, examples, **options)


class NeverLevels(ClientProtocol):
    """A worker computes from values of different steps."""

    def level(self, steps: list[int]) -> Any:
        return steps[0]
        yield


class AsksBeforeItSettles(ClientProtocol):
    """A worker asks for something else while its push is under way, and forgets that."""

    def settle(self) -> Any:
        return
        yield


class LeasesWithOneNumber(ClientProtocol):
    """Every lease says that it is the one before."""

    def lease(self, *said: Any, **options: Any) -> Any:
        self._leases = 0
        return super().lease(*said, **options)


class CutsWhatTheLastHas(ClientProtocol):
    """A copy is of what the last server has decided, though others have decided more."""

    def freeze(self, token: int) -> Any:
        frozen = yield from super().freeze(token)
        return frozen and frozen[-1:]


class MovesNoRows(Shard):
    """Rows of tables are lost where the shards are divided anew."""

    def resume(self, now: float, view: View, quiet: Quiet) -> list[Instruction]:
        return super().resume(now, view, msgspec.structs.replace(quiet, tables=quiet.tables and ()))


class _AllRows(Round):
    def _rows(self, members: tuple[Participant, ...], scale: float = 1.0) -> Any:
        for member in members:
            pending = self.pending[member]
            pending.push = msgspec.structs.replace(pending.push, weight=1.0)
        return super()._rows(members, scale)


class _TakesAllRows(PushDecider):
    def _new_round(self) -> Round:
        made = super()._new_round()
        return _AllRows(made.step, made.spare, made.tables)


class CountsRowsOfTheEmpty(_WithParts):
    """The rows of a push that weighs nothing are updated too."""

    decider = _TakesAllRows


class _PullsOnce(ShardTables):
    def pull(self, wanted: Any) -> Any:
        self.kept = getattr(self, "kept", None) or super().pull(wanted)
        return self.kept


class AnswersWithOldRows(Shard):
    """Answers carry the rows of the first one."""

    def _create(self, shown: ShownModel) -> None:
        super()._create(shown)
        if self.state.tables is not None:
            self.state.tables.__class__ = _PullsOnce


class _CopiesFirst(ShardTables):
    def apply(self, updates: Any, step: int) -> None:
        self.before = super().copy()
        super().apply(updates, step)

    def copy(self, since: int | None = None, *, shown: bool = True) -> Any:
        now = super().copy(since, shown=shown)
        return getattr(self, "before", now) if shown else now


class CopiesRowsLater(Shard):
    """A copy has the rows of the update before."""

    def _create(self, shown: ShownModel) -> None:
        super()._create(shown)
        if self.state.tables is not None:
            self.state.tables.__class__ = _CopiesFirst
