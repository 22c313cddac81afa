"""The shard: one server's whole behaviour, without sockets, threads, or a clock of its own.

Events come in as method calls, each with the time it happens at; instructions go out as a list.
The server, the simulator, the tests and a lone process all drive this same object.

    event                      what it is
    view                       the coordinator's newest view
    attach, load, pull, push   what workers ask
    lease, stop, set_end       what workers ask of server 0: examples, and when to end
    freeze, cut, thaw          a consistent cut over all servers, for checkpoints and evaluation
    round_ready, round_close   what servers tell each other when server 0 decides the rounds
    staged, committed          the same where it decides asynchronous pushes
    last_pushes                the same where each server applies them by itself
    tick                       time passes

After an event, once its instructions are carried out, `go_on` is called as long as something is
`due`: what other servers must hear of before this one does it.

Whoever drives the shard says who makes a request, or which server says something, as the handshake
of the connection has proven it.

A request is answered once, by one `Reply` to the route it came with. A push is decided once, by
(worker, incarnation, sequence); its verdict is written down together with the change of the
values, and a repeat gets the same verdict.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch

from trireme.cluster.view import View
from trireme.errors import (
    ConfigurationError,
    ModelMismatchError,
    TriremeError,
    UnsupportedOptimizerError,
)
from trireme.ps.flat import PartBuffer
from trireme.ps.layout import Layout
from trireme.ps.messages import (
    Applied,
    Attach,
    Attached,
    Collect,
    Collected,
    Cut,
    Drain,
    Duplicate,
    FencedVerdict,
    Freeze,
    Frozen,
    GroupSpec,
    LastPushes,
    Lease,
    Leased,
    Load,
    Loaded,
    OptimizerSpec,
    Pull,
    PullReply,
    Push,
    PushesCommitted,
    PushesStaged,
    PushReply,
    Refused,
    RejectedVerdict,
    Retire,
    Retired,
    RoundClose,
    RoundReady,
    ServerStatus,
    SetEnd,
    Share,
    Shared,
    Snapshot,
    Stale,
    Status,
    StopJob,
    Stopping,
    Thaw,
    Thawed,
    Verdict,
    Waiting,
)
from trireme.ps.optimizers import misfit
from trireme.ps.published_values import Publication
from trireme.ps.rule import Rule
from trireme.ps.shard.commit import CommitFollower, CommitLeader, Commits
from trireme.ps.shard.dedup import Pending, PushTable, WorkerRecord
from trireme.ps.shard.example_ledgers import ExampleBook
from trireme.ps.shard.half_applied import HalfApplied
from trireme.ps.shard.instructions import Instruction, Reply, Send
from trireme.ps.shard.parameters import Tensors, Total, Values, ValuesFactory, make_values
from trireme.ps.shard.participants import Participant, Participants
from trireme.ps.shard.rounds import Decision, Follower, Judge, Leader, Round
from trireme.ps.shard.snapshot_barrier import SnapshotBarrier
from trireme.ps.termination import Ending
from trireme.wire.codec import make_codec

__all__ = ["FREEZE_SECONDS", "NOTICE_SECONDS", "Shard", "Wait"]

NOTICE_SECONDS = 5.0
"""How often a worker whose answer is withheld is told for whom it waits."""

_MOST_TOPICS = 4096
_ONLOOKERS = 64

FREEZE_SECONDS = 60.0
"""After this long a cut that was not completed is given up, and training goes on."""


class _Answer(msgspec.Struct, frozen=True):
    """The answer to a push, but for what is only known when it goes out."""

    pending: Pending
    verdict: Verdict
    staleness: int


class _WithheldPull(msgspec.Struct, frozen=True):
    """A pull that is not answered yet: whose, where the answer goes, and since when it waits."""

    owner: Participant
    route: object
    pull: Pull
    since: float


_Settings = tuple[Mapping[str, object], ...]
"""Hyper-parameters by name, group by group."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A worker whose answer is withheld, and what it is told about it from time to time."""

    worker: int
    notice: Waiting


