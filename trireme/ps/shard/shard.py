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
from trireme.ps.messages import (
    Attach,
    Attached,
    Collect,
    Collected,
    Done,
    Drain,
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
)
from trireme.ps.shard.answers import Wait
from trireme.ps.shard.execution import Execution
from trireme.ps.shard.instructions import Instruction, Reply
from trireme.ps.shard.participants import Participant
from trireme.ps.shard.push_table import Pending
from trireme.ps.shard.quiet_state import Quiet, restore
from trireme.ps.shard.state import ModelDescription, ShardState
from trireme.ps.shard.values.parameters import Values, ValuesFactory
from trireme.ps.shard.values.snapshot_tensors import Tensors
from trireme.ps.snapshot_messages import Load, Loaded, TakeSnapshot, WriteValues
from trireme.ps.tables import table_support

if TYPE_CHECKING:
    from trireme.ps.tables import ShardTables

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

    def __init__(self, number: int, factory: ValuesFactory = Values) -> None:
        self.number = number
        self._factory = factory
        self.state = ShardState(number)  # the shard's state. Only the shard changes it.
        self.execution = Execution(self.state)
        self._noticed = 0.0

    @property
    def due(self) -> bool:
        """Whether `go_on` is to be called before the next event."""
        return self.execution.due

    @property
    def stopped(self) -> bool:
        """Whether the shard has stopped to be divided anew: its state is quiet."""
        return self.execution.stopped

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
            for route in self.execution.answers.take_fenced_pulls()
        ]
        return [
            *out,
            *self.execution.copies.drop_absent(),
            *self._lead(view),
            *self.execution.proceed(),
        ]

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
        record, withheld = self.state.table.records[worker], self.execution.answers.withheld
        unanswered = [withheld.pop(worker).pending] if worker in withheld else []
        if record.pending is not None:
            unanswered.append(record.pending)
        self.execution.drop(record)
        leader = self.state.leader
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
        shown = self.state.shown_by(task, request)
        if self.state.shown is None:
            self._create(shown)
        else:
            self.state.shown.check_same(shown)

    def _create(self, shown: ModelDescription) -> None:
        state, rule, layout = self.state, shown.rule, shown.layout
        rule.check()
        state.values = self._factory(layout, self.number, shown.optimizer, rule)
        state.tables = _tables_of(shown, self.number)
        state.shown, state.rule, state.synchronous = shown, rule, rule.synchronous
        self.execution.updates.begin(shown)
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
        self.execution.updates.load()
        state.table.restore(request.workers)
        self._admit(0)
        if (leader := state.leader) is not None:
            leader.loaded = True
            leader.examples.restore(request.consumed, request.sizes, request.orders)
        return [Reply(route, Loaded(state.step)), *self.execution.proceed()]

    def write_values(
        self, now: float, route: object, who: Participant, request: WriteValues, tensors: Tensors
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
        return [*self.execution.answers.pull(now, route, who, request)]

    def pull_rows(
        self, now: float, route: object, who: Participant, request: PullRows
    ) -> list[Instruction]:
        """Answers with the rows of keys, as they are now."""
        if fenced := self._fence(route, who, request.view):
            return fenced
        state = self.state
        reason = None if state.loaded else "no values are loaded yet: pull them first"
        if reason is None:
            reason = state.rows_mismatch(request.wanted)
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
        reason = state.why_invalid(who.worker, push) or self.execution.updates.unlike(push)
        if reason is not None:
            return [self._refused_push(route, RejectedVerdict(reason), "rejected")]
        state.table.forget_acknowledged(who.worker, push.acknowledged)
        record, pending = state.table.records[who.worker], Pending(who, push, route, gradients, now)
        if push.sequence <= record.sequence:
            return [*self.execution.answers.repeat(pending)]
        if record.pending is not None:  # the worker came back while its answer is withheld
            record.pending.route = route
            return []
        return [*self.execution.take(pending)]

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
        if self.execution.awaits(who):
            leased = msgspec.structs.replace(leased, awaited=True)
        return [Reply(route, leased)]

    # -- the leader's decisions ------------------------------------------------------------------

    def heard(self, now: float, server: int, message: FromServer) -> list[Instruction]:
        """Takes what another shard holds, or what the leader has decided."""
        self.execution.hear(server, message)
        return self.execution.proceed()

    def go_on(self, now: float) -> list[Instruction]:
        """Carries out what was `due`."""
        return self.execution.proceed()

    # -- the end ---------------------------------------------------------------------------------

    def stop(self, now: float, route: object, request: StopJob) -> list[Instruction]:
        """Ends the job at the next step at which every worker can."""
        if (leader := self.state.leader) is None:
            return [self._refused(route, "rejected", _NOT_THE_LEADER)]
        last = leader.ending.stop(self.state.step)
        return [Reply(route, Stopping(last)), *self.execution.proceed()]

    def drain(
        self, now: float, route: object, who: Participant, request: Drain
    ) -> list[Instruction]:
        """Answers when no worker trains any more: the last step is made then."""
        if not self.execution.answers.drain(now, route, who):
            return [self._refused(route, "busy", "more tasks wait for the end than there are")]
        return [*self.execution.answers.proceed()]

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
        return [Reply(route, Done()), *self.execution.proceed()]

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
        refused = self.execution.copies.ask(now, route, who, request)
        if refused is not None:
            return [Reply(route, refused)]
        self.execution.follower.note_news()
        return self.execution.proceed()

    # -- the shards are divided anew -------------------------------------------------------------

    def dismiss(self, view: int) -> list[Reply]:
        """Returns answers to all that is not answered, as other shards take over: ask them."""
        routes = [pending.route for pending in self._unanswered()]
        fenced = FencedVerdict(view, "the shards were divided anew")
        out = [Reply(route, PushReply(fenced, self.state.step, 0, False)) for route in routes]
        others = [*self.execution.answers.take_pulls(), *self.execution.answers.take_drains()]
        others += self.execution.copies.take_routes()
        return out + [Reply(r, Refused("fenced", fenced.reason, view)) for r in others]

    def _unanswered(self) -> Iterator[Pending]:
        for answer in self.execution.answers.withheld.values():
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
        self._create(
            ModelDescription(before.task, layout, before.optimizer, before.rule, before.tables)
        )
        assert state.values is not None
        state.values.load(before.step, quiet.tensors)
        if state.tables is not None:
            state.tables.resume(quiet.tables, before.step)
        self.execution.updates.load()
        restore(state, quiet)
        clock = state.table.slowest(state.participants.live.keys() - gone)
        out: list[Instruction] = []
        for worker in sorted(gone):
            out += self._drop(worker)
        self._admit(clock)
        return [*out, *self._lead(view), *self.execution.proceed()]

    # -- time, and how things are ----------------------------------------------------------------

    def tick(self, now: float) -> list[Instruction]:
        """Passes the time: sends notices to those who wait."""
        if now - self._noticed < NOTICE_SECONDS:
            return []
        self._noticed = now
        out: list[Instruction] = [
            Reply(route, wait.notice) for route, wait in self.execution.waits(now)
        ]
        return [*out, *self.execution.answers.waiting_for_the_end(now)]

    def waits(self, now: float) -> tuple[Wait, ...]:
        """Returns the workers whose answers are withheld, and the reasons; the longest first."""
        waits = [wait for _, wait in self.execution.waits(now)]
        return tuple(sorted(waits, key=lambda wait: -wait.notice.seconds))

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


def _tables_of(shown: ModelDescription, server: int) -> ShardTables | None:
    """Returns the empty tables of a shard; None where the model has none."""
    if not shown.tables:
        return None
    return table_support().shard(shown.tables, shown.layout.spec.bounds, server)
