"""The shard: one server's whole behaviour, without sockets, threads, or a clock of its own.

Events come in as method calls, each with its time; instructions go out as a list. The server, the
simulator, the tests and a lone process all drive this same object.

    event                      what it is
    view                       the coordinator's newest view
    attach, load, pull, push   requests of workers
    snapshot                   a request for a copy, which all shards make at one point
    lease, stop, ...           requests to shard 0, for what the leader keeps
    heard                      at shard 0, what another shard holds; at others, the leader's
                               decisions
    tick                       time passes

Every shard carries out the same sequence of decisions, which the leader writes at shard 0. When the
instructions of an event are carried out, the driver calls `go_on` while `due` holds: other shards
must hear of a decision before this shard carries it out.

The driver names the participant that makes a request, or the server that sends a message, as the
handshake of the connection has proven it.

A request is answered once, by one `Reply` to the route it came with. A push is decided once, by
(worker, incarnation, sequence). Its verdict is recorded together with the change of the values, and
a repeat gets the same verdict.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

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
from trireme.ps.leader.decisions import (
    Apply,
    Cut,
    Decided,
    Decision,
    Divide,
    Held,
    Measure,
    PushId,
    Stop,
)
from trireme.ps.leader.leader import needed_for
from trireme.ps.messages import (
    Attach,
    Attached,
    Collect,
    Collected,
    Done,
    Drain,
    Duplicate,
    FencedVerdict,
    FromServer,
    Lease,
    Pull,
    PulledRows,
    PullRows,
    Push,
    PushReply,
    Refused,
    RejectedVerdict,
    Retire,
    ServerStatus,
    Share,
    Status,
    StopJob,
    Stopping,
    Waiting,
)
from trireme.ps.shard.answers import Answers, PushAnswer, Wait
from trireme.ps.shard.copies import Copies
from trireme.ps.shard.follower import Follower
from trireme.ps.shard.instructions import Instruction, Reply, Send, Stopped
from trireme.ps.shard.participants import Participant
from trireme.ps.shard.push_table import Pending
from trireme.ps.shard.quiet_state import Quiet
from trireme.ps.shard.state import ShardState, ShownModel
from trireme.ps.shard.updates import Updates
from trireme.ps.shard.values.parameters import Values, ValuesFactory
from trireme.ps.shard.values.snapshot_tensors import Tensors
from trireme.ps.snapshot_messages import Load, Loaded, TakeSnapshot, WriteValues

if TYPE_CHECKING:
    from trireme.ps.shard.values.tables import ShardTables

NOTICE_SECONDS = 5.0
"""How often a worker whose answer is withheld is told for whom it waits."""

_CODES = {ModelMismatchError: "mismatch", UnsupportedOptimizerError: "optimizer"}

_MOST_TOPICS = 4096

_NOT_THE_LEADER = "only shard 0 is asked that, which has the leader"


class Shard:
    """One server's part of the parameters, and all decisions about it.

    Args:
        factory: makes the values once the first worker has shown its model.
    """

    def __init__(self, server: int, factory: ValuesFactory = Values) -> None:
        self.server = server
        self._factory = factory
        self.state = ShardState(server)  # the shard's state. Only the shard changes it.
        # its parts
        self.answers = Answers(self.state)
        self.updates = Updates(self.state, self.answers)
        self.follower = Follower()
        self.copies = Copies(self.state)
        self._stopped_in = 0  # the number of the view for which it has stopped last
        self._noticed = 0.0
        self.due = False  # whether `go_on` is to be called before the next event

    # -- membership ------------------------------------------------------------------------------

    def view(self, now: float, view: View) -> list[Instruction]:
        """Takes the coordinator's newest view: nobody waits any longer for workers that are out."""
        state = self.state
        participants, table = state.participants, state.table
        if view.number <= participants.view.number:
            return []
        staying = participants.take(view)
        clock = table.slowest(staying & participants.live.keys())
        out: list[Instruction] = []
        for worker in sorted(table.records.keys() - staying):
            out += self._drop(worker)
        self._admit(clock)
        out += [
            self._refused(route, "fenced", "the view has changed")
            for route in self.answers.take_fenced_pulls()
        ]
        return [*out, *self.copies.drop_absent(), *self._lead(view), *self._proceed()]

    def _lead(self, view: View) -> Sequence[Instruction]:
        """Shows the leader a view, where this shard has it."""
        if (leader := self.state.leader) is not None:
            leader.view(view)
            leader.examples.members(tuple(self.state.participants.live))
        return ()

    def _admit(self, clock: int) -> None:
        for worker, incarnation in self.state.participants.incarnations.items():
            self.state.table.admit(worker, incarnation, clock)

    def _drop(self, worker: int) -> list[Reply]:
        """Drops what a worker that is out, or was started anew, had begun; answers its push."""
        record, withheld = self.state.table.records[worker], self.answers.withheld
        unanswered = [withheld.pop(worker).pending] if worker in withheld else []
        if record.pending is not None:
            unanswered.append(record.pending)
        leader = self.state.leader
        if record.pending is not None:
            view = self.state.participants.view.number
            self.follower.drop(record.pending, view, leads=leader is not None)
            self.updates.forget_mean()
            if leader is not None:
                leader.drop(record.pending.id)
            record.pending = None
        if leader is not None:
            leader.ending.done(worker)
            leader.examples.release(worker)
        return [self._fenced(pending) for pending in unanswered]

    def _fenced(self, pending: Pending) -> Reply:
        """Returns the answer to a push whose worker is out."""
        participants = self.state.participants
        reason = participants.fence(pending.owner, pending.push.view) or "it was taken for lost"
        verdict = FencedVerdict(participants.view.number, reason)
        return self._refused_push(pending.route, verdict, "fenced")

    def _refused_push(
        self, route: object, verdict: FencedVerdict | RejectedVerdict, counter: str
    ) -> Reply:
        self.state.counters[counter] += 1
        return Reply(route, PushReply(verdict, self.state.step, 0, False))

    def _fence(self, route: object, who: Participant, view: int) -> list[Instruction]:
        """Returns the answer to a request that is fenced off; nothing where it is not."""
        reason = self.state.participants.fence(who, view)
        return [] if reason is None else [self._refused(route, "fenced", reason)]

    def _refused(self, route: object, code: str, reason: str) -> Reply:
        return Reply(route, Refused(code, reason, self.state.participants.view.number))

    # -- what workers ask ------------------------------------------------------------------------

    def attach(
        self, now: float, route: object, who: Participant, request: Attach
    ) -> list[Instruction]:
        """Takes a worker's model: the first creates the values, the others must be the same."""
        if fenced := self._fence(route, who, request.view):
            return fenced
        try:
            self._agree(f"worker:{who.worker}", request)
        except (ModelMismatchError, UnsupportedOptimizerError, ConfigurationError) as error:
            return [self._refused(route, _CODES.get(type(error), "rejected"), str(error))]
        except RuntimeError as error:  # of torch: there is no memory for the model
            return [self._refused(route, "rejected", f"the model cannot be made here: {error}")]
        state = self.state
        return [Reply(route, Attached(state.loaded, state.step, state.participants.view.number))]

    def _agree(self, task: str, request: Attach) -> None:
        state, layout = self.state, Layout(request.layout)
        view = state.participants.view
        bounds = view.bounds if view.shards else layout.spec.bounds
        servers = layout.spec.shards if view.shards else len(view.servers) or layout.spec.shards
        wrong = layout.spec.bounds != bounds or layout.spec.shards != servers
        if wrong or not self.server < layout.spec.shards:
            raise ConfigurationError(
                f"{task} lays its model out in {layout.spec.shards} shards that begin at the slots "
                f"{layout.spec.bounds[:-1]}, and the job has {len(bounds) - 1}, at {bounds[:-1]}"
            )
        shown = ShownModel(task, layout, request.optimizer, request.rule, request.tables)
        if state.shown is None:
            self._create(shown)
        else:
            state.shown.check_same(shown)

    def _create(self, shown: ShownModel) -> None:
        state, rule, layout = self.state, shown.rule, shown.layout
        rule.check()
        state.values = self._factory(layout, self.server, shown.optimizer, rule)
        state.tables = _tables_of(shown, self.server)
        state.shown, state.rule, state.synchronous = shown, rule, rule.synchronous
        self.updates.begin(shown)
        if (leader := state.leader) is not None:
            leader.begin(rule, layout.spec.shards)
            if rule.max_steps is not None:
                leader.ending.set_last(state.step, rule.max_steps)

    def load(
        self, now: float, route: object, who: Participant, request: Load, tensors: Tensors
    ) -> list[Instruction]:
        """Loads the chief's first values, or a checkpoint's.

        A chief of a later view replaces the values of an earlier chief. It loads only if shard 0
        has no values, so the earlier chief did not finish, and no worker received its values.
        """
        state = self.state
        if fenced := self._fence(route, who, request.view):
            return fenced
        if state.values is None:
            reason = "nothing was attached yet, so there is nothing to load values into"
            return [self._refused(route, "rejected", reason)]
        if state.loaded_in >= request.view:  # a repeat
            return [Reply(route, Loaded(state.step))]
        if any(span.stop < span.start for span in request.consumed):
            return [self._refused(route, "rejected", "examples end before they begin")]
        try:
            state.values.load(request.step, tensors)
            if state.tables is not None:
                state.tables.load(tensors, request.step)
        except (TriremeError, RuntimeError, TypeError, ValueError) as error:
            return [self._refused(route, "rejected", str(error))]
        state.step, state.loaded_in = request.step, request.view
        self.updates.load()
        state.table.restore(request.workers)
        self._admit(0)
        if (leader := state.leader) is not None:
            leader.loaded = True
            leader.examples.restore(request.consumed, request.sizes, request.orders)
        return [Reply(route, Loaded(state.step)), *self._proceed()]

    def write_values(
        self,
        now: float,
        route: object,
        who: Participant,
        request: WriteValues,
        tensors: Tensors,
    ) -> list[Instruction]:
        """Replaces values by those that a worker's program has written."""
        state = self.state
        if fenced := self._fence(route, who, request.view):
            return fenced
        if state.values is None or not state.loaded:
            return [self._refused(route, "rejected", "no values are loaded yet: pull them first")]
        if state.synchronous and state.rule.aggregate:
            reason = "with --aggregate a worker that is late would overwrite the values of others"
            return [self._refused(route, "rejected", reason)]
        state.values.write(tensors)
        return [Reply(route, Done())]

    def pull(self, now: float, route: object, who: Participant, request: Pull) -> list[Instruction]:
        """Answers with the values, once they are loaded."""
        if fenced := self._fence(route, who, request.view):
            return fenced
        return [*self.answers.pull(now, route, who, request)]

    def pull_rows(
        self, now: float, route: object, who: Participant, request: PullRows
    ) -> list[Instruction]:
        """Answers with the rows of keys, as they are now."""
        if fenced := self._fence(route, who, request.view):
            return fenced
        state = self.state
        reason = None if state.loaded else "no values are loaded yet: pull them first"
        if reason is None:
            reason = state.rows_misfit(request.wanted)
        if reason is not None:
            return [self._refused(route, "rejected", reason)]
        assert state.tables is not None
        return [Reply(route, PulledRows(state.step, state.tables.pull(request.wanted)))]

    def push(
        self, now: float, route: object, who: Participant, push: Push, gradients: PartBuffer
    ) -> list[Instruction]:
        """Takes a worker's update. `gradients` must stay as they are until the answer is sent."""
        state = self.state
        reason = state.participants.fence(who, push.view)
        if reason is not None:
            fenced = FencedVerdict(state.participants.view.number, reason)
            return [self._refused_push(route, fenced, "fenced")]
        reason = state.senseless(who.worker, push) or self.updates.unlike(push)
        if reason is not None:
            return [self._refused_push(route, RejectedVerdict(reason), "rejected")]
        state.table.forget_acknowledged(who.worker, push.acknowledged)
        record, pending = state.table.records[who.worker], Pending(who, push, route, gradients, now)
        if push.sequence <= record.sequence:
            return [*self._repeat(pending)]
        if record.pending is not None:  # the worker came back while its answer is withheld
            record.pending.route = route
            return []
        if self._decides_at_once:
            if state.over:
                answer = self.updates.stale(pending)
            else:
                answer = self.updates.apply(pending, state.step + push.steps)
            return [*self.answers.give(answer), *self._proceed()]
        record.pending = pending
        if state.over or (state.synchronous and push.pulled < state.step):
            self.answers.due.append(self.updates.stale(pending))
        else:
            self.follower.hold(pending)
            self.updates.note(pending)
            if state.leader is not None:
                state.leader.hold(pending.id, push.steps)
        return self._proceed()

    @property
    def _decides_at_once(self) -> bool:
        """Whether a push that comes now is decided by itself, as no other shard must have it."""
        state = self.state
        alone = state.leader is not None and state.leader.alone
        return alone and not state.synchronous and not self.stopped

    def overfull(self, who: Participant, push: Push) -> str | None:
        """Returns why the tables have no room for the rows of a new push; None where they have.

        A primary asks before it writes the push to its log: a replica that is being filled has too
        few rows to tell.
        """
        state = self.state
        record = state.table.records.get(who.worker)
        if not push.rows or state.tables is None or record is None:
            return None
        if push.sequence <= record.sequence or state.senseless(who.worker, push) is not None:
            return None
        return state.tables.overfull(push.rows)

    def _repeat(self, pending: Pending) -> Sequence[Instruction]:
        """Answers a push that was decided before with its first verdict."""
        worker, sequence, state = pending.owner.worker, pending.push.sequence, self.state
        state.counters["duplicate"] += 1
        withheld = self.answers.withheld.get(worker)
        if withheld is not None and withheld.pending.push.sequence == sequence:
            withheld.pending.route = pending.route
            return []
        original = state.table.records[worker].verdicts.get(sequence)
        if original is None:
            reason = f"push {sequence} was decided, and the worker said it knew how"
            rejected = PushReply(RejectedVerdict(reason), state.step, 0, False)
            return [Reply(pending.route, rejected)]
        return self.answers.give_again(PushAnswer(pending, Duplicate(original), 0))

    def lease(
        self, now: float, route: object, who: Participant, request: Lease
    ) -> list[Instruction]:
        """Leases examples to a worker."""
        if fenced := self._fence(route, who, request.view):
            return fenced
        if (leader := self.state.leader) is None:
            return [self._refused(route, "rejected", _NOT_THE_LEADER)]
        try:
            leased = leader.examples.lease(who.worker, request)
        except ValueError as error:
            return [self._refused(route, "rejected", str(error))]
        held = self.follower.held
        if self.state.synchronous and held and who not in held:
            leased = msgspec.structs.replace(leased, awaited=True)
        return [Reply(route, leased)]

    # -- the leader's decisions ------------------------------------------------------------------

    def heard(self, now: float, server: int, message: FromServer) -> list[Instruction]:
        """Takes what another shard holds, or what the leader has decided.

        A message that is not for this shard changes nothing.
        """
        leader = self.state.leader
        if isinstance(message, Held) and leader is not None:
            leader.hear(server, message)
        elif isinstance(message, Decided) and leader is None:
            self.follower.hear(message)
        return self._proceed()

    def go_on(self, now: float) -> list[Instruction]:
        """Carries out what was `due`."""
        return self._proceed()

    def _proceed(self) -> list[Instruction]:
        """Carries out all decisions that have come, then makes the answers that can go out.

        The answers come last: the values that they carry are of the step that they name.
        """
        self.due, state = False, self.state
        out, leader = self._follow(), state.leader
        if leader is None:
            out += self._report()
            return [*out, *self.answers.proceed()]
        while not self.follower.decided:
            live, copies = state.participants.live, self.copies.tokens
            decision = leader.decide(state.step, live, copies, self._square)
            if decision is None:
                break
            self.follower.append(decision)
            if not leader.alone:  # the others are told first, and carry it out when this shard does
                self.due = True
                break
            out += self._follow()
        if not leader.alone:
            told = leader.tell(state.participants.view.number)
            out += [Send(shard, message) for shard, message in told]
        return [*out, *self.answers.proceed()]

    def _follow(self) -> list[Instruction]:
        """Carries out the decisions that have come, in their order."""
        out, follower, view = list[Instruction](), self.follower, self.state.participants.view
        while follower.decided:
            decision = follower.decided[0]
            if isinstance(decision, Divide) and decision.view >= view.number:
                # Another view lets the shard go on; one that is behind has to take this one first.
                if decision.view == view.number != self._stopped_in:
                    self._stopped_in = view.number
                    out.append(Stopped(view.number))
                break
            follower.decided.popleft()
            out += self._carry_out(decision)
        return out

    def _carry_out(self, decision: Decision) -> Sequence[Instruction]:
        state, follower = self.state, self.follower
        if isinstance(decision, Apply):
            members = [follower.take(push) for push in decision.pushes]
            if state.synchronous:
                late = follower.take_all()
                self.updates.apply_round(members, decision.scale, decision.step, late)
            else:
                for pending in members:
                    answer = self.updates.apply(pending, decision.step)
                    if not pending.answered:
                        self.answers.withheld[pending.owner.worker] = answer
        elif isinstance(decision, Measure):
            follower.propose(decision.pushes)
        elif isinstance(decision, Cut):
            return self.copies.make(decision.worker, decision.token)
        elif isinstance(decision, Stop):
            state.over = True
            self.updates.drop_stale(follower.take_all())
        return ()

    def _report(self) -> Sequence[Send]:
        """Returns what to report to the leader at shard 0."""
        rule, live = self.state.rule, self.state.participants.live
        square = self._square if rule.clip_norm is not None else None
        copies = self.copies.tokens.items()
        held = self.follower.report(needed_for(rule, live), live, copies, square)
        return [Send(0, message) for message in held]

    def _square(self, pushes: Sequence[PushId]) -> float:
        held = self.follower.held
        return self.updates.square([held[Participant(*push[:2])] for push in pushes])

    @property
    def stopped(self) -> bool:
        """Whether the shard has stopped to be divided anew: its state is quiet."""
        return 0 < self._stopped_in == self.state.participants.view.number

    # -- the end ---------------------------------------------------------------------------------

    def stop(self, now: float, route: object, request: StopJob) -> list[Instruction]:
        """Ends the job at the next step at which every worker can."""
        if (leader := self.state.leader) is None:
            return [self._refused(route, "rejected", _NOT_THE_LEADER)]
        last = leader.ending.stop(self.state.step)
        return [Reply(route, Stopping(last)), *self._proceed()]

    def drain(
        self, now: float, route: object, who: Participant, request: Drain
    ) -> list[Instruction]:
        """Answers when no worker trains any more: the last step is made then."""
        if not self.answers.drain(now, route, who):
            return [self._refused(route, "busy", "more tasks wait for the end than there are")]
        return [*self.answers.proceed()]

    def retire(
        self, now: float, route: object, who: Participant, request: Retire
    ) -> list[Instruction]:
        """Notes that a worker trains no more, though it stays: nobody waits for its updates.

        Others are dealt the examples that it holds.
        """
        state = self.state
        if state.participants.holds(who):
            state.participants.retire(who.worker)
            if state.leader is not None:
                state.leader.ending.done(who.worker)
                state.leader.examples.members(tuple(state.participants.live))
        return [Reply(route, Done()), *self._proceed()]

    # -- what workers share ----------------------------------------------------------------------

    def share(
        self, now: float, route: object, who: Participant, request: Share, payload: torch.Tensor
    ) -> list[Instruction]:
        """Keeps bytes that a worker shares with the others; without any forgets the topic."""
        if (leader := self.state.leader) is None:
            return [self._refused(route, "rejected", _NOT_THE_LEADER)]
        topics = leader.topics
        if self.state.participants.holds(who):
            if not payload.numel():
                topics.pop(request.topic, None)
                return [Reply(route, Done())]
            if request.topic not in topics and len(topics) >= _MOST_TOPICS:
                return [self._refused(route, "rejected", f"workers share {_MOST_TOPICS} topics")]
            topics.setdefault(request.topic, {})[who.worker] = payload
        return [Reply(route, Done())]

    def collect(self, now: float, route: object, request: Collect) -> list[Instruction]:
        """Answers with the bytes that workers have shared under a topic."""
        leader = self.state.leader
        left = sorted(leader.topics.get(request.topic, {}).items()) if leader else []
        sizes = tuple(tensor.numel() for _, tensor in left)
        message = Collected(tuple(worker for worker, _ in left), sizes)
        return [Reply(route, message, [tensor for _, tensor in left])]

    # -- a consistent copy -----------------------------------------------------------------------

    def snapshot(
        self, now: float, route: object, who: Participant, request: TakeSnapshot
    ) -> list[Instruction]:
        """Takes a request for a copy, which is made where the leader decides."""
        refused = self.copies.ask(now, route, who, request)
        if refused is not None:
            return [Reply(route, refused)]
        self.follower.note_news()
        return self._proceed()

    # -- the shards are divided anew -------------------------------------------------------------

    def dismiss(self, view: int) -> list[Reply]:
        """Returns answers to all that is not answered, as other shards take over: ask them."""
        routes = [pending.route for pending in self._unanswered()]
        fenced = FencedVerdict(view, "the shards were divided anew")
        out = [Reply(route, PushReply(fenced, self.state.step, 0, False)) for route in routes]
        others = [*self.answers.take_pulls(), *self.answers.take_drains()]
        others += self.copies.take_routes()
        return out + [Reply(r, Refused("fenced", fenced.reason, view)) for r in others]

    def _unanswered(self) -> Iterator[Pending]:
        for answer in self.answers.withheld.values():
            yield answer.pending
        for record in self.state.table.records.values():
            if record.pending is not None:
                yield record.pending

    def resume(self, now: float, view: View, quiet: Quiet) -> list[Instruction]:
        """Goes on where other shards have stopped; call it instead of the first `view`.

        Workers may have left since the shards stopped, in a view that this server never takes:
        what they had begun is dropped as in `view`.

        Args:
            quiet: the quiet state of the shards before, whose tensors cover this shard. Its tables
                are taken over.
        """
        state, before = self.state, quiet.state
        state.participants.take(view)
        here = state.participants.incarnations
        known = {record.worker: record.incarnation for record in before.records}
        gone = {worker for worker, incarnation in known.items() if here.get(worker) != incarnation}
        state.participants.retire(*(w for w in before.retired if w not in gone))
        layout = Layout(before.layout).divided(view.bounds)
        self._create(ShownModel(before.task, layout, before.optimizer, before.rule, before.tables))
        assert state.values is not None
        state.values.load(before.step, quiet.tensors)
        if state.tables is not None:
            state.tables.resume(quiet.tables, before.step)
        # A chief that finds other shards without values replaces these: its view is later than 1.
        state.step, state.loaded_in = before.step, 1
        self.updates.load()
        state.table.resume(before.records)
        state.counters.update(before.counters)
        if (leader := state.leader) is not None:
            leader.loaded = True
            leader.ending.resume(before.last, before.under_way)
            leader.examples.resume(before.examples)
            for (topic, worker, _), data in zip(before.topics, quiet.topics, strict=True):
                leader.topics.setdefault(topic, {})[worker] = data
        clock = state.table.slowest(state.participants.live.keys() - gone)
        out: list[Instruction] = []
        for worker in sorted(gone):
            out += self._drop(worker)
        self._admit(clock)
        return [*out, *self._lead(view), *self._proceed()]

    # -- time, and how things are ----------------------------------------------------------------

    def tick(self, now: float) -> list[Instruction]:
        """Passes the time: sends notices to those who wait."""
        if now - self._noticed < NOTICE_SECONDS:
            return []
        self._noticed = now
        out: list[Instruction] = [Reply(route, wait.notice) for route, wait in self._waits(now)]
        return [*out, *self.answers.waiting_for_the_end(now)]

    def waits(self, now: float) -> tuple[Wait, ...]:
        """Returns the workers whose answers are withheld, and the reasons; the longest first."""
        waits = [wait for _, wait in self._waits(now)]
        return tuple(sorted(waits, key=lambda wait: -wait.notice.seconds))

    def _waits(self, now: float) -> Iterator[tuple[object, Wait]]:
        """Yields the withheld answers: their routes, with the workers and the reasons."""
        yield from self.answers.waiting_pulls(now)
        for who, pending in self.follower.held.items():
            if not pending.answered:
                notice = Waiting(*self._missing(pending), now - pending.since)
                yield pending.route, Wait(who.worker, notice)
        for route, worker, notice in self.copies.waiting(now):
            yield route, Wait(worker, notice)
        yield from self.answers.waiting_pushes(now)

    def _missing(self, pending: Pending) -> tuple[str, tuple[str, ...]]:
        """Returns what a push waits for, and the tasks."""
        state, held = self.state, self.follower.held
        participants = state.participants
        reason, pushes = "a push to reach every server", [pending.id]
        if state.synchronous:
            reason = f"round {state.step + 1}"
            absent = [w for w, i in sorted(participants.live.items()) if (w, i) not in held]
            if absent:
                return reason, tuple(f"worker:{worker}" for worker in absent)
            pushes = [each.id for each in held.values()]
        if state.leader is None:
            return reason, (participants.view.primary_name(0),)
        return reason, state.leader.missing(pushes, participants.view)

    def lags(self) -> dict[int, int]:
        """Returns how many pushes each training worker is behind the furthest one."""
        records, live = self.state.table.records, self.state.participants.live
        clocks = {worker: records[worker].clock for worker in live}
        return {worker: max(clocks.values()) - clock for worker, clock in clocks.items()}

    def status(self, now: float, route: object, request: Status) -> list[Instruction]:
        """Answers with the shard's status."""
        state = self.state
        counters = {name: float(value) for name, value in sorted(state.counters.items())}
        view, table = state.participants.view.number, state.table.export()
        return [Reply(route, ServerStatus(state.step, state.loaded, view, table, counters))]


def _tables_of(shown: ShownModel, server: int) -> ShardTables | None:
    """Returns the empty tables of a shard; None where the model has none."""
    if not shown.tables:
        return None
    from trireme.ps.rows import slots_of_shard  # needs numba
    from trireme.ps.shard.values.tables import ShardTables

    return ShardTables(shown.tables, slots_of_shard(shown.layout.spec.bounds, server))