class Shard:
    """One server's part of the parameters and all that is decided about it.

    Args:
        server: this server's index; server 0 also deals examples and decides when the job ends.
        factory: how to make the values once the first worker has shown its model.

    Attributes:
        due: whether `go_on` is to be called before the next event.
    """

    def __init__(self, server: int, factory: ValuesFactory = make_values) -> None:
        self.server = server
        self.step = 0
        self.loaded = False
        self.due = False
        self.layout: Layout | None = None
        self.rule = Rule()
        self._synchronous = False  # the rule's: asked several times a push
        self.counters: Counter[str] = Counter()
        self._factory = factory
        self._values: Values | None = None
        self._publication: Publication | None = None
        self._scratch: PartBuffer | None = None
        self._optimizer = OptimizerSpec("", ())
        self._shown_by = ""
        self._settled: _Settings = ()  # the hyper-parameters of the last round, group by group
        self._notice = ""  # what the answers of that round say besides
        self._participants = Participants()
        self._table = PushTable()
        self._round = Round(0, self._spare)
        self._judge: Judge = Leader(self.rule, 1)
        self._commits: Commits | None = None  # of asynchronous pushes, where servers are several
        self._half_applied: HalfApplied | None = None  # counts them, where nobody commits
        self._ending = Ending(decides=server == 0)
        self._examples = ExampleBook()
        self._barrier = SnapshotBarrier()
        self._shared: dict[str, dict[int, torch.Tensor]] = {}
        # Whose answers are withheld, or due when the event under way is over.
        self._due: list[_Answer] = []
        self._withheld: dict[int, _Answer] = {}
        self._unloaded: list[_WithheldPull] = []
        self._lagging: list[_WithheldPull] = []
        self._draining: list[tuple[object, float]] = []
        self._noticed = 0.0

    # -- membership -----------------------------------------------------------------------------

    def view(self, now: float, view: View) -> list[Instruction]:
        """Takes the coordinator's newest view: who lives, and who must be waited for no longer."""
        if view.number <= self._participants.view.number:
            return []
        staying = self._participants.take(view)
        clock = self._table.slowest(staying & self._participants.live.keys())
        out: list[Instruction] = []
        for worker in sorted(self._table.records.keys() - staying):
            out += self._drop(worker)
        for worker, incarnation in self._participants.incarnations.items():
            self._table.admit(worker, incarnation, clock)
        self._examples.members(tuple(self._participants.incarnations))
        out += self._fence_pulls()
        out += self._abandon_cut("the view has changed")
        if self._half_applied is not None:
            out += self._half_applied.taken(view.number)
            self.counters["half_applied"] = self._half_applied.count
        return [*out, *self._proceed()]

    def _drop(self, worker: int) -> list[Reply]:
        """A worker left or was started anew: nothing it had begun counts any longer."""
        record = self._table.records[worker]
        answers = [self._withheld.pop(worker).pending] if worker in self._withheld else []
        if record.pending is not None:
            answers.append(record.pending)
            if self._round.pending.get(record.pending.owner) is record.pending:
                self._judge.drop(self._round, record.pending.owner)
            if self._commits is not None:
                self._commits.drop(record.pending, self._participants.view.number)
            record.pending = None
        if self._half_applied is not None:
            who, number = Participant(worker, record.incarnation), self._participants.view.number
            self._half_applied.left(who, record.sequence, number)
        self._ending.done(worker)
        self._examples.release(worker)
        return [self._fenced(pending) for pending in answers]

    def _fenced(self, pending: Pending) -> Reply:
        """Answers a push whose worker is out."""
        self.counters["fenced"] += 1
        reason = self._participants.fence(pending.owner, pending.push.view)
        verdict = FencedVerdict(self._participants.view.number, reason or "it was taken for lost")
        return Reply(pending.route, PushReply(verdict, self.step, 0, False))

    def _fence_pulls(self) -> list[Reply]:
        """Sends back who waits for first values, as the chief may be another; and who is out."""
        out = [each for each in self._lagging if not self._participants.holds(each.owner)]
        self._lagging = [each for each in self._lagging if each not in out]
        fenced, self._unloaded = [*self._unloaded, *out], []
        return [self._refused(each.route, "fenced", "the view has changed") for each in fenced]

    def _refused(self, route: object, code: str, reason: str) -> Reply:
        return Reply(route, Refused(code, reason, self._participants.view.number))

    # -- what workers ask -----------------------------------------------------------------------

    def attach(
        self, now: float, route: object, who: Participant, request: Attach
    ) -> list[Instruction]:
        """A worker shows its model. The first creates the shard, the others must agree."""
        reason = self._participants.fence(who, request.view)
        if reason is not None:
            return [self._refused(route, "fenced", reason)]
        try:
            self._agree(f"worker:{who.worker}", request)
        except ModelMismatchError as error:
            return [self._refused(route, "mismatch", str(error))]
        except UnsupportedOptimizerError as error:
            return [self._refused(route, "optimizer", str(error))]
        except ConfigurationError as error:
            return [self._refused(route, "rejected", str(error))]
        except RuntimeError as error:  # of torch: there is no memory for the model
            return [self._refused(route, "rejected", f"the model cannot be made here: {error}")]
        return [Reply(route, Attached(self.loaded, self.step))]

    def _agree(self, task: str, request: Attach) -> None:
        layout = Layout(request.layout)
        servers = len(self._participants.view.servers) or layout.spec.servers
        if not self.server < layout.spec.servers == servers:
            raise ConfigurationError(
                f"{task} lays its model out over {layout.spec.servers} servers, and the job has "
                f"{servers}"
            )
        if self.layout is None:
            self._create(task, request, layout)
            return
        self.layout.check_same(layout, whose=self._shown_by, others=task)
        if request.rule != self.rule:
            raise ModelMismatchError(
                f"the strategies differ: {self._shown_by} trains by {_shown(self.rule)}, {task} by "
                f"{_shown(request.rule)}; start every task with the same options"
            )
        if request.optimizer.names != self._optimizer.names:
            raise ModelMismatchError(
                f"the optimizers differ: {_listed(self._optimizer)} at {self._shown_by}, "
                f"{_listed(request.optimizer)} at {task}"
            )

    def _create(self, task: str, request: Attach, layout: Layout) -> None:
        rule = request.rule
        rule.check()
        self._values = self._factory(layout, self.server, request.optimizer, rule.average)
        codec = make_codec(rule.codec) if rule.publishes else None
        if codec is not None:
            self._publication = Publication(codec, layout, self.server, self._buffer)
        self.layout, self.rule, self._synchronous = layout, rule, rule.synchronous
        self._optimizer, self._shown_by = request.optimizer, task
        self._settled = tuple(group.values for group in request.optimizer.groups)
        self._ending.synchronous = rule.synchronous
        self._ending.period = rule.period
        self._ending.patient = not rule.synchronous and (
            rule.staleness is None or layout.spec.servers == 1
        )
        if rule.max_steps is not None:
            self._ending.set_last(self.step, rule.max_steps)
        self._examples.interleave = rule.synchronous and rule.aggregate == 0
        servers = layout.spec.servers
        self._judge = Follower(rule) if self.server else Leader(rule, servers)
        if not rule.synchronous and servers > 1 and rule.uncommitted:
            self._half_applied = HalfApplied(self.server, servers)
        elif not rule.synchronous and servers > 1:
            self._commits = CommitFollower() if self.server else CommitLeader(servers)

    def load(
        self, now: float, route: object, who: Participant, request: Load, tensors: Tensors
    ) -> list[Instruction]:
        """The chief's first values, or a checkpoint's."""
        reason = self._participants.fence(who, request.view)
        if reason is not None:
            return [self._refused(route, "fenced", reason)]
        if self._values is None:
            reason = "nothing was attached yet, so there is nothing to load values into"
            return [self._refused(route, "rejected", reason)]
        if self.loaded:  # a repeat, or a chief that took over too late
            return [Reply(route, Loaded(self.step))]
        if any(span.stop < span.start for span in request.consumed):
            return [self._refused(route, "rejected", "examples end before they begin")]
        try:
            self._values.load(tensors)
        except (TriremeError, RuntimeError, TypeError, ValueError) as error:
            return [self._refused(route, "rejected", str(error))]
        self.step, self.loaded = request.step, True
        if self._publication is not None:
            self._publication.begin(self.step, tensors)
        self._round = Round(self.step, self._spare)
        self._table.restore(request.workers)
        for worker, incarnation in self._participants.incarnations.items():
            self._table.admit(worker, incarnation, 0)
        self._examples.restore(request.consumed, request.sizes)
        self._lagging += self._unloaded
        self._unloaded = []
        return [Reply(route, Loaded(self.step)), *self._catch_up()]

    def pull(self, now: float, route: object, who: Participant, request: Pull) -> list[Instruction]:
        """Asks for the values; withheld until they are loaded."""
        reason = self._participants.fence(who, request.view)
        if reason is not None:
            return [self._refused(route, "fenced", reason)]
        # A worker waits for one answer at a time: it has given up those that it asked for before.
        withheld = self._lagging if self.loaded else self._unloaded
        withheld[:] = [each for each in withheld if each.owner.worker != who.worker]
        withheld.append(_WithheldPull(who, route, request, now))
        return [*self._catch_up()] if self.loaded else []

    def _pulled(self, each: _WithheldPull) -> Reply:
        if each.pull.train:
            stop = not self._ending.grant(each.owner.worker, self.step)
        else:
            stop = self._ending.reached(self.step)
        values = self._buffer if self._publication is None else self._publication.published
        return Reply(each.route, PullReply(self.step, stop), values.vectors)

    def push(
        self, now: float, route: object, who: Participant, push: Push, gradients: PartBuffer
    ) -> list[Instruction]:
        """A worker's update. `gradients` must stay as they are until the answer is out."""
        refusal = self._refuse(who, push)
        if refusal is not None:
            self.counters[_COUNTERS[type(refusal)]] += 1
            return [Reply(route, PushReply(refusal, self.step, 0, False))]
        record = self._table.records[who.worker]
        self._table.forget_acknowledged(who.worker, push.acknowledged)
        if push.sequence <= record.sequence:
            return self._repeat(route, who, push, record)
        if record.pending is not None:  # the worker came back while its answer is withheld
            record.pending.route = route
            return []
        pending = Pending(who, push, route, gradients, now)
        if not self._synchronous and self._commits is None and self._barrier.token is None:
            return self._decide_at_once(pending)
        record.pending = pending
        self._consider(pending)
        return self._proceed()

    def _decide_at_once(self, pending: Pending) -> list[Instruction]:
        """Decides a push that waits for no other server; answers it, unless its worker waits."""
        over, worker = self._ending.reached(self.step), pending.owner.worker
        answer = self._decide_stale(pending) if over else self._apply_one(pending)
        if not self._withheld and self._may_go_on(worker, self._highest_clock()):
            return [self._answer(answer), *self._proceed()]
        self._withheld[worker] = answer
        return self._proceed()

    def _refuse(self, who: Participant, push: Push) -> Verdict | None:
        reason = self._participants.fence(who, push.view)
        if reason is not None:
            return FencedVerdict(self._participants.view.number, reason)
        reason = self._senseless(who.worker, push)
        return None if reason is None else RejectedVerdict(reason)

    def _senseless(self, worker: int, push: Push) -> str | None:
        """Returns why a push makes no sense; None when it does."""
        record = self._table.records[worker]
        if not self.loaded:
            return "a push came before the values were loaded"
        if push.sequence > record.sequence + 1:
            return (
                f"push {push.sequence} of worker:{worker} came after push {record.sequence}: "
                "the ones between are missing"
            )
        if not 0 <= push.weight < float("inf"):
            return f"a push weighs {push.weight}: it must be finite and 0 or more"
        if not 1 <= push.steps <= self._ending.period:
            return f"a push is of {push.steps} steps, and may be of 1 to {self._ending.period}"
        if self._synchronous and push.pulled > self.step:
            return (
                f"a push for step {push.pulled}, and ps:{self.server} is at {self.step}: pull the "
                "values of one step from all servers"
            )
        if push.absent and (reason := self._nowhere(push.absent)) is not None:
            return reason
        if push.examples and (reason := self._examples.senseless(push.examples)) is not None:
            return reason
        return misfit(self._optimizer, push.hyper) if push.hyper is not None else None

    def _nowhere(self, absent: tuple[int, ...]) -> str | None:
        """Returns why these are no positions of parameters; None when they are."""
        assert self.layout is not None
        count = len(self.layout.spec.parameters)
        if absent[0] < 0 or absent[-1] >= count or list(absent) != sorted(set(absent)):
            return f"a push names absent parameters that are not, ascending, among the {count}"
        return None

    def _repeat(
        self, route: object, who: Participant, push: Push, record: WorkerRecord
    ) -> list[Instruction]:
        self.counters["duplicate"] += 1
        withheld = self._withheld.get(who.worker)
        if withheld is not None and withheld.pending.push.sequence == push.sequence:
            withheld.pending.route = route
            return []
        original = record.verdicts.get(push.sequence)
        if original is None:
            reason = f"push {push.sequence} was decided, and the worker said it knew how"
            return [Reply(route, PushReply(RejectedVerdict(reason), self.step, 0, False))]
        pending = Pending(who, push, route, self._buffer, 0.0)
        return [self._answer(_Answer(pending, Duplicate(original), 0))]

    # -- deciding -------------------------------------------------------------------------------

    def _consider(self, pending: Pending) -> None:
        """Decides a push at once, stages it, puts it into its round, or has it wait for a cut."""
        push = pending.push
        if self._table.records[pending.owner.worker].pending is not pending:
            return  # it was held back, and its worker is out by now
        if self._commits is not None:
            self._commits.add(pending)
            return
        if self._barrier.token is not None and self._barrier.holds(pending):
            self._barrier.later.append(pending)
        elif self._ending.reached(self.step) or (self._synchronous and push.pulled < self.step):
            self._due.append(self._decide_stale(pending))
        elif self._synchronous:
            self._round.add(pending)
        else:
            self._withheld[pending.owner.worker] = self._apply_one(pending)

    def _apply_one(self, pending: Pending) -> _Answer:
        """Applies an update by itself; returns the answer."""
        assert self._values is not None
        push = pending.push
        staleness = self.step - push.pulled
        self.counters["staleness"] += staleness
        update = Total(pending.gradients, 1.0, push.absent) if push.weight > 0 else None
        self.step += push.steps
        self._values.apply(update, push.hyper, self.step, push.steps)
        verdict = Applied(self.step)
        self._decide(pending, verdict)
        return _Answer(pending, verdict, staleness)

    def _decide(self, pending: Pending, verdict: Applied | Stale) -> None:
        owner, push = pending.owner, pending.push
        self._table.decide(owner, push.sequence, verdict)
        if self._participants.holds(owner):
            self._ending.done(owner.worker)
        self.counters[_COUNTERS[type(verdict)]] += 1
        if isinstance(verdict, Applied):
            self._examples.finish(owner.worker, push.examples)
        else:
            self._examples.give_back(owner.worker, push.examples)

    def _decide_stale(self, pending: Pending) -> _Answer:
        verdict = Stale(self.step)
        self._decide(pending, verdict)
        return _Answer(pending, verdict, self.step - pending.push.pulled)

    def _commit(self, commits: Commits) -> Sequence[Send]:
        """Does what is decided of staged pushes, decides the next; returns what to tell others."""
        while (found := commits.decided) is not None:
            pending, applied = found
            if self._barrier.stops_commit(pending, self.step):
                break
            commits.done()
            answer = self._apply_one(pending) if applied else self._decide_stale(pending)
            if not pending.answered:
                self._withheld[pending.owner.worker] = answer
        ready = commits.ready
        self.due = ready is not None and not self._barrier.stops_commit(ready, self.step)
        if self.due:  # the others are told first, and apply it when this server does
            commits.decide(applied=not self._ending.reached(self.step))
        return commits.tell(self._participants.view.number)

    def _close_round(self) -> Sequence[Send]:
        """Takes the open round as far as it goes; returns what to tell the other servers."""
        if self._barrier.token is not None and self._barrier.stops_round(self.step):
            return ()
        told, decision = self._judge.judge(self._round, self._participants.live)
        if decision is not None:
            self._apply_round(decision)
        return told

    def _apply_round(self, decision: Decision) -> None:
        """Applies the round; what came too late for it is stale."""
        assert self._values is not None
        current = self._round
        update = current.update(decision)
        members: list[Pending] = []
        steps = 0
        for member in decision.members:
            pending = current.pending.pop(member)
            members.append(pending)
            steps = max(steps, pending.push.steps)
        hyper = self._settings(members)
        self.step += steps
        self._values.apply(update, hyper, self.step, steps)
        if self._publication is not None:
            self._publication.publish(self.step)
        self.counters["rounds"] += 1
        self._round = Round(self.step, self._spare)
        self._judge.begin()
        for pending in members:
            self._decide(pending, Applied(self.step))
            if not pending.answered:
                self._due.append(_Answer(pending, Applied(self.step), 0))
        for _, pending in sorted(current.pending.items()):
            if not pending.answered:
                self._due.append(self._decide_stale(pending))

    def round_ready(self, now: float, server: int, message: RoundReady) -> list[Instruction]:
        """At server 0: what another server holds."""
        if not isinstance(self._judge, Leader):
            return []
        return [*self._judge.hear(self.step, server, message), *self._proceed()]

    def round_close(self, now: float, server: int, message: RoundClose) -> list[Instruction]:
        """At the others: what server 0 has proposed or decided."""
        if not isinstance(self._judge, Follower):
            return []
        if message.step == self.step and not set(message.members) <= self._round.pending.keys():
            return []  # server 0 counts only on what this one has said that it holds
        self._judge.hear(self.step, message)
        return self._proceed()

    def staged(self, now: float, server: int, message: PushesStaged) -> list[Instruction]:
        """At server 0: which asynchronous pushes another server has."""
        if not isinstance(self._commits, CommitLeader):
            return []
        self._commits.hear(server, message)
        return self._proceed()

    def committed(self, now: float, server: int, message: PushesCommitted) -> list[Instruction]:
        """At the others: what server 0 has decided of them."""
        if not isinstance(self._commits, CommitFollower):
            return []
        self._commits.hear(message)
        return self._proceed()

    def last_pushes(self, now: float, server: int, message: LastPushes) -> list[Instruction]:
        """At server 0: what another server has of workers that are out."""
        if self._half_applied is not None and self.server == 0:
            self._half_applied.hear(server, message)
            self.counters["half_applied"] = self._half_applied.count
        return []

    def go_on(self, now: float) -> list[Instruction]:
        """Does what was `due` when the instructions before were carried out."""
        return self._proceed()

    def _settings(self, members: Sequence[Pending]) -> Sequence[GroupSpec] | None:
        """Returns the hyper-parameters of a round, where they have changed: its first worker's.

        Where the others' are not the same, that is counted, and all are told.
        """
        self._notice = ""
        first = next((each for each in members if each.push.hyper is not None), None)
        if first is None:
            return None
        before = self._settled
        self._settled = _settings_of(first.push, before)
        for other in members:
            settings = _settings_of(other.push, before)
            if settings != self._settled:
                self.counters["disagreements"] += 1
                self._notice = _disagreement(first.owner, self._settled, other.owner, settings)
                break
        return first.push.hyper

    # -- answering ------------------------------------------------------------------------------

    def _proceed(self) -> list[Instruction]:
        """Does all that has become possible, then answers with what it has led to.

        The answers come last, so that the values they carry are of the step that they name.
        """
        out: list[Instruction] = []
        while True:
            if self._synchronous:
                out += self._close_round()
            elif self._commits is not None:
                out += self._commit(self._commits)
            copied = self._complete_cut() if self._barrier.cut is not None else []
            out += copied
            if not copied:  # a copy may have been what stopped a round
                break
        if self._due:
            due, self._due = self._due, []
            out += [self._answer(answer) for answer in due]
        if self._withheld:
            out += self._release()
        if self._lagging:
            out += self._catch_up()
        if self._draining:
            out += self._drained()
        return out

    def _answer(self, answer: _Answer) -> Reply:
        push, route = answer.pending.push, answer.pending.route
        stop = not self._ending.grant(answer.pending.owner.worker, self.step)
        since: int | None = None
        payload: Sequence[torch.Tensor] = self._buffer.vectors if push.pull else ()
        if self._publication is not None and push.pull:
            since, payload = self._publication.since(push.pulled)
        message = PushReply(answer.verdict, self.step, answer.staleness, stop, since, self._notice)
        return Reply(route, message, payload)

    def _release(self) -> list[Reply]:
        """Answers those that may go on. Each answer may leave one update less to the others."""
        highest = self._highest_clock()
        return [
            self._answer(self._withheld.pop(worker))
            for worker in tuple(self._withheld)
            if self._may_go_on(worker, highest)
        ]

    def _highest_clock(self) -> float:
        """Returns how many pushes a worker that is answered may have made: the staleness bound."""
        bound = self.rule.staleness
        if bound is None or self._ending.reached(self.step):
            return math.inf
        return self._table.slowest(self._participants.live) + bound

    def _may_go_on(self, worker: int, highest: float) -> bool:
        """Returns whether a worker is not too far ahead, and it is known if it goes on."""
        ahead = self._table.records[worker].clock > highest
        return not ahead and not self._ending.undecided(worker, self.step)

    def _catch_up(self) -> list[Reply]:
        """Answers pulls for a step that is reached, of whom it is known if they go on."""
        out: list[Reply] = []
        lagging, self._lagging = self._lagging, []
        for each in lagging:
            pull, worker = each.pull, each.owner.worker
            undecided = pull.train and self._ending.undecided(worker, self.step)
            if self.step < pull.at_least or undecided:
                self._lagging.append(each)
            else:
                out.append(self._pulled(each))
        return out

    # -- the end --------------------------------------------------------------------------------

    def stop(self, now: float, route: object, request: StopJob) -> list[Instruction]:
        """Ends the job at the next step at which every worker can."""
        return [Reply(route, Stopping(self._ending.stop(self.step))), *self._proceed()]

    def set_end(self, now: float, route: object, request: SetEnd) -> list[Instruction]:
        """Sets the job's last step where none was known; a later call changes nothing."""
        last = self._ending.set_last(self.step, request.max_steps)
        return [Reply(route, Stopping(last)), *self._proceed()]

    def drain(self, now: float, route: object, request: Drain) -> list[Instruction]:
        """Waits until no worker trains any more, so that the last step is in."""
        if len(self._draining) > 2 * len(self._participants.incarnations) + _ONLOOKERS:
            return [self._refused(route, "busy", "more tasks wait for the end than there are")]
        self._draining.append((route, now))
        return [*self._drained()]

    def _drained(self) -> list[Reply]:
        if not self._draining or self._participants.live:
            return []
        routes, self._draining = [route for route, _ in self._draining], []
        return [Reply(route, Stopping(self.step)) for route in routes]

    def retire(
        self, now: float, route: object, who: Participant, request: Retire
    ) -> list[Instruction]:
        """A worker trains no more, though it stays: nobody shall wait for its updates."""
        if self._participants.holds(who):
            self._participants.retire(who.worker)
            self._ending.done(who.worker)
        return [Reply(route, Retired()), *self._proceed()]

    def lease(
        self, now: float, route: object, who: Participant, request: Lease
    ) -> list[Instruction]:
        """Deals examples."""
        reason = self._participants.fence(who, request.view)
        if reason is not None:
            return [self._refused(route, "fenced", reason)]
        try:
            spans = self._examples.lease(who.worker, request)
        except ValueError as error:
            return [self._refused(route, "rejected", str(error))]
        return [Reply(route, Leased(spans))]

    # -- what workers tell each other -----------------------------------------------------------

    def share(
        self, now: float, route: object, who: Participant, request: Share, payload: torch.Tensor
    ) -> list[Instruction]:
        """Keeps what a worker leaves for the others."""
        if self._participants.holds(who):
            if request.topic not in self._shared and len(self._shared) >= _MOST_TOPICS:
                return [self._refused(route, "rejected", f"workers share {_MOST_TOPICS} topics")]
            self._shared.setdefault(request.topic, {})[who.worker] = payload
        return [Reply(route, Shared())]

    def collect(self, now: float, route: object, request: Collect) -> list[Instruction]:
        """Answers what workers have left under a topic, by worker."""
        left = sorted(self._shared.get(request.topic, {}).items())
        sizes = tuple(tensor.numel() for _, tensor in left)
        message = Collected(tuple(worker for worker, _ in left), sizes)
        return [Reply(route, message, [tensor for _, tensor in left])]

    # -- a consistent cut -----------------------------------------------------------------------

    def freeze(self, now: float, route: object, request: Freeze) -> list[Instruction]:
        """Decides nothing more until `cut` is complete, or `thaw`."""
        if not self.loaded:
            return [self._refused(route, "rejected", "no values are loaded")]
        if self._barrier.token not in (None, request.token):
            return [self._refused(route, "busy", "another cut is under way")]
        self._barrier.begin(request.token, now)
        decided = self._table.decided(self._participants.incarnations)
        return [Reply(route, Frozen(self.step, decided, self._participants.view.number))]

    def cut(self, now: float, route: object, request: Cut) -> list[Instruction]:
        """Decides what other servers have already decided, answers a copy, and goes on."""
        if self._barrier.token != request.token:
            reason = "the cut was given up: it took too long, or its view has changed"
            return [self._refused(route, "busy", reason)]
        self._barrier.cut, self._barrier.route = request, route
        self._replay()
        return self._proceed()

    def thaw(self, now: float, route: object, request: Thaw) -> list[Instruction]:
        """Gives up a cut."""
        out: list[Instruction] = [Reply(route, Thawed())]
        if self._barrier.token == request.token:
            out += self._abandon_cut("it was taken back")
        return [*out, *self._proceed()]

    def _replay(self) -> None:
        """Considers again what was held back."""
        held, self._barrier.later = self._barrier.later, []
        for pending in held:
            self._consider(pending)

    def _abandon_cut(self, reason: str) -> list[Reply]:
        """Gives up a cut under way; who asked for it may ask again."""
        if self._barrier.token is None:
            return []
        asked, route = self._barrier.cut is not None, self._barrier.route
        self._barrier.end()
        self._replay()
        return [self._refused(route, "busy", f"the cut was given up: {reason}")] if asked else []

    def _complete_cut(self) -> list[Reply]:
        cut, route = self._barrier.cut, self._barrier.route
        if cut is None or (self._half_applied is None and self.step < cut.step):
            return []  # what is on some servers only leaves their steps unequal
        decided = dict(self._table.decided(self._participants.incarnations))
        if any(decided[w] < sequence for w, sequence in cut.decided if w in decided):
            return []
        assert self._values is not None
        tensors = self._values.copy(state=cut.state)
        if self._publication is not None and cut.state:
            tensors += self._publication.export()
        snapshot = Snapshot(
            self.step,
            tuple(spec for spec, _ in tensors),
            self._table.export(),
            self._examples.consumed(),
            self._examples.sizes(),
        )
        self._barrier.end()
        self._replay()
        return [Reply(route, snapshot, [tensor for _, tensor in tensors])]

    # -- time, and how things are ---------------------------------------------------------------

    def tick(self, now: float) -> list[Instruction]:
        """Tells those who wait for whom; gives up a cut that takes too long."""
        out: list[Instruction] = []
        if self._barrier.token is not None and now - self._barrier.since > FREEZE_SECONDS:
            out += self._abandon_cut(f"it took more than {FREEZE_SECONDS:.0f} s")
            out += self._proceed()
        if now - self._noticed >= NOTICE_SECONDS:
            self._noticed = now
            out += self._notices(now)
        return out

    def waits(self, now: float) -> tuple[Wait, ...]:
        """Returns whose answers are withheld, and for whom; the longest first."""
        waits = [wait for _, wait in self._withheld_answers(now)]
        return tuple(sorted(waits, key=lambda wait: -wait.notice.seconds))

    def lags(self) -> dict[int, int]:
        """Returns by how many pushes each training worker is behind the one that is furthest."""
        records = self._table.records
        clocks = {worker: records[worker].clock for worker in self._participants.live}
        return {worker: max(clocks.values()) - clock for worker, clock in clocks.items()}

    def _notices(self, now: float) -> list[Instruction]:
        out: list[Instruction] = [
            Reply(route, wait.notice) for route, wait in self._withheld_answers(now)
        ]
        training = tuple(f"worker:{worker}" for worker in sorted(self._participants.live))
        out += [
            Reply(route, Waiting("the last updates", training, now - since))
            for route, since in self._draining
        ]
        return out

    def _withheld_answers(self, now: float) -> Iterator[tuple[object, Wait]]:
        """Yields who waits for an answer, with where it will go, why and for whom."""
        chief = self._participants.view.chief
        initialiser = () if chief is None else (f"worker:{chief}",)
        for each in self._unloaded:
            notice = Waiting("its first values", initialiser, now - each.since)
            yield each.route, Wait(each.owner.worker, notice)
        training = tuple(f"worker:{worker}" for worker in sorted(self._participants.live))
        for each in self._lagging:
            at_least = each.pull.at_least
            reason = f"step {at_least}" if self.step < at_least else "the last updates"
            yield each.route, Wait(each.owner.worker, Waiting(reason, training, now - each.since))
        missing = self._judge.missing(self._round, self._participants.live)
        for pending in self._round.pending.values():
            if not pending.answered:
                notice = Waiting(f"round {self._round.step + 1}", missing, now - pending.since)
                yield pending.route, Wait(pending.owner.worker, notice)
        if self._commits is not None:
            yield from self._staged_alone(self._commits, now)
        if self._withheld:
            yield from self._withheld_by_clock(now)

    def _staged_alone(self, commits: Commits, now: float) -> Iterator[tuple[object, Wait]]:
        """Yields those whose push some server has not staged, or server 0 has not committed."""
        for pending in commits.staged:
            if not pending.answered:
                missing = commits.missing(pending)
                notice = Waiting("a push to reach every server", missing, now - pending.since)
                yield pending.route, Wait(pending.owner.worker, notice)

    def _withheld_by_clock(self, now: float) -> Iterator[tuple[object, Wait]]:
        """Yields those who are too far ahead, or of whom it is not known if they go on."""
        live, bound = self._participants.live, f"staleness bound {self.rule.staleness}"
        slowest = self._table.slowest(live)
        behind = tuple(f"worker:{w}" for w in live if self._table.records[w].clock == slowest)
        last = tuple(f"worker:{worker}" for worker in sorted(self._ending.under_way))
        for worker, answer in self._withheld.items():
            reason, names = bound, behind
            if self._ending.undecided(worker, self.step):
                reason, names = "the last updates", last
            notice = Waiting(reason, names, now - answer.pending.since)
            yield answer.pending.route, Wait(worker, notice)

    def status(self, now: float, route: object, request: Status) -> list[Instruction]:
        """Tells how things are."""
        counters = {name: float(value) for name, value in sorted(self.counters.items())}
        view = self._participants.view.number
        message = ServerStatus(self.step, self.loaded, view, self._table.export(), counters)
        return [Reply(route, message)]

    @property
    def _buffer(self) -> PartBuffer:
        assert self._values is not None
        return self._values.buffer

    def _spare(self) -> PartBuffer:
        """Returns memory for the sum of a round: made when the first round needs it."""
        if self._scratch is None:
            assert self.layout is not None
            self._scratch = PartBuffer(self.layout, self.server)
        return self._scratch


