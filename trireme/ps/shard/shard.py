"""The shard: the whole behaviour of one replica, without sockets, threads, or a clock of its own.

Events come in as method calls, each with its time; instructions go out as a list. The server, the
simulator, the tests and a lone process all drive this same object.

    event      what it is
    view       the coordinator's newest view
    request    what a task asks: to attach, to load, a pull, a push, a copy; of shard 0 also what
               the leader keeps
    heard      at shard 0, what another shard holds; at others, the leader's decisions
    tick       time passes

Every shard carries out the same sequence of decisions, which the leader writes at shard 0. When the
instructions of an event are carried out, the driver calls `go_on` while `due` holds: the message to
other shards is on its way, or in the log, before this shard carries a decision out.

The driver names the participant that makes a request, or the shard that sends a message, as the
handshake of the connection has proven it.

A request is answered once, by one `Reply` to the route it came with. A push is decided once, by
(worker, incarnation, sequence). Its verdict is recorded together with the change of the values, and
a repeat gets the same verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch

from trireme.cluster.messages import ViewChanged
from trireme.cluster.view import View
from trireme.errors import Rejected, TriremeError
from trireme.ps import messages
from trireme.ps.extension import held_extension
from trireme.ps.flat import PartBuffer
from trireme.ps.layout import Layout
from trireme.ps.leader.leader import Leader
from trireme.ps.shard.answers import Wait
from trireme.ps.shard.execution import Execution
from trireme.ps.shard.instructions import Instruction, Reply, refusal
from trireme.ps.shard.participants import Participant
from trireme.ps.shard.push_table import Pending
from trireme.ps.shard.quiet_state import Quiet
from trireme.ps.shard.state import ModelDescription, ShardState
from trireme.ps.shard.values.parameters import Values, ValuesFactory
from trireme.ps.shard.values.snapshot_tensors import Tensors
from trireme.ps.snapshot_messages import AddParameters, Load, Loaded, TakeSnapshot, WriteValues
from trireme.wire.message import Message

NOTICE_SECONDS = 5.0  # how often a worker whose answer is withheld hears which workers it waits for

_OF_A_VIEW = (
    messages.Attach,
    messages.Lease,
    Load,
    messages.Pull,
    messages.PullExtra,
    WriteValues,
    AddParameters,
)
"""Requests that count in one view only."""

_LET_OTHERS_GO_ON = (Load, messages.Retire, messages.StopJob)
"""Requests after which answers may go out that were withheld."""

_NOT_LOADED = "no values are loaded yet: pull them first"

_MOST_TOPICS = 4096


class Shard:
    """One replica's part of the parameters, and all decisions about it.

    Args:
        factory: makes the values once the first worker has shown its model.
    """

    def __init__(self, number: int, factory: ValuesFactory = Values) -> None:
        self.number = number
        self._factory = factory
        self.state = ShardState(number)  # the shard's state. Only the shard changes it.
        self.execution = Execution(self.state, factory)
        self._noticed = 0.0
        self._answering: Mapping[type[Message], Callable[..., Message]] = {
            messages.Attach: self.attach,
            Load: self.load,
            WriteValues: self.write_values,
            messages.PullExtra: self.pull_extra,
            messages.Lease: self.lease,
            messages.StopJob: self.stop,
            messages.Retire: self.retire,
            messages.Share: self.share,
            messages.Status: self.status,
        }
        self._withholding: Mapping[type[Message], Callable[..., Sequence[Instruction]]] = {
            messages.Pull: self.execution.answers.pull,
            messages.Drain: self.drain,
            messages.Collect: self.collect,
            TakeSnapshot: self.snapshot,
        }

    @property
    def due(self) -> bool:
        """Whether `go_on` is to be called before the next event."""
        return self.execution.due

    @property
    def stopped(self) -> bool:
        return self.execution.stopped

    # -- membership ------------------------------------------------------------------------------

    def view(self, now: float, view: View) -> list[Instruction]:
        """Takes the coordinator's newest view: nobody waits any longer for workers that are out."""
        state, execution = self.state, self.execution
        participants, table = state.participants, state.table
        if view.number <= participants.view.number:
            return []
        out = self._replace(table.records.keys() - participants.take(view))
        gone = execution.answers.take_fenced_pulls()
        gone += execution.snapshots.take_routes(absent=True)
        gone += execution.additions.take_routes(absent=True)
        out += [self._refused(route, "fenced", "the view has changed") for route in gone]
        if state.leader is not None:
            state.leader.view(view, participants.live)
        return [*out, *execution.proceed()]

    def _replace(self, gone: set[int]) -> list[Instruction]:
        """Drops what workers had begun that are out, or were started anew; answers their pushes."""
        state, out = self.state, list[Instruction]()
        for worker in sorted(gone):
            who = Participant(worker, state.table.records[worker].incarnation)
            out += map(self._fenced, self.execution.drop(who))
            if state.leader is not None:
                state.leader.ending.done(worker)
                state.leader.examples.release(worker)
        self._admit()
        return out

    def _admit(self) -> None:
        for worker, incarnation in self.state.participants.incarnations.items():
            self.state.table.admit(worker, incarnation)

    def _fenced(self, pending: Pending) -> Reply:
        participants = self.state.participants
        reason = participants.fence(pending.owner, pending.push.view) or "it was taken for lost"
        return self._refused_push(
            pending.route, messages.FencedVerdict(participants.view.number, reason), "fenced"
        )

    def _refused_push(self, route: object, verdict: messages.Verdict, counter: str) -> Reply:
        self.state.counters[counter] += 1
        return Reply(route, messages.PushReply(verdict, self.state.step, 0, False))

    def _refused(self, route: object, code: str, reason: str) -> Reply:
        return Reply(route, messages.Refused(code, reason, self.state.participants.view.number))

    # -- what tasks ask --------------------------------------------------------------------------

    def request(
        self, now: float, route: object, who: Participant, message: Message, payload: Any = None
    ) -> list[Instruction]:
        """Takes a request; or a message of another shard, whose number is `who.worker`; or a view.

        Args:
            payload: of a push, its gradients, which must stay as they are until the answer is sent;
                of values, their tensors; of what is shared, its bytes.
        """
        if isinstance(message, messages.Push):
            return self.push(now, route, who, message, payload)
        if isinstance(message, messages.FromServer):
            return self.heard(now, who.worker, message)
        if isinstance(message, ViewChanged):
            return self.view(now, message.view)
        if isinstance(message, _OF_A_VIEW):
            reason = self.state.participants.fence(who, message.view)
            if reason is not None:
                return [self._refused(route, "fenced", reason)]
        kind = type(message)
        if kind in self._withholding:
            return [*self._withholding[kind](now, route, who, message)]
        try:
            if isinstance(message, AddParameters):
                added = self.execution.additions.ask(now, route, who, message, payload)
                self.execution.follower.news = True
                return [*added, *self.execution.proceed()]
            answer = self._answering[kind](who, message, payload)
        except (TriremeError, RuntimeError, TypeError, ValueError) as error:
            return [refusal(route, error, self.state.participants.view.number)]
        out: list[Instruction] = [Reply(route, answer)]
        return out + self.execution.proceed() if kind in _LET_OTHERS_GO_ON else out

    def attach(self, who: Participant, request: messages.Attach, _: None = None) -> Message:
        """Takes a worker's model: the first creates the values, the others must be the same."""
        state = self.state
        shown = state.shown_by(f"worker:{who.worker}", request)
        if state.shown is None:
            self._create(shown)
        state.know(who.worker, state.check_known(shown))
        return messages.Attached(state.loaded, state.step, state.participants.view.number)

    def _create(self, shown: ModelDescription) -> None:
        state, rule, layout = self.state, shown.rule, shown.layout
        rule.check()
        state.values = self._factory(layout, self.number, shown.optimizer, rule)
        if shown.extension is not None:
            state.extension = held_extension(shown.extension, layout.spec.bounds, self.number)
        state.shown, state.rule, state.synchronous = shown, rule, rule.synchronous
        self.execution.updates.begin()
        if state.leader is not None:
            state.leader.begin(rule, layout.spec.shards, state.step)

    def load(self, who: Participant, request: Load, tensors: Tensors) -> Message:
        """Loads the chief's first values, or a checkpoint's.

        A chief of a later view replaces the values of an earlier chief. It loads only if shard 0
        has no values, so the earlier chief did not finish, and no worker received its values.
        """
        state = self.state
        if state.values is None:
            raise Rejected("nothing was attached yet, so there is nothing to load values into")
        if state.loaded_in >= request.view:  # a repeat
            return Loaded(state.step)
        if any(span.stop < span.start for span in request.consumed):
            raise Rejected("examples end before they begin")
        state.values.load(request.step, tensors)
        if state.extension is not None:
            state.extension.load(tensors, request.step)
        state.step, state.loaded_in = request.step, request.view
        self.execution.updates.load()
        state.table.restore(request.workers)
        self._admit()
        if (leader := state.leader) is not None:
            leader.loaded = True
            leader.examples.restore(request.consumed, request.sizes, request.orders)
        return Loaded(state.step)

    def write_values(self, who: Participant, request: WriteValues, tensors: Tensors) -> Message:
        """Replaces values by those that a worker's program has written."""
        state = self.state
        if state.values is None or not state.loaded:
            raise Rejected(_NOT_LOADED)
        if state.synchronous and state.rule.aggregate:
            raise Rejected(
                "with --aggregate a worker that is late would overwrite the values of others"
            )
        state.values.write(tensors)
        state.written_at = state.step
        return messages.Done()

    def pull_extra(self, who: Participant, request: messages.PullExtra, _: None = None) -> Message:
        """Answers with extra values, as they are now."""
        state = self.state
        reason = state.extra_mismatch(request.extra) if state.loaded else _NOT_LOADED
        if reason is not None:
            raise Rejected(reason)
        assert state.extension is not None
        return messages.PulledExtra(state.step, state.extension.pull(request.extra))

    def push(
        self,
        now: float,
        route: object,
        who: Participant,
        push: messages.Push,
        gradients: PartBuffer,
    ) -> list[Instruction]:
        state, execution = self.state, self.execution
        reason = state.participants.fence(who, push.view)
        if reason is not None:
            fenced = messages.FencedVerdict(state.participants.view.number, reason)
            return [self._refused_push(route, fenced, "fenced")]
        push, gradients = state.extended(push, gradients)
        reason = (
            state.why_invalid(who.worker, push)
            or execution.updates.unlike(push)
            or execution.additions.unlike(who.worker, push)
        )
        if reason is not None:
            return [self._refused_push(route, messages.RejectedVerdict(reason), "rejected")]
        state.table.forget_acknowledged(who.worker, push.acknowledged)
        pending, held = Pending(who, push, route, gradients, now), execution.follower.held.get(who)
        if push.sequence <= state.table.records[who.worker].sequence:
            return [*execution.answers.repeat(pending)]
        if held is not None:  # the worker came back while its answer is withheld
            held.route = route
            return []
        return [*execution.take(pending)]

    # -- what the leader keeps -------------------------------------------------------------------

    @property
    def _leader(self) -> Leader:
        if self.state.leader is None:
            raise Rejected("only shard 0 is asked that, which has the leader")
        return self.state.leader

    def lease(self, who: Participant, request: messages.Lease, _: None = None) -> messages.Leased:
        leased = self._leader.examples.lease(who.worker, request)
        awaited = self.execution.awaits(who)
        return msgspec.structs.replace(leased, awaited=True) if awaited else leased

    def stop(self, who: Participant, request: messages.StopJob, _: None = None) -> Message:
        """Ends the job at the next step at which every worker can."""
        return messages.Stopping(self._leader.ending.stop(self.state.step))

    def drain(
        self, now: float, route: object, who: Participant, request: messages.Drain
    ) -> list[Instruction]:
        """Answers when no worker trains any more: the last step is made then."""
        if not self.execution.answers.drain(now, route, who):
            return [self._refused(route, "busy", "more tasks wait for the end than there are")]
        return [*self.execution.answers.proceed()]

    def retire(self, who: Participant, request: messages.Retire, _: None = None) -> Message:
        """Notes that a worker trains no more, though it stays: nobody waits for its updates.

        Others are dealt the examples that it holds.
        """
        state = self.state
        if state.participants.holds(who):
            state.participants.retire(who.worker)
            if state.leader is not None:
                state.leader.ending.done(who.worker)
                state.leader.examples.members(tuple(state.participants.live))
        return messages.Done()

    def share(self, who: Participant, request: messages.Share, payload: torch.Tensor) -> Message:
        """Keeps bytes that a worker shares with the others; without any forgets the topic."""
        topics = self._leader.topics
        if not self.state.participants.holds(who):
            return messages.Done()
        if not payload.numel():
            topics.pop(request.topic, None)
        elif request.topic not in topics and len(topics) >= _MOST_TOPICS:
            raise Rejected(f"workers share {_MOST_TOPICS} topics")
        else:
            topics.setdefault(request.topic, {})[who.worker] = payload
        return messages.Done()

    def collect(
        self, now: float, route: object, who: Participant, request: messages.Collect
    ) -> list[Instruction]:
        leader = self.state.leader
        left = dict(sorted(leader.topics.get(request.topic, {}).items())) if leader else {}
        sizes = tuple(tensor.numel() for tensor in left.values())
        return [Reply(route, messages.Collected(tuple(left), sizes), [*left.values()])]

    # -- the leader's decisions ------------------------------------------------------------------

    def heard(self, now: float, shard: int, message: messages.FromServer) -> list[Instruction]:
        """Takes what another shard holds, or what the leader has decided."""
        self.execution.hear(shard, message)
        return self.execution.proceed()

    def go_on(self) -> list[Instruction]:
        return self.execution.proceed()

    def snapshot(
        self, now: float, route: object, who: Participant, request: TakeSnapshot
    ) -> list[Instruction]:
        """Takes a request for a copy, which is made where the leader decides."""
        refused = self.execution.snapshots.ask(now, route, who, request)
        if refused is not None:
            return [Reply(route, refused)]
        self.execution.follower.news = True
        return self.execution.proceed()

    # -- the shards are divided anew -------------------------------------------------------------

    def dismiss(self, view: int) -> list[Reply]:
        """Returns answers to all that is not answered, as other shards take over: ask them."""
        execution = self.execution
        fenced = messages.FencedVerdict(view, "the shards were divided anew")
        refused = messages.PushReply(fenced, self.state.step, 0, False)
        others = [*execution.answers.take_routes(), *execution.snapshots.take_routes()]
        others += execution.additions.take_routes()
        return [
            *(Reply(pending.route, refused) for pending in execution.unanswered()),
            *(Reply(route, messages.Refused("fenced", fenced.reason, view)) for route in others),
        ]

    def resume(self, now: float, view: View, quiet: Quiet) -> list[Instruction]:
        """Goes on where other shards have stopped; call it instead of the first `view`.

        Workers may have left since the shards stopped, in a view that this server never takes:
        what they had begun is dropped as in `view`.

        Args:
            quiet: the quiet state of the shards before, whose tensors cover this shard.
        """
        state, before = self.state, quiet.state
        state.participants.take(view)
        here = state.participants.incarnations
        gone = {w for w, record in before.records.items() if here.get(w) != record.incarnation}
        state.participants.retire(*(w for w in before.retired if w not in gone))
        layout = Layout(before.layout).divided(view.bounds)
        self._create(
            ModelDescription(before.task, layout, before.optimizer, before.rule, before.extension)
        )
        assert state.values is not None
        state.values.load(before.step, quiet.tensors)
        if state.extension is not None:
            state.extension.resume(quiet.extra, before.step)
        # A chief that finds other shards without values replaces these: its view is later than 1.
        state.step, state.loaded_in = before.step, 1
        state.table.resume(before.records)
        state.table.clocks = dict(before.clocks)
        state.counters.update(before.counters)
        if state.leader is not None and before.leader is not None:
            state.leader.resume(before.leader)
        out = self._replace(gone)
        if state.leader is not None:
            state.leader.view(view, state.participants.live)
        return [*out, *self.execution.proceed()]

    # -- time, and how things are ----------------------------------------------------------------

    def tick(self, now: float) -> list[Instruction]:
        if now - self._noticed < NOTICE_SECONDS:
            return []
        self._noticed = now
        waits = [*self.execution.waits(now), *self.execution.answers.waits_for_the_end(now)]
        return [Reply(wait.route, wait.notice) for wait in waits]

    def waits(self, now: float) -> tuple[Wait, ...]:
        """Returns the workers whose answers are withheld, and the reasons; the longest first."""
        return tuple(sorted(self.execution.waits(now), key=lambda wait: -wait.notice.seconds))

    def lags(self) -> dict[int, int]:
        """Returns how many pushes each training worker is behind the furthest one."""
        clocks = self.state.table.clocks
        return {worker: max(clocks.values()) - clock for (worker, _), clock in clocks.items()}

    def status(self, who: Participant, request: messages.Status, _: None = None) -> Message:
        state = self.state
        counters = {name: float(value) for name, value in sorted(state.counters.items())}
        view, table = state.participants.view.number, state.table.export()
        return messages.ServerStatus(state.step, state.loaded, view, table, counters)
