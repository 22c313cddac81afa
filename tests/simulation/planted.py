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
from trireme.ps.client.operations import Pause
from trireme.ps.client.protocol import ClientProtocol
from trireme.ps.flat import PartBuffer
from trireme.ps.leader.decisions import Apply, Decided, Decision, Held, PushId
from trireme.ps.leader.ending import Ending
from trireme.ps.leader.example_ledgers import ExampleLedgers
from trireme.ps.leader.leader import Leader, Live
from trireme.ps.messages import (
    Applied,
    Done,
    FencedVerdict,
    FromServer,
    Lease,
    Leased,
    Push,
    PushReply,
    Retire,
    Span,
    WorkerProgress,
)
from trireme.ps.replication.dispatcher import Dispatcher
from trireme.ps.rule import Rule
from trireme.ps.shard.additions import Additions
from trireme.ps.shard.answers import Answers, PushAnswer
from trireme.ps.shard.execution import Updates
from trireme.ps.shard.follower import Follower
from trireme.ps.shard.instructions import Instruction, Reply
from trireme.ps.shard.participants import Participant
from trireme.ps.shard.push_table import Pending, PushTable, WorkerRecord
from trireme.ps.shard.quiet_state import Quiet
from trireme.ps.shard.shard import Shard
from trireme.ps.shard.snapshots import Snapshots
from trireme.ps.shard.state import ShardState
from trireme.ps.shard.values.parameters import Values, ValuesFactory
from trireme.ps.shard.values.snapshot_tensors import Tensors
from trireme.ps.snapshot_messages import Load, TakeSnapshot
from trireme.wire.message import Message


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
    table: type[PushTable] = PushTable
    ending: type[Ending] = Ending
    leader: type[Leader] = Leader
    replies: type[Answers] = Answers
    changes: type[Updates] = Updates
    follows: type[Follower] = Follower
    holds: type[Snapshots] = Snapshots
    adds: type[Additions] = Additions

    def __init__(self, server: int, factory: ValuesFactory = Values) -> None:
        super().__init__(server, factory)
        self.state.table = self.table()
        if self.state.leader is not None:
            self.state.leader = self.leader()
            self.state.leader.examples = self.book()
            self.state.leader.ending = self.ending()
        execution = self.execution
        execution.answers = self.replies(self.state)
        execution.updates = self.changes(self.state, execution.answers)
        execution.follower = self.follows()
        execution.snapshots = self.holds(self.state)
        execution.additions = self.adds(self.state, factory, execution.follower.held)


class _AppliesLater(Updates):
    def __init__(self, state: ShardState, answers: Answers) -> None:
        super().__init__(state, answers)
        self.postponed: list[Pending] = []

    def apply(self, pending: Pending, step: int) -> PushAnswer:
        self.postponed.append(msgspec.structs.replace(pending, gradients=pending.gradients.copy()))
        nothing = msgspec.structs.replace(pending.push, weight=0.0)
        return super().apply(msgspec.structs.replace(pending, push=nothing), step)


class AnswersFirst(_WithParts):
    """A push is answered when it has come, and applied at the next tick."""

    changes = _AppliesLater

    def tick(self, now: float) -> list[Instruction]:
        assert isinstance(self.execution.updates, _AppliesLater)
        for pending in self.execution.updates.postponed:
            assert self.state.values is not None
            self.state.values.optimizer.step(pending.gradients)
        self.execution.updates.postponed.clear()
        return super().tick(now)


class AppliesStale(Shard):
    """An update for a closed round goes into the open one."""

    def push(
        self, now: float, route: object, who: Participant, push: Push, gradients: PartBuffer
    ) -> list[Instruction]:
        if push.pulled < self.state.step:
            push = msgspec.structs.replace(push, pulled=self.state.step)
        return super().push(now, route, who, push, gradients)


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

    def view(self, now: float, view: View) -> list[Instruction]:
        return [
            each
            for each in super().view(now, view)
            if not (
                isinstance(each, Reply)
                and isinstance(each.message, PushReply)
                and isinstance(each.message.verdict, FencedVerdict)
            )
        ]


class _MeasuresFromTheFurthest(PushTable):
    def slowest(self) -> int:
        return max(self.clocks.values(), default=0)


class RunsAhead(_WithParts):
    """Nobody is ever too far ahead."""

    table = _MeasuresFromTheFurthest


class _NamesOldStep(Answers):
    def reply(self, answer: PushAnswer) -> Reply:
        made = super().reply(answer)
        assert isinstance(made.message, PushReply)
        old = msgspec.structs.replace(made.message, step=answer.pending.push.pulled)
        return msgspec.structs.replace(made, message=old)