_COUNTERS: dict[type[Verdict], str] = {
    kind: kind.__name__.removesuffix("Verdict").lower()
    for kind in (Applied, Stale, Duplicate, FencedVerdict, RejectedVerdict)
}


def _settings_of(push: Push, before: _Settings) -> _Settings:
    """Returns the hyper-parameters of a push; those of the last round where they are unchanged."""
    return before if push.hyper is None else tuple(group.values for group in push.hyper)


def _disagreement(
    first: Participant, settings: _Settings, other: Participant, others: _Settings
) -> str:
    """Says of what two workers of a round say different things."""
    pairs = zip(settings, others, strict=True)
    name, mine, theirs = next(
        (name, group.get(name), another.get(name))
        for group, another in pairs
        for name in group
        if group.get(name) != another.get(name)
    )
    return (
        f"the workers of a round disagree about {name}: it is {mine} at worker:{first.worker} and "
        f"{theirs} at worker:{other.worker}, and the first counts. Whoever changes it must do so "
        "alike in every worker: let a session do it (scheduler=...), or go by global_step"
    )


def _listed(optimizer: OptimizerSpec) -> str:
    return ", ".join(dict.fromkeys(optimizer.names))


def _shown(rule: Rule) -> str:
    return ", ".join(
        f"{name} {value}"
        for name in rule.__struct_fields__
        if (value := getattr(rule, name)) is not None
    )
