"""The shard: one server's whole behaviour, without sockets, threads, or a clock of its own.

Events come in as method calls, each with its time; instructions go out as a list. The server, the
simulator, the tests and a lone process all drive this same object.

    event                      what it is
    view                       the coordinator's newest view
    attach, load, pull, push   requests of workers
    lease, stop                requests to shard 0: for examples, and for the job's end
    freeze, cut, thaw          a consistent cut over all servers, for checkpoints and evaluation
    heard                      messages of other servers, where shard 0 decides the rounds or the
                               asynchronous pushes
    tick                       time passes

When the instructions of an event are carried out, the driver calls `go_on` while `due` holds: other
servers must hear of a decision before this server carries it out.

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
from trireme.ps.server_messages import ShardFrozen, StopAt
from trireme.ps.shard.answers import Answers, PushAnswer, Wait
from trireme.ps.shard.instructions import Instruction, Reply, Send, Stopped
from trireme.ps.shard.participants import Participant
from trireme.ps.shard.push_decider import PushDecider
from trireme.ps.shard.push_table import Pending
from trireme.ps.shard.quiet_state import Quiet
from trireme.ps.shard.state import ShardState, ShownModel
from trireme.ps.shard.values.parameters import Values, ValuesFactory
from trireme.ps.shard.values.snapshot_tensors import Tensors
from trireme.ps.snapshot_messages import (
    Cut,
    Freeze,
    Frozen,
    Load,
    Loaded,
    Snapshot,
    Thaw,
    WriteValues,
)

if TYPE_CHECKING:
    from trireme.ps.shard.values.tables import ShardTables

NOTICE_SECONDS = 5.0
"""How often a worker whose answer is withheld is told for whom it waits."""

_CODES = {ModelMismatchError: "mismatch", UnsupportedOptimizerError: "optimizer"}

_MOST_TOPICS = 4096

FREEZE_SECONDS = 60.0
"""After this long a cut that was not completed is given up, and training goes on."""


class Shard:
    """One server's part of the parameters, and all decisions about it.

    Args:
        server: this server's index; shard 0 also deals examples and decides when the job ends.
        factory: makes the values once the first worker has shown its model.

    Attributes:
        server: the same index.
        state: the shard's state. Only the shard changes it.
    """

    def __init__(self, server: int, factory: ValuesFactory = Values) -> None:
        self.server = server
        self._factory = factory
        self.state = ShardState(server)
        self._answers = Answers(self.state)
        self._decider = PushDecider(self.state, self._answers)
        self._noticed = 0.0

    @property
    def due(self) -> bool:
        """Whether `go_on` is to be called before the next event."""
        return self._decider.due

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
        state.examples.members(tuple(participants.live))
        for route in self._answers.take_fenced_pulls():
            out.append(self._refused(route, "fenced", "the view has changed"))
        out += self._abandon_cut("the view has changed")
        state.reconfiguration.end()
        if view.next_shards:
            out += self._freeze_for(now, view)
        return [*out, *self._proceed()]

    def _admit(self, clock: int) -> None:
        for worker, incarnation in self.state.participants.incarnations.items():
            self.state.table.admit(worker, incarnation, clock)

    def _drop(self, worker: int) -> list[Reply]:
        """Drops what a worker that is out, or was started anew, had begun; answers its push."""
        record, withheld = self.state.table.records[worker], self._answers.withheld
        unanswered = [withheld.pop(worker).pending] if worker in withheld else []
        if record.pending is not None:
            unanswered.append(record.pending)
        self._decider.drop(record)
        self.state.ending.done(worker)
        self.state.examples.release(worker)
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
        state.ending.go_by(rule, layout.spec.shards)
        if rule.max_steps is not None:
            state.ending.set_last(state.step, rule.max_steps)
        state.examples.interleave = rule.synchronous and rule.aggregate == 0
        self._decider.begin(shown)

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
        self._decider.load()
        state.table.restore(request.workers)
        self._admit(0)
        state.examples.restore(request.consumed, request.sizes, request.orders)
        return [Reply(route, Loaded(state.step)), *self._answers.proceed()]

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
        if state.barrier.token is not None:
            return [self._refused(route, "busy", "a copy is under way")]
        state.values.write(tensors)
        return [Reply(route, Done())]

    def pull(self, now: float, route: object, who: Participant, request: Pull) -> list[Instruction]:
        """Answers with the values, once they are loaded."""
        if fenced := self._fence(route, who, request.view):
            return fenced
        return [*self._answers.pull(now, route, who, request)]

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
        reason = state.senseless(who.worker, push) or self._decider.unlike(push)
        if reason is not None:
            return [self._refused_push(route, RejectedVerdict(reason), "rejected")]
        state.table.forget_acknowledged(who.worker, push.acknowledged)
        record, pending = state.table.records[who.worker], Pending(who, push, route, gradients, now)
        if push.sequence <= record.sequence:
            return [*self._repeat(pending)]
        if record.pending is not None:  # the worker came back while its answer is withheld
            record.pending.route = route
            return []
        if self._decider.waits_for_nobody:
            over = state.ending.reached(state.step)
            answer = self._decider.decide_one(pending, applied=not over)
            return [*self._answers.give(answer), *self._proceed()]
        record.pending = pending
        self._decider.consider(pending)
        return self._proceed()

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
        withheld = self._answers.withheld.get(worker)
        if withheld is not None and withheld.pending.push.sequence == sequence:
            withheld.pending.route = pending.route
            return []
        original = state.table.records[worker].verdicts.get(sequence)
        if original is None:
            reason = f"push {sequence} was decided, and the worker said it knew how"
            rejected = PushReply(RejectedVerdict(reason), state.step, 0, False)
            return [Reply(pending.route, rejected)]
        return self._answers.give_again(PushAnswer(pending, Duplicate(original), 0))

    def lease(
        self, now: float, route: object, who: Participant, request: Lease
    ) -> list[Instruction]:
        """Leases examples to a worker."""
        if fenced := self._fence(route, who, request.view):
            return fenced
        try:
            leased = self.state.examples.lease(who.worker, request)
            if self._decider.awaits(who):
                leased = msgspec.structs.replace(leased, awaited=True)
        except ValueError as error:
            return [self._refused(route, "rejected", str(error))]
        return [Reply(route, leased)]

    # -- what servers tell each other ------------------------------------------------------------

    def heard(self, now: float, server: int, message: FromServer) -> list[Instruction]:
        """Takes what another server holds or has staged, or what shard 0 has decided of that."""
        if isinstance(message, ShardFrozen):
            return [*self._stop(server, message), *self._proceed()]
        if isinstance(message, StopAt):
            return [*self._stop_at(message), *self._proceed()]
        return [*self._decider.hear(server, message), *self._proceed()]

    def go_on(self, now: float) -> list[Instruction]:
        """Carries out what was `due`."""
        return self._proceed()

    def _proceed(self) -> list[Instruction]:
        """Decides all that can be decided, then makes the answers that can go out.

        The answers come last: the values that they carry are of the step that they name.
        """
        out: list[Instruction] = []
        while True:
            out += self._decider.proceed()
            copied = self._complete_cut() if self.state.barrier.cut is not None else []
            out += copied
            if not copied:  # a copy may have been what stopped a round
                break
        return [*out, *self._answers.proceed()]

    # -- the end ---------------------------------------------------------------------------------

    def stop(self, now: float, route: object, request: StopJob) -> list[Instruction]:
        """Ends the job at the next step at which every worker can."""
        last = self.state.ending.stop(self.state.step)
        return [Reply(route, Stopping(last)), *self._proceed()]

    def drain(
        self, now: float, route: object, who: Participant, request: Drain
    ) -> list[Instruction]:
        """Answers when no worker trains any more: the last step is made then."""
        if not self._answers.drain(now, route, who):
            return [self._refused(route, "busy", "more tasks wait for the end than there are")]
        return [*self._answers.proceed()]

    def retire(
        self, now: float, route: object, who: Participant, request: Retire
    ) -> list[Instruction]:
        """Notes that a worker trains no more, though it stays: nobody waits for its updates.

        Others are dealt the examples that it holds.
        """
        state = self.state
        if state.participants.holds(who):
            state.participants.retire(who.worker)
            state.ending.done(who.worker)
            state.examples.members(tuple(state.participants.live))
        return [Reply(route, Done()), *self._proceed()]

    # -- what workers share ----------------------------------------------------------------------

    def share(
        self, now: float, route: object, who: Participant, request: Share, payload: torch.Tensor
    ) -> list[Instruction]:
        """Keeps bytes that a worker shares with the others; without any forgets the topic."""
        topics = self.state.topics
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
        left = sorted(self.state.topics.get(request.topic, {}).items())
        sizes = tuple(tensor.numel() for _, tensor in left)
        message = Collected(tuple(worker for worker, _ in left), sizes)
        return [Reply(route, message, [tensor for _, tensor in left])]

    # -- a consistent cut ------------------------------------------------------------------------

    def freeze(self, now: float, route: object, request: Freeze) -> list[Instruction]:
        """Holds back all decisions until `cut` is complete, or `thaw`."""
        state = self.state
        if not state.loaded:
            return [self._refused(route, "rejected", "no values are loaded")]
        if state.barrier.token not in (None, request.token):
            return [self._refused(route, "busy", "another cut is under way")]
        state.barrier.begin(request.token, now)
        decided = state.table.decided(state.participants.incarnations)
        after = 0 if state.tables is None else state.tables.changes_after
        return [Reply(route, Frozen(state.step, decided, state.participants.view.number, after))]

    def cut(self, now: float, route: object, request: Cut) -> list[Instruction]:
        """Decides what other servers have already decided, and answers with a copy then."""
        barrier = self.state.barrier
        if barrier.token != request.token:
            reason = "the cut was given up: it took too long, or its view has changed"
            return [self._refused(route, "busy", reason)]
        barrier.cut, barrier.route = request, route
        self._decider.replay()
        return self._proceed()

    def thaw(self, now: float, route: object, request: Thaw) -> list[Instruction]:
        """Gives up a cut."""
        out: list[Instruction] = [Reply(route, Done())]
        if self.state.barrier.token == request.token:
            out += self._abandon_cut("it was taken back")
        return [*out, *self._proceed()]

    # -- the shards are divided anew -------------------------------------------------------------

    def _freeze_for(self, now: float, view: View) -> list[Instruction]:
        """Decides nothing any more, as a view announces other shards; tells shard 0 how far it is.

        Where no values are loaded, there is nothing to agree on.
        """
        state, reconfiguration = self.state, self.state.reconfiguration
        reconfiguration.begin(view.number, len(view.shards))
        state.barrier.begin(reconfiguration.token, now)
        decided = state.table.decided(state.participants.incarnations)
        frozen = ShardFrozen(view.number, state.step, decided)
        return self._stop(0, frozen) if self.server == 0 else [Send(0, frozen)]

    def _stop(self, shard: int, frozen: ShardFrozen) -> list[Instruction]:
        """Takes how far a shard is; stops all once it is known of each."""
        if self.server != 0:
            return []
        cut = self.state.reconfiguration.hear(shard, frozen)
        if cut is None:
            return []
        others = range(1, len(self.state.participants.view.shards))
        return [*(Send(other, cut) for other in others), *self._stop_at(cut)]

    def _stop_at(self, message: StopAt) -> list[Instruction]:
        barrier, reconfiguration = self.state.barrier, self.state.reconfiguration
        under_way = 0 < reconfiguration.view == message.view
        if under_way and not reconfiguration.stopped:
            barrier.cut = Cut(reconfiguration.token, message.step, message.decided, False)
            barrier.route = None
            self._decider.replay()
        return []

    @property
    def stopped(self) -> bool:
        """Whether the shard has stopped at the cut of a reconfiguration: its state is quiet."""
        return self.state.reconfiguration.stopped

    def dismiss(self, view: int) -> list[Reply]:
        """Returns answers to all that is not answered, as other shards take over: ask them.

        Args:
            view: the number of the view that names them.
        """
        routes = [pending.route for pending in self._unanswered()]
        fenced = FencedVerdict(view, "the shards were divided anew")
        out = [Reply(route, PushReply(fenced, self.state.step, 0, False)) for route in routes]
        others = [*self._answers.take_pulls(), *self._answers.take_drains()]
        return out + [Reply(r, Refused("fenced", fenced.reason, view)) for r in others]

    def _unanswered(self) -> Iterator[Pending]:
        for answer in self._answers.withheld.values():
            yield answer.pending
        for record in self.state.table.records.values():
            if record.pending is not None:
                yield record.pending

    def resume(self, now: float, view: View, quiet: Quiet) -> list[Instruction]:
        """Goes on where other shards have stopped; call it instead of the first `view`.

        Workers may have left since the shards stopped, in a view that this server never takes:
        what they had begun is dropped as in `view`.

        Args:
            now: the time.
            view: the view that names this shard.
            quiet: the quiet state of the shards before, whose tensors cover this shard. Its tables
                are taken over.

        Raises:
            Rejected: they do not cover it.
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
        self._decider.load()
        state.table.resume(before.records)
        state.counters.update(before.counters)
        if self.server == 0:
            state.ending.resume(before.last, before.under_way)
            state.examples.resume(before.examples)
            for (topic, worker, _), data in zip(before.topics, quiet.topics, strict=True):
                state.topics.setdefault(topic, {})[worker] = data
        clock = state.table.slowest(state.participants.live.keys() - gone)
        out: list[Instruction] = []
        for worker in sorted(gone):
            out += self._drop(worker)
        self._admit(clock)
        state.examples.members(tuple(state.participants.live))
        if view.next_shards:  # the server has missed the views before the next reconfiguration
            out += [*self._freeze_for(now, view), *self._proceed()]
        return out

    def _abandon_cut(self, reason: str) -> list[Reply]:
        """Gives up a cut under way; the worker may ask again."""
        barrier = self.state.barrier
        if barrier.token is None:
            return []
        asked, route = barrier.cut is not None, barrier.route
        barrier.end()
        self._decider.replay()
        return [self._refused(route, "busy", f"the cut was given up: {reason}")] if asked else []

    def _complete_cut(self) -> Sequence[Instruction]:
        """Returns the copy, once all that other servers have decided is decided here."""
        state, cut, route = self.state, self.state.barrier.cut, self.state.barrier.route
        reconfiguration = state.reconfiguration
        if cut is None or reconfiguration.stopped:
            return []
        if state.step < cut.step:
            return []
        decided = dict(state.table.decided(state.participants.incarnations))
        if any(decided[w] < sequence for w, sequence in cut.decided if w in decided):
            return []
        if reconfiguration.view:
            reconfiguration.stopped = True
            return [Stopped(reconfiguration.view)]
        assert state.values is not None
        tensors = state.values.copy(state=cut.state)
        if state.tables is not None and cut.state:
            since = None if cut.since < 0 else cut.since
            tensors += state.tables.copy(since, shown=state.shows_rows)
        specs = tuple(spec for spec, _ in tensors)
        examples = state.examples
        snapshot = Snapshot(
            state.step,
            specs,
            state.table.export(),
            examples.consumed(),
            examples.sizes(),
            examples.orders(),
            state.participants.view.number,
            cut.since,
        )
        state.barrier.end()
        self._decider.replay()
        return [Reply(route, snapshot, [tensor for _, tensor in tensors])]

    # -- time, and how things are ----------------------------------------------------------------

    def tick(self, now: float) -> list[Instruction]:
        """Sends notices to those who wait; gives up a cut that takes too long."""
        out = self.expire(now) if self.overdue(now) else []
        return [*out, *self.notices(now)]

    def overdue(self, now: float) -> bool:
        """Returns whether a cut that a worker asked for takes too long."""
        barrier = self.state.barrier
        asked = barrier.token is not None and not self.state.reconfiguration.view
        return asked and now - barrier.since > FREEZE_SECONDS

    def expire(self, now: float) -> list[Instruction]:
        """Gives up a cut that takes too long."""
        return [*self._abandon_cut(f"it took more than {FREEZE_SECONDS:.0f} s"), *self._proceed()]

    def notices(self, now: float) -> list[Instruction]:
        """Returns notices for those who wait, from time to time."""
        if now - self._noticed < NOTICE_SECONDS:
            return []
        self._noticed = now
        out: list[Instruction] = [Reply(route, wait.notice) for route, wait in self._waits(now)]
        return [*out, *self._answers.waiting_for_the_end(now)]

    def waits(self, now: float) -> tuple[Wait, ...]:
        """Returns the workers whose answers are withheld, and the reasons; the longest first."""
        waits = [wait for _, wait in self._waits(now)]
        return tuple(sorted(waits, key=lambda wait: -wait.notice.seconds))

    def _waits(self, now: float) -> Iterator[tuple[object, Wait]]:
        """Yields the withheld answers: their routes, with the workers and the reasons."""
        yield from self._answers.waiting_pulls(now)
        for pending, reason, names in self._decider.waiting():
            if not pending.answered:
                notice = Waiting(reason, names, now - pending.since)
                yield pending.route, Wait(pending.owner.worker, notice)
        yield from self._answers.waiting_pushes(now)

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
    """Returns the empty tables of a shard; None where the model has none.

    Raises:
        ConfigurationError: numba is not installed here.
    """
    if not shown.tables:
        return None
    from trireme.ps.rows import slots_of_shard  # needs numba
    from trireme.ps.shard.values.tables import ShardTables

    return ShardTables(shown.tables, slots_of_shard(shown.layout.spec.bounds, server))