class NamesOldStep(_WithParts):
    """An answer names the step before the update that it tells of, and carries the values after."""

    replies = _NamesOldStep


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
    def lease(self, worker: int, request: Lease) -> Leased:
        return super().lease(worker, msgspec.structs.replace(request, number=0))


class LosesLeases(_WithParts):
    """A lease that is asked for again gets other examples."""

    book = _DealsAgain


class CutsWithoutHold(_WithParts):
    """Each shard copies the values that it has when it is asked."""

    def snapshot(
        self, now: float, route: object, who: Participant, request: TakeSnapshot
    ) -> list[Instruction]:
        refused = self.execution.snapshots.ask(now, route, who, request)
        if refused is not None:
            return [Reply(route, refused)]
        return [*self.execution.snapshots.make(who.worker, request.token)]


class CutsTooEarly(Shard):
    """A shard other than the leader's copies the values that it has when it is asked."""

    def snapshot(
        self, now: float, route: object, who: Participant, request: TakeSnapshot
    ) -> list[Instruction]:
        out = super().snapshot(now, route, who, request)
        held = self.execution.snapshots.tokens.get(who.worker)
        return (
            out
            if held is None or not self.number
            else [*out, *self.execution.snapshots.make(who.worker, held)]
        )


class _ForgetsAll(PushTable):
    def forget_acknowledged(self, worker: int, acknowledged: int) -> None:
        self.records[worker].verdicts.clear()


class ForgetsVerdicts(_WithParts):
    """A verdict is forgotten before the worker has it."""

    table = _ForgetsAll


class _TakesAllOver(PushTable):
    def restore(self, rows: Iterable[WorkerProgress]) -> None:
        self.records = {row.worker: WorkerRecord(row.incarnation, row.sequence) for row in rows}


class TakesSequencesOver(_WithParts):
    """A resumed job goes on counting the pushes of processes that are gone."""

    table = _TakesAllOver


class _CountsNobody(Ending):
    def undecided(self, worker: int, step: int) -> bool:
        return False

    def grant(self, worker: int, step: int) -> bool:
        return not self.reached(step)


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


class _Believing(Leader):
    """A leader that can be made to believe that shards hold what they have not reported."""

    def __init__(self) -> None:
        super().__init__()
        self.own: dict[PushId, int] = {}
        self.reported: dict[int, Held] = {}

    def begin(self, rule: Rule, shards: int, step: int) -> None:
        super().begin(rule, shards, step)
        self.others = range(1, shards)

    def hold(self, push: PushId, steps: int) -> None:
        self.own[push] = steps
        super().hold(push, steps)

    def hear(self, shard: int, message: Held) -> None:
        self.reported[shard] = message
        super().hear(shard, message)

    def believe(self, shard: int, *pushes: PushId) -> None:
        """Takes pushes as if a shard had reported them."""
        snapshots = self.reported[shard].snapshots if shard in self.reported else ()
        super().hear(shard, Held(0, pushes, snapshots))


class _TakesAll(_Believing):
    def write(self, decision: Decision) -> Decision:
        if isinstance(decision, Apply):
            common = set(self.own)
            for message in self.reported.values():
                common &= set(message.pushes)
            step = min(push[2] for push in decision.pushes)
            more = {push for push in common if push[2] == step} if self.others else set()
            pushes = tuple(sorted({*decision.pushes, *more}))
            decision = msgspec.structs.replace(decision, pushes=pushes)
        return super().write(decision)


class TakesAll(_WithParts):
    """A round takes whatever all servers hold, though fewer make a round."""

    leader = _TakesAll


class _AsksNobody(_Believing):
    def hold(self, push: PushId, steps: int) -> None:
        for shard in self.others:
            self.believe(shard, push)
        super().hold(push, steps)


class _TakesWhatIsThere(Follower):
    def hear(self, message: Decided) -> None:
        new = message.decisions[max(self.known - message.first, 0) :]
        decisions = tuple(
            msgspec.structs.replace(each, pushes=self._there(each.pushes))
            if isinstance(each, Apply)
            else each
            for each in new
        )
        first = max(self.known, message.first)
        super().hear(msgspec.structs.replace(message, first=first, decisions=decisions))

    def _there(self, pushes: Sequence[PushId]) -> tuple[PushId, ...]:
        held = {pending.id for pending in self.held.values()}
        return tuple(push for push in pushes if push in held)


class LeaderDecidesAlone(_WithParts):
    """The leader does not ask whether the others have the updates that it counts on."""

    leader = _AsksNobody
    follows = _TakesWhatIsThere


