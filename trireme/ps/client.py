"""A worker's side of the parameter server: push, pull, wait.

A request goes to all servers at once and is answered by each. Values are received into, and
gradients sent from, the flat buffers of the worker's model.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, TypeVar

import msgspec

from trireme.errors import (
    ConfigurationError,
    FrameError,
    WaitTimeout,
)
from trireme.ps.dense import FlatModel, PartBuffer, as_bytes
from trireme.ps.ending import after_the_end
from trireme.ps.host_link import HostLink
from trireme.ps.loan import Loan
from trireme.ps.messages import (
    Applied,
    Attach,
    Attached,
    Collect,
    Collected,
    Cut,
    Drain,
    Enlist,
    Freeze,
    Frozen,
    GroupSpec,
    Lease,
    Leased,
    Load,
    Loaded,
    OptimizerSpec,
    Pull,
    PullReply,
    Push,
    PushReply,
    Refused,
    Retire,
    ServerStatus,
    SetEnd,
    Share,
    Snapshot,
    Span,
    Stale,
    Status,
    StopJob,
    Stopping,
    Thaw,
    Trace,
    Traced,
    Verdict,
    Waiting,
)
from trireme.ps.overlap import Overlap
from trireme.ps.packing import Packer
from trireme.ps.residuals import Residuals
from trireme.ps.results import PullResult, PushResult, ServerClock, decided
from trireme.ps.rule import Rule
from trireme.ps.server_links import (
    BACK_OFF,
    SLICE,
    Answer,
    ClientOptions,
    Membership,
    Overlapping,
    Patience,
    Request,
    ServerLink,
    ServerLinks,
    identity_of,
)
from trireme.ps.snapshot import ModelState, assemble, disassemble
from trireme.ps.subscription import Subscription
from trireme.ps.values import Tensors, tensors_from
from trireme.wire.codec import make_codec
from trireme.wire.message import Message

__all__ = ["OVERLAP_BYTES", "Client", "ClientOptions", "Membership", "Overlapping"]

_M = TypeVar("_M", bound=Message)

OVERLAP_BYTES = 6 << 20
"""Pushes of fewer bytes leave after backward where the choice is `auto`: a thread more a step costs
more then than sending early saves, even where the network is as fast as loopback."""


class _Update(msgspec.Struct, frozen=True):
    """All that a push says of its gradients, in every server's words."""

    worker: int
    incarnation: int
    sequence: int
    acknowledged: int
    pulled: int
    weight: float
    hyper: tuple[GroupSpec, ...] | None
    examples: tuple[Span, ...]
    pull: bool
    steps: int = 1
    absent: tuple[int, ...] = ()

    def message(self, server: int, view: int, order: tuple[int, ...] = ()) -> Message:
        return Push(
            self.worker,
            self.incarnation,
            view,
            self.sequence,
            self.acknowledged,
            self.pulled,
            self.weight,
            self.hyper,
            self.examples if server == 0 else (),
            self.pull,
            order,
            self.steps,
            self.absent,
        )