class _Alone(Leader):
    def begin(self, rule: Rule, shards: int, step: int) -> None:
        super().begin(rule, 1, step)

    def view(self, view: View, live: Live) -> None:
        super().view(msgspec.structs.replace(view, shards=view.shards[:1]), live)


class EachDecidesAlone(_WithParts):
    """Every shard decides by itself, as one shard does."""

    leader = _Alone

    def __init__(self, server: int, factory: ValuesFactory = Values) -> None:
        super().__init__(server, factory)
        self.state.leader = self.leader()


class _KeepsNoCopy(Follower):
    def drop(self, pending: Pending, view: int, *, leads: bool) -> None:
        super().drop(pending, view, leads=leads)
        kept = self.held.get(pending.owner)
        if kept is not None:
            self.held[pending.owner] = msgspec.structs.replace(kept, gradients=pending.gradients)


class ReadsOverwrittenGradients(_WithParts):
    """An update is counted on while its worker, which was fenced off, writes the next one there."""

    follows = _KeepsNoCopy


class _AsksAnybody(_Believing):
    def hear(self, shard: int, message: Held) -> None:
        super().hear(shard, message)
        for other in self.others:
            if other != shard:
                self.believe(other, *message.pushes)


class CommitsWithoutAll(_WithParts):
    """The leader commits a push that one other shard has, and not each."""

    leader = _AsksAnybody
    follows = _TakesWhatIsThere


class _ForgetsTheLost(Follower):
    def drop(self, pending: Pending, view: int, *, leads: bool) -> None:
        super().drop(pending, view, leads=True)


class DropsWhatItSaidItHas(_WithParts):
    """A shard drops a push with its worker, though the leader may have decided to apply it."""

    follows = _ForgetsTheLost


class _CommitsTheLost(Leader):
    def drop(self, push: PushId) -> None:
        pass


class _KeepsAll(Follower):
    def drop(self, pending: Pending, view: int, *, leads: bool) -> None:
        if not leads:
            super().drop(pending, view, leads=False)
        elif self.held.get(pending.owner) is pending:
            self.held[pending.owner] = pending.kept()


class CommitsTheLost(_WithParts):
    """The leader still commits the push of a worker that is out, which others may have dropped."""

    leader = _CommitsTheLost
    follows = _KeepsAll


class _KeepsTheLost(Follower):
    def drop(self, pending: Pending, view: int, *, leads: bool) -> None:
        pass


class AppliesWhatTheLostHadHeld(_WithParts):
    """What was held is decided and answered, though its worker is out by then."""

    leader = _CommitsTheLost
    follows = _KeepsTheLost


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
        before = dict(self.speakers)
        word = super().speaks(link, shard)
        self.speakers.update(before)
        return word

    def closed(self, link: Any) -> None:
        pass

    def sender(self, link: Any, message: Any) -> Participant:
        if isinstance(message, FromServer):
            return Participant(link.identity.index, 0)
        return super().sender(link, message)


class TakesReadyForClose(Dispatcher[Any]):
    """A late word of one server is led to where those of another belong."""

    def sender(self, link: Any, message: Any) -> Participant:
        if isinstance(message, Held):
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

    def load(self, who: Participant, request: Load, tensors: Tensors) -> Message:
        self.state.loaded_in = 0
        return super().load(who, request, tensors)


class WaitsForTheRetired(Shard):
    """Who trains no more is waited for."""

    def retire(self, who: Participant, request: Retire, _: None = None) -> Message:
        return Done()


class ForgetsWhatWasConsumed(Shard):
    """A resumed job deals examples again that are in the values."""

    def load(self, who: Participant, request: Load, tensors: Tensors) -> Message:
        return super().load(who, msgspec.structs.replace(request, consumed=()), tensors)


class RepeatsGoUnanswered(Shard):
    """A worker that asks again while its answer is withheld is answered where it asked first."""

    def push(
        self, now: float, route: object, who: Participant, push: Push, gradients: PartBuffer
    ) -> list[Instruction]:
        waiting = self.execution.follower.held.get(who)
        kept = None if waiting is None else waiting.route
        out = super().push(now, route, who, push, gradients)
        if waiting is not None and self.execution.follower.held.get(who) is waiting:
            waiting.route = kept
        return out


class _MakesNoStep(Updates):
    def __init__(self, state: ShardState, answers: Answers) -> None:
        super().__init__(state, answers)
        self.of = state

    def apply(self, pending: Pending, step: int) -> PushAnswer:
        answer = super().apply(pending, step)
        if isinstance(answer.verdict, Applied) and pending.push.sequence % 5 == 0:
            self.of.step -= pending.push.steps
        return answer