class Client:
    """A worker's connections to all parameter servers.

    Args:
        options: who this is.
        membership: where to learn the view.
        flat: the worker's model, whose buffers are sent from and received into.

    Attributes:
        step: the global step of the values at hand.
        stopping: whether this worker has been told to stop.
        bytes_sent: of updates, packed where they are: what pushes have carried to all servers.
        bytes_received: of values: what the answers have brought. Both are counted alike whether
            they crossed a network or lay in lent memory; headers, and copies for checkpoints and
            evaluations, are left out.

    Raises:
        WaitTimeout: there is no view yet.
    """

    def __init__(self, options: ClientOptions, membership: Membership, flat: FlatModel) -> None:
        self.step = 0
        self.stopping = False
        self._replies: Sequence[PushReply] = ()  # to the last push
        self.bytes_sent = 0  # gradients that were pushed, by whatever way they went
        self.bytes_received = 0  # values that pulls and pushes have brought
        self._membership = membership
        self._flat = flat
        self._layout = flat.layout
        servers = flat.layout.spec.servers
        self._values = [flat.part_values(server) for server in range(servers)]
        self._gradients = [flat.part_gradients(server) for server in range(servers)]
        # What a push carries to each server where nothing is packed: no need to ask every time.
        self._carried: list[tuple[Sequence[memoryview], int]] = [
            (part.views, part.nbytes) for part in self._gradients
        ]
        self._packers: list[Packer] = []
        self._subscription: Subscription | None = None  # where what comes back is packed too
        self._servers = ServerLinks(options, membership, servers, self._place)
        self._links = self._servers.links
        if flat.memory is not None and options.share_memory:
            self._servers.loans = [
                Loan(flat.memory, gradients.views, values.views)
                for gradients, values in zip(self._gradients, self._values, strict=True)
            ]
        self._host = self._host_link()
        self._over_host = False  # whether the push under way went to the aggregator
        self._sequence = 0
        self._acknowledged = 0
        self._leases = 0
        self._hyper: tuple[GroupSpec, ...] | None = None  # what the servers surely have
        self._absent: tuple[int, ...] = ()  # of the last update; the next early one's, probably
        self._synchronous = False
        self._pushed = False
        # The answers to a push that was settled before it was waited for.
        self._settled: list[PushReply] | None = None
        self._overlap: Overlap | None = None  # made when it is first of use
        self._early: _Update | None = None  # what is on its way while backward runs

    @property
    def options(self) -> ClientOptions:
        """Who this is; `renew` changes it."""
        return self._servers.options

    @property
    def verdicts(self) -> list[Verdict]:
        """What each server said of the last push."""
        return [reply.verdict for reply in self._replies]

    # -- joining the job ------------------------------------------------------------------------

    def attach(self, optimizer: OptimizerSpec, rule: Rule) -> bool:
        """Shows every server the model, the optimizer and the rule.

        Returns:
            Whether the values are loaded already, on every server.

        Raises:
            ModelMismatchError: another worker showed another model; names the first difference.
            UnsupportedOptimizerError: the server has no such optimizer.
        """
        if self._host is not None:
            rule.check_summed(len(self._links))
        self._synchronous = rule.synchronous
        self._hyper = None  # the servers may go by what an earlier worker has shown
        codec = make_codec(rule.codec)
        if codec is not None and not self._packers:
            self._packers = [Packer(codec, g, deflates=rule.deflates) for g in self._gradients]
            self._subscription = Subscription(codec, self._values) if rule.publishes else None
            self._servers.loans = ()  # what is packed lies elsewhere
        me, start, spec = self.options.worker, self.options.incarnation, self._layout.spec
        answers = self._ask_all(
            lambda server: Request(lambda view: Attach(me, start, view, spec, optimizer, rule))
        )
        loaded = all(_expect(answer, Attached).loaded for answer in answers)
        if self._host is not None:
            self._host.enlist(Enlist(me, start, spec, rule, self._servers.entry(0).address))
        return loaded

    def load(self, state: ModelState) -> None:
        """Gives every server its part of the first values, or of a checkpoint.

        Raises:
            CheckpointError: the state is of another model.
        """
        me, start = self.options.worker, self.options.incarnation

        def request(server: int) -> Request:
            tensors = disassemble(self._layout, state, server)
            specs = tuple(spec for spec, _ in tensors)
            payload = [as_bytes(tensor) for _, tensor in tensors if tensor.numel()]
            consumed = state.consumed if server == 0 else ()
            sizes = state.sizes if server == 0 else {}
            return Request(
                lambda view: Load(
                    me, start, view, state.step, specs, state.workers, consumed, sizes
                ),
                payload,
            )

        for answer in self._ask_all(request):
            _expect(answer, Loaded)

    # -- training -------------------------------------------------------------------------------

    def pull(self, *, train: bool = True, at_least: int = 0) -> PullResult:
        """Receives the values; waits until the chief has loaded them.

        Args:
            train: whether an update will be computed from them.
            at_least: waits until they are of this global step, or a later one.

        Raises:
            Fenced: the view changed while nothing was loaded: the chief may be another one now.
        """
        me, start = self.options.worker, self.options.incarnation
        answers = self._ask_all(
            lambda server: Request(lambda view: Pull(me, start, view, train, at_least)),
            fenced=not train,
        )
        replies = [_expect(answer, PullReply) for answer in answers]
        if train:
            self.stopping = replies[0].stop
        if self._subscription is not None:
            self._subscription.take(replies)
        self.step = self._level([reply.step for reply in replies])
        self.bytes_received += self._layout.bytes
        self._flat.publish_values()
        return PullResult(self.step, self.stopping)

    def check(self) -> None:
        """Returns while the job runs.

        Raises:
            JobFailed: it has ended; says who ended it, and why.
        """
        self._membership.check()

    @property
    def residuals(self) -> Residuals:
        """What packing has lost of pushes; nothing where they are not packed."""
        return Residuals(self._layout, self._packers)

    @property
    def pushes_early(self) -> bool:
        """Whether `begin` may be of use: pushes can leave while backward runs, and that pays."""
        mode = self.options.overlap
        if mode == "off" or self._host is not None or self._packers:
            return False
        if not self._flat.pushes_in_place:
            return False
        return mode == "on" or self._layout.bytes >= OVERLAP_BYTES

    def begin(
        self,
        weight: float,
        *,
        hyper: tuple[GroupSpec, ...] | None = None,
        examples: Sequence[Span] = (),
    ) -> None:
        """Announces a push before its gradients are computed: they leave as they become final.

        Nothing needs this. It does nothing where it is not possible (servers read this worker's
        memory, gradients are packed or copied elsewhere first) or does not pay, and what follows
        is the same: `push`, once the gradients are there, with the same arguments. If something
        else follows, or never anything, no server knows of this.

        The flat gradients must be zero, and from now on only backward may write to them.
        """
        self._abandon()
        if self.stopping or self._pushed or not self.pushes_early:
            return
        chosen = [link for link in self._links if self._leaves_early(link)]
        if not chosen:
            return
        if self._overlap is None:
            seconds = self.options.retry_seconds
            self._overlap = Overlap(self._flat, self._gradients, timeout=seconds)
        if self._overlap.ruled_out:
            return
        update = self._update(weight, hyper, examples, True, None, 1, self._absent)
        view = self._servers.view().number
        frames = []
        for link in chosen:
            assert link.connection is not None
            link.request = None
            link.sequence += 1
            build = partial(update.message, link.index, view)
            frames.append((link.index, link.connection, link.sequence, build))
        self._overlap.begin(frames)
        self._early = update

    def _leaves_early(self, link: ServerLink) -> bool:
        """Returns whether a push can leave early by this link, as it is now."""
        connection = link.connection
        if connection is None or connection.lending is not None or connection.wants_write:
            return False
        return len(self._layout.chunks(link.index)) > 1

    def _complete(self, update: _Update) -> Sequence[int]:
        """Completes the push that was announced if it is this; returns who has it all."""
        early = self._early
        if early is None:
            return ()
        assert self._overlap is not None
        if early != update:
            if early.absent != update.absent:
                self._overlap.surprised()
            self._abandon()
            return ()
        self._early = None
        begun = self._overlap.servers
        sent = self._overlap.finish()
        for server in set(begun) - set(sent):
            self._links[server].close()
        return sent

    def _abandon(self) -> None:
        """Gives up a push that was announced and not made: no server has the whole of it."""
        if self._early is not None:
            assert self._overlap is not None
            self._early = None
            for server in self._overlap.abandon():
                self._links[server].close()

    def push(
        self,
        weight: float,
        *,
        hyper: tuple[GroupSpec, ...] | None = None,
        examples: Sequence[Span] = (),
        pull: bool = True,
        pulled: int | None = None,
        steps: int = 1,
        absent: tuple[int, ...] | None = None,
    ) -> None:
        """Sends the flat gradients to all servers; `wait` has the answer. One push at a time.

        Args:
            weight: how many examples the gradient is the mean of.
            hyper: the optimizer's hyper-parameters now; sent only where they have changed.
            examples: which examples the gradient was computed from.
            pull: whether the answer shall bring the new values.
            pulled: the step of the values that the gradient was computed from; None for that of
                the newest ones.
            steps: of how many of this worker's steps it is, where it is a delta.
            absent: the positions of the parameters that it leaves out; None for those that have no
                gradient now.

        Raises:
            ConfigurationError: the job has told this worker to stop, or a push is under way.
        """
        if self.stopping:
            raise after_the_end(self.options.worker, self.step)
        if self._pushed:
            raise ConfigurationError(f"worker:{self.options.worker} pushed before it waited")
        missing = self._flat.absent if absent is None else absent
        update = self._update(weight, hyper, examples, pull, pulled, steps, missing)
        if weight > 0:  # a step that is skipped says nothing of the next one's gradients
            self._absent = missing
        has_it = self._complete(update) if self._early is not None else ()
        self._flat.collect_gradients()
        self._sequence = update.sequence
        self._hyper = hyper if hyper is not None else self._hyper
        for link in self._links:
            index = link.index
            if self._packers:
                payload = self._packed(index, weight)
                nbytes = sum(view.nbytes for view in payload)
            else:
                payload, nbytes = self._carried[index]
            request = Request(partial(update.message, index), payload)
            self.bytes_sent += nbytes
            if self._host is not None:
                self._over_host = self._push_over_host(self._host, request)
                if self._over_host:
                    continue
            if index in has_it:
                link.request = request  # what breaks from now on is sent again, as it lies
            else:
                self._servers.start(link, request)
        self._pushed = True

    def _push_over_host(self, host: HostLink, request: Request) -> bool:
        """Hands a push to the aggregator of this host; returns whether it has taken it."""
        message = request.build(self._servers.view().number)
        assert isinstance(message, Push)
        self._links[0].request = request  # for when this worker shall push by itself
        return host.push(message)

    def _update(
        self,
        weight: float,
        hyper: tuple[GroupSpec, ...] | None,
        examples: Sequence[Span],
        pull: bool,
        pulled: int | None,
        steps: int,
        absent: tuple[int, ...],
    ) -> _Update:
        """Returns what the next push says."""
        options = self._servers.options
        return _Update(
            options.worker,
            options.incarnation,
            self._sequence + 1,
            self._acknowledged,
            self.step if pulled is None else pulled,
            weight,
            hyper if hyper != self._hyper else None,
            tuple(examples),
            pull,
            steps,
            absent,
        )

    def _packed(self, server: int, weight: float) -> Sequence[memoryview]:
        """Returns the packed gradients that a push sends to a server.

        What weighs nothing is not looked at there, and must not use up what packing lost before.
        """
        if weight > 0:
            absent = self._layout.ranges(self._absent, server) if self._absent else ()
            self._packers[server].pack(absent)
        return self._packers[server].views

    def wait(self) -> PushResult:
        """Waits for the answers to the push, and has the values that they bring.

        Raises:
            Fenced: this worker was replaced, or taken out of the job.
            Rejected: a server found the push senseless.
            WaitTimeout: the answer was withheld too long; names those it was withheld for.
            JobFailed: the job ended meanwhile.
        """
        self.settle()
        replies, self._settled = self._settled, None
        assert replies is not None, "there was no push to wait for"
        self._pushed = False
        self._acknowledged = self._sequence
        self._replies = replies
        first = replies[0]
        verdict = first.verdict
        if type(verdict) is not Applied and isinstance(decided(verdict), Stale):
            self._hyper = None  # what a stale update brought along was dropped with it
        self.step = first.step
        if len(replies) > 1:
            self.step = self._level([reply.step for reply in replies])
        brought = self._layout if self._subscription is None else self._subscription
        self.bytes_received += brought.bytes
        self._flat.publish_values()
        return PushResult(
            first.verdict, self.step, first.staleness, self.stopping, notice=first.notice
        )

    def settle(self) -> None:
        """Waits for the answers to the push under way, if there is one; `wait` has them then.

        The values that came are not in the module before. Every other request settles first: a
        server is asked one thing at a time.

        Raises:
            TriremeError: as `wait`.
        """
        if self._over_host:
            self._settle_over_host()
        if self._early is not None:
            self._abandon()
        if self._pushed and self._settled is None:
            replies = []
            for message, _ in self._servers.finish_all(self._links):
                if not isinstance(message, PushReply):
                    raise _unexpected(message, PushReply)
                replies.append(message)
            self._settled = replies
            self.stopping = replies[0].stop
            if self._subscription is not None:
                self._subscription.take(self._settled)

    def _settle_over_host(self) -> None:
        """Waits for what the aggregator answers; pushes to the server where it has no answer."""
        assert self._host is not None
        patience = Patience(time.monotonic())

        def meanwhile(notice: Waiting | None) -> None:
            if notice is not None:
                self._servers.notice(notice, patience)
            self._membership.check()
            self._servers.check_patience(patience, self._links)

        reply = self._host.wait(SLICE, meanwhile)
        self._over_host = False
        request = self._links[0].request
        assert request is not None
        if reply is None:
            self._servers.start(self._links[0], request)
            return
        self._links[0].request = None
        self._settled, self.stopping = [reply], reply.stop

    def _level(self, steps: list[int]) -> int:
        """Brings all parts of the values to the same step, in synchronous modes."""
        me, start = self.options.worker, self.options.incarnation

        def again(at_least: int, view: int) -> Message:
            return Pull(me, start, view, False, at_least)

        while self._synchronous and len(set(steps)) > 1:
            target = max(steps)
            for link in self._links:
                if steps[link.index] < target:
                    self._servers.start(link, Request(partial(again, target)))
                    reply = _expect(self._servers.finish(link), PullReply)
                    steps[link.index] = reply.step
                    self.bytes_received += self._values[link.index].nbytes
                    if self._subscription is not None:
                        self._subscription.take_one(link.index, reply)
                    if link.index == 0:  # the job may have ended since its first answer
                        self.stopping = self.stopping or reply.stop
        return steps[0]

    def retire(self) -> None:
        """Tells the servers that nobody need wait for this worker any longer: it trains no more."""
        me, start = self.options.worker, self.options.incarnation
        self.settle()
        if self._host is not None:
            self._host.leave()
        self._ask_all(lambda server: Request(lambda view: Retire(me, start)))

    # -- what server 0 decides for all ----------------------------------------------------------

    def lease(
        self, dataset: str, size: int, batch: int, count: int, *, resized: bool = False
    ) -> tuple[Span, ...]:
        """Asks for the next examples: `count` spans of `batch` examples of a data set of `size`.

        With `resized` the data set may be of another size than the checkpoint's.
        """
        me, start = self.options.worker, self.options.incarnation
        self._leases += 1
        number = self._leases
        answer = self._ask_first(
            lambda view: Lease(me, start, view, dataset, size, batch, count, number, resized)
        )
        return _expect(answer, Leased).spans

    def stop(self, reason: str) -> int:
        """Asks that the job end; returns the global step at which it will."""
        return _expect(self._ask_first(lambda view: StopJob(reason)), Stopping).step

    def set_end(self, max_steps: int) -> int:
        """Sets the job's last step if it has none; returns the one that holds."""
        return _expect(self._ask_first(lambda view: SetEnd(max_steps)), Stopping).step

    def drain(self) -> int:
        """Waits until every worker has retired, and has the values then; returns their global step.

        The answers to this worker's last push lack what others pushed later.

        Raises:
            Fenced: this worker is out of the job: it keeps the values at hand.
        """
        step = _expect(self._ask_first(lambda view: Drain()), Stopping).step
        if self._synchronous and self.step == step:
            return step  # the round that made it has brought them
        return self.pull(train=False, at_least=step).step

    def status(self) -> list[ServerStatus]:
        """Returns how each server is."""
        answers = self._ask_all(lambda server: Request(lambda view: Status()))
        return [_expect(answer, ServerStatus) for answer in answers]

    def trace(self, action: Literal["start", "stop", "read"]) -> list[ServerClock]:
        """Asks each server in turn to note what it does when, to end that, or for its notes."""
        self.settle()
        answers = []
        for link in self._links:
            sent = time.monotonic()
            self._servers.start(link, Request(lambda view: Trace(action)))
            answer = self._servers.finish(link)
            message = _expect(answer, Traced)
            notes = b"".join(answer[1])
            answers.append(ServerClock(message.now, message.clock, sent, time.monotonic(), notes))
        return answers

    # -- what workers tell each other -----------------------------------------------------------

    def share(self, topic: str, data: bytes) -> None:
        """Leaves bytes for the other workers; the last under a topic replaces the one before."""
        me, start = self.options.worker, self.options.incarnation
        self._ask_first(lambda view: Share(me, start, topic), [memoryview(data)])

    def collect(self, topic: str) -> dict[int, bytes]:
        """Returns what each worker has left under a topic."""
        answer = self._ask_first(lambda view: Collect(topic))
        message, joined = _expect(answer, Collected), b"".join(answer[1])
        left: dict[int, bytes] = {}
        offset = 0
        for worker, size in zip(message.workers, message.sizes, strict=True):
            left[worker] = joined[offset : offset + size]
            offset += size
        return left

    # -- a consistent cut -----------------------------------------------------------------------

    def snapshot(self, *, state: bool) -> ModelState:
        """Copies the values of one consistent step from all servers.

        Args:
            state: whether the optimizer's state and the tables are wanted too.

        Raises:
            WaitTimeout: no cut could be completed in time.
        """
        deadline = time.monotonic() + self.options.patience_seconds
        while True:
            parts = self._try_cut(state)
            if parts is not None:
                return assemble(self._layout, parts)
            if time.monotonic() > deadline:
                raise WaitTimeout(
                    f"worker:{self.options.worker} could not copy a consistent state within "
                    f"{self.options.patience_seconds:.0f} s: other copies or changes of membership "
                    "came in between each time"
                )
            time.sleep(BACK_OFF * (1 + random.random()))

    def _try_cut(self, state: bool) -> list[tuple[Snapshot, Tensors]] | None:
        self.settle()
        token = random.getrandbits(53)
        frozen: list[Frozen] = []
        for link in self._links:  # server 0 first: whoever holds it goes on, the others wait
            self._servers.start(link, Request(lambda view: Freeze(token)))
            answer = self._servers.finish(link)[0]
            if not isinstance(answer, Frozen):
                _refuse_unless_busy(answer)
                self._thaw(token, self._links[: link.index])
                return None
            frozen.append(answer)
        if len({answer.view for answer in frozen}) > 1:
            self._thaw(token, self._links)
            return None
        step = max(answer.step for answer in frozen)
        decided: dict[int, int] = {}
        for answer in frozen:
            for worker, sequence in answer.decided:
                decided[worker] = max(sequence, decided.get(worker, 0))
        cut = Cut(token, step, tuple(sorted(decided.items())), state)
        parts: list[tuple[Snapshot, Tensors]] = []
        for message, payload in self._ask_all(lambda server: Request(lambda view: cut)):
            if not isinstance(message, Snapshot):
                _refuse_unless_busy(message)
                continue
            parts.append((message, tensors_from(message.tensors, payload)))
        return parts if len(parts) == len(self._links) else None

    def _thaw(self, token: int, links: Sequence[ServerLink]) -> None:
        for link in links:
            self._servers.start(link, Request(lambda view: Thaw(token)))
            self._servers.finish(link)

    def renew(self, incarnation: int) -> None:
        """Begins again as another incarnation: this worker had been taken for lost.

        What became of a push under way is not known; its examples were handed out again, unless
        it had been applied.
        """
        self.close()
        self._servers.options = replace(self.options, incarnation=incarnation)
        self._sequence = self._acknowledged = 0
        self._pushed = self._over_host = False
        self._settled = None
        self._host = self._host_link()

    def close(self) -> None:
        """Closes all connections. May be repeated."""
        if self._host is not None:
            self._host.close()
        self._early = None
        if self._overlap is not None:
            self._overlap.close()
            self._overlap = None
        self._servers.close()

    # -- requests ---------------------------------------------------------------------------------

    def _ask_first(
        self, build: Callable[[int], Message], payload: Sequence[memoryview] = ()
    ) -> Answer:
        self.settle()
        self._servers.start(self._links[0], Request(build, payload))
        return self._servers.finish(self._links[0])

    def _ask_all(self, request: Callable[[int], Request], *, fenced: bool = True) -> list[Answer]:
        """Sends to all servers, then waits for all.

        Args:
            request: the request of each server.
            fenced: whether to ask again under the newest view when it has changed.
        """
        self.settle()
        for link in self._links:
            self._servers.start(link, request(link.index))
        return self._servers.finish_all(self._links, again=fenced)

    def _host_link(self) -> HostLink | None:
        """Returns a link to the aggregator of this host, which connects when it is needed."""
        options = self.options
        if options.aggregator is None:
            return None
        memory = self._flat.memory if options.share_memory else None
        return HostLink(
            options.aggregator,
            identity_of(options),
            options.secret,
            self._gradients[0],
            self._values[0],
            loan=None if memory is None else Loan(memory, self._gradients[0].views),
            silence=options.retry_seconds,
        )

    def _place(self, server: int, message: Message, length: int) -> Sequence[memoryview]:
        """Says where a payload goes: values into the model's own memory."""
        if isinstance(message, (PushReply, PullReply)):
            packed = isinstance(message, PushReply) and message.since is not None
            if packed and self._subscription is not None:
                return self._subscription.place(server, length)
            buffer: PartBuffer = self._values[server]
            if length != buffer.nbytes:
                raise FrameError(
                    f"ps:{server} sent {length} bytes of values where its part has {buffer.nbytes}"
                )
            return buffer.views
        return [memoryview(bytearray(length))]


def _refuse_unless_busy(message: Message) -> None:
    if not (isinstance(message, Refused) and message.code == "busy"):
        raise FrameError(f"a server answered a cut with {type(message).__name__}")


def _expect(answer: Answer, wanted: type[_M]) -> _M:
    message = answer[0]
    if not isinstance(message, wanted):
        raise _unexpected(message, wanted)
    return message


def _unexpected(message: Message, wanted: type[Message]) -> FrameError:
    return FrameError(
        f"a parameter server answered with {type(message).__name__} where {wanted.__name__} was due"
    )