class AppliesWithoutCounting(_WithParts):
    """An update that is applied under a staleness bound or without one makes no step."""

    changes = _MakesNoStep


class _KeepsSequences(PushTable):
    def admit(self, worker: int, incarnation: int) -> WorkerRecord:
        sequence = self.records[worker].sequence if worker in self.records else 0
        record = super().admit(worker, incarnation)
        record.sequence = max(record.sequence, sequence)
        return record


class KeepsSequences(_WithParts):
    """A worker that was started anew goes on with the numbers of the process before."""

    table = _KeepsSequences


class _KeepsVerdicts(PushTable):
    def admit(self, worker: int, incarnation: int) -> WorkerRecord:
        record = self.records.setdefault(worker, WorkerRecord())
        kept = dict(record.verdicts)
        pushed = record.sequence
        super().admit(worker, incarnation)
        if incarnation > 1 and kept and not record.sequence:
            record.verdicts, record.sequence = kept, min(1, pushed)
        return record


class AnswersForTheProcessBefore(_WithParts):
    """A new process's first push gets the verdict of the old one's."""

    table = _KeepsVerdicts


class _BeginsAhead(PushTable):
    def count(self, members: Sequence[tuple[int, int]]) -> None:
        before = self.clocks
        self.clocks = {who: before.get(who, 10**6) for who in members}


class NewcomersAreAhead(_WithParts):
    """A newcomer counts as further than everybody: it waits for the others, and nobody for it."""

    table = _BeginsAhead


class _ClosesAnother(Follower):
    def hear(self, message: Decided) -> None:
        held = {who: pending.id for who, pending in self.held.items()}
        decisions = tuple(
            msgspec.structs.replace(each, pushes=tuple(held.get(p[:2], p) for p in each.pushes))  # type: ignore[call-overload]
            if isinstance(each, Apply)
            else each
            for each in message.decisions
        )
        again = msgspec.structs.replace(message, first=self.known, decisions=decisions)
        super().hear(again)


class ClosesAnotherRound(_WithParts):
    """A decision on one round is taken for one on the next."""

    follows = _ClosesAnother


class _HearsOld(_Believing):
    def hear(self, shard: int, message: Held) -> None:
        super().hear(shard, message)
        workers = {push[:2] for push in message.pushes}
        self.believe(shard, *(push for push in self.own if push[:2] in workers))


class HearsOfOldRounds(_WithParts):
    """What a server has said of an earlier round counts for the open one."""

    leader = _HearsOld


class _KeepsHeard(_Believing):
    def hold(self, push: PushId, steps: int) -> None:
        super().hold(push, steps)
        for shard, message in self.reported.items():
            if push[:2] in {each[:2] for each in message.pushes}:
                self.believe(shard, push)


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
        push = super().next_push(*said, **options)
        if push.sequence % 3 == 0:
            push = msgspec.structs.replace(push, sequence=push.sequence - 1)
        return push


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

    def next_push(self, *said: Any, **options: Any) -> Push:
        options["hyper"] = self._hyper or options["hyper"]
        return super().next_push(*said, **options)


class NeverLevels(ClientProtocol):
    """A worker computes from values of different steps."""

    def level(self, steps: list[int], *, train: bool = True) -> Any:
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


class JoinsTwoCopies(ClientProtocol):
    """A copy is of what the first server has at one point, and the others at another."""

    def snapshot(self, **options: Any) -> Any:
        first = yield from super().snapshot(**options)
        yield Pause(0.1)
        second = yield from super().snapshot(**options)
        return first[:1] + second[1:]


class _AddsWhenAsked(Additions):
    def ask(self, *said: Any) -> list[Reply]:
        out = super().ask(*said)
        return out or self.make(*self.tokens[-1])


class AddsAtOnce(_WithParts):
    """Parameters are added when the shard is asked to, not where the leader decides."""

    adds = _AddsWhenAsked


class _TakesTheLostForLive(Additions):
    def take_routes(self, *, absent: bool = False) -> list[object]:
        return [] if absent else super().take_routes()


class AnswersRequestsOfTheLost(_WithParts):
    """A worker that was started again is taken to have what the one before it has added."""

    adds = _TakesTheLostForLive


class MovesNoRows(Shard):
    """Rows of tables are lost where the shards are divided anew."""

    def resume(self, now: float, view: View, quiet: Quiet) -> list[Instruction]:
        return super().resume(now, view, msgspec.structs.replace(quiet, extra=quiet.extra and ()))
