"""A worker's requests to the servers, and what follows from the answers. Without I/O."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, Unpack

import msgspec

from trireme.errors import ConfigurationError, CopiesLost, Fenced, TriremeError, WaitTimeout
from trireme.ps import messages
from trireme.ps.client.lanes import BACK_OFF, Divided, Request
from trireme.ps.client.operations import (
    AWAIT,
    DIVIDE,
    PUBLISH,
    PUSH,
    Answers,
    Ask,
    Copy,
    Operation,
    Parts,
    Pause,
    expect,
)
from trireme.ps.extra import ExtraParts, ExtraRequest, ShownExtension, Space
from trireme.ps.results import PushResult, after_the_end, decided
from trireme.ps.rule import Rule
from trireme.ps.snapshot_messages import (
    AddParameters,
    Load,
    Loaded,
    ParametersAdded,
    Snapshot,
    TakeSnapshot,
    WriteValues,
)
from trireme.wire.message import Message

if TYPE_CHECKING:
    from trireme.ps.snapshot import ModelState


_M = TypeVar("_M", bound=Message)

Parameters: TypeAlias = tuple[messages.ParameterSpec, ...]


class ClientProtocol:
    """The state of a worker's protocol with the servers."""

    def __init__(
        self,
        worker: int,
        shards: int,
        *,
        patience_seconds: float,
        rng: random.Random,
        space: Space | None = None,
    ) -> None:
        self.step = 0  # the global step of the values at hand
        # the extra values that the last push has brought; None where the shards were divided anew
        self.brought: Any = None
        self.stopping = False  # whether this worker has been told to stop
        self.replies: Sequence[messages.PushReply] = ()  # to the last push, by shard
        self.digests: Sequence[int] = ()  # of the values at hand, by shard; 0 where there is none
        self._worker, self._shards = worker, shards
        self._divisions = 0  # how often the shards were divided anew
        self._patience_seconds, self._rng = patience_seconds, rng
        self._sequence = self._acknowledged = self._leases = 0
        self._hyper: tuple[messages.GroupSpec, ...] | None = None  # what the servers surely have
        self._rule, self._space = Rule(), space
        self._bounds: Sequence[int] = ()  # of the shards
        # what the push under way says of extra values, and its parts
        self._extra: ExtraRequest | None = None
        self._parts: ExtraParts | None = None
        self.pushed: messages.Push | None = None  # the push that was not waited for yet
        # what has become of it: its answers and the step of their values, or its fence
        self._settled: tuple[list[messages.PushReply], int] | Fenced | None = None
        self._failed: TriremeError | None = None  # with which a push has ended
        self._shown: tuple[messages.OptimizerSpec, Rule, ShownExtension | None] | None = None
        self._attached = 0  # the view of the oldest answer to `Attach`
        self._waits_for_load = False  # values were not loaded then

    # -- joining the job -------------------------------------------------------------------------

    def attach(
        self,
        layout: messages.LayoutSpec,
        optimizer: messages.OptimizerSpec,
        rule: Rule,
        extension: ShownExtension | None = None,
    ) -> Operation[bool]:
        """Shows every server the model; returns whether all have values loaded already."""
        self._rule, self._shown = rule, (optimizer, rule, extension)
        self._bounds, self._parts = layout.bounds, None
        self._hyper = None  # the servers may use what an earlier worker has shown
        attach = Request(messages.Attach(0, layout, *self._shown))
        try:
            answers = yield from self._ask(dict.fromkeys(range(self._shards), attach))
        except Divided:
            return True  # the new shards were shown it, and have values
        attached = self._all(answers, messages.Attached)
        self._attached = min(answer.view for answer in attached)
        self._waits_for_load = not all(answer.loaded for answer in attached)
        return not self._waits_for_load

    def load(self, state: ModelState, parts: Parts) -> Operation[None]:
        """Gives every server its part of the first values, or of a checkpoint; shard 0 last.

        Another chief may come: this one loads in the view in which it has attached, or not at all.
        """
        requests: dict[int, Request] = {}
        for shard, (tensors, payload) in enumerate(parts):
            load = Load(self._attached, state.step, tensors, state.workers, ())
            if shard == 0:
                load = msgspec.structs.replace(
                    load, consumed=state.consumed, sizes=state.sizes, orders=state.orders
                )
            requests[shard] = Request(load, payload, pinned=True)
        first = {0: requests.pop(0)}
        try:
            for part in (requests, first):
                for answer in (yield from self._ask(part)).values() if part else ():
                    expect(answer, Loaded)
            self._waits_for_load = False
        except Divided:
            return  # and the new shards have values

    def write_values(self, parts: Callable[[], Parts]) -> Operation[None]:
        """Gives every server its part of values that the program has written."""
        while True:
            requests = {
                shard: Request(WriteValues(0, tensors), payload)
                for shard, (tensors, payload) in enumerate(parts())
                if tensors
            }
            try:
                for answer in (yield from self._ask(requests)).values() if requests else ():
                    expect(answer, messages.Done)
                return
            except Divided:
                continue

    def add_parameters(
        self,
        optimizer: messages.OptimizerSpec,
        grown: Callable[[Parameters], tuple[messages.LayoutSpec, Parts]],
        lay_out: Callable[[Parameters], None],
    ) -> Operation[None]:
        """Adds parameters to the job's, or finds them there; then receives the values.

        Args:
            grown: returns the layout that adds them to some, or else to this worker's, and parts.
            lay_out: takes the parameters that the job has of this worker's.

        Raises:
            Fenced: this worker is out of the job.
            ModelMismatchError: others have added others.
        """
        assert self._shown is not None
        known: Parameters = ()
        while True:
            layout, parts = grown(known)
            attach = messages.Attach(0, layout, optimizer, *self._shown[1:])
            token = self._rng.getrandbits(53)
            requests = {
                shard: Request(AddParameters(0, token, attach, tensors), payload)
                for shard, (tensors, payload) in enumerate(parts)
            }
            try:
                answers = self._all((yield from self._ask(requests)), ParametersAdded)
            except Divided:
                continue
            known = max((answer.parameters for answer in answers), key=len)
            if all(len(each.parameters) == len(layout.parameters) for each in answers):
                break
        self._shown, self._hyper = (optimizer, *self._shown[1:]), None
        lay_out(known)
        yield from self._divide()
        yield from self.pull(train=False)
        if isinstance(self._settled, tuple):
            self._settled = self._settled[0], self.step

    def _divide(self) -> Operation[None]:
        """Lays the model out over the shards of the newest view, and shows them the model."""
        while True:
            layout: messages.LayoutSpec = yield DIVIDE
            self.divide(layout.shards, layout.bounds)
            if self._shown is None:
                return
            attach = Request(messages.Attach(0, layout, *self._shown))
            try:
                answers: Answers = yield Ask(dict.fromkeys(range(self._shards), attach))
            except Divided:
                continue
            if not all(each.loaded for each in self._all(answers, messages.Attached)):
                raise Fenced("the shards were divided anew before values were loaded", 0)
            return

    def divide(self, shards: int, bounds: Sequence[int] = ()) -> None:
        self._shards = shards
        self._bounds, self._parts = bounds, None
        self._divisions += 1

    def renew(self) -> None:
        self._sequence = self._acknowledged = 0
        self._extra = self._parts = None
        self.pushed = self._settled = self._failed = None

    # -- training --------------------------------------------------------------------------------

    def pull(self, *, train: bool = True, at_least: int = 0) -> Operation[None]:
        """Receives the values, `at_least` of that step; waits until the chief has loaded them."""
        request = messages.Pull(0, train, at_least)
        replies = yield from self._pull_all(request, again=not train)
        if train:
            self.stopping = replies[0].stop
        self.step = yield from self.level([reply.step for reply in replies], train=train)
        self.digests = self._digests_of(replies)
        yield PUBLISH

    def _digests_of(self, replies: Sequence[messages.PullReply | messages.PushReply]) -> list[int]:
        levels, step = self._rule.synchronous, self.step  # what is behind was pulled once more
        return [0 if levels and each.step != step else each.digest for each in replies]

    @property
    def waits(self) -> bool:
        """Whether the answers to a push are missing."""
        return self.pushed is not None and self._settled is None

    def next_push(
        self, weight: float, written: int = 0, **fields: Unpack[messages.PushFields]
    ) -> messages.Push:
        named: dict[str, Any] = {**fields}
        hyper, pulled = named.pop("hyper", None), named.pop("pulled", None)
        named["examples"] = tuple(named.get("examples", ()))
        if not weight and hyper != self._hyper:
            self._hyper = None  # others tell the servers, who would take "unchanged" for theirs
        self._extra, self._parts = named.pop("extra", None), None
        return messages.Push(
            view=0,
            sequence=self._sequence + 1,
            acknowledged=self._acknowledged,
            pulled=self.step if pulled is None else pulled,
            weight=weight,
            # Rounds take none from an update without examples, so it must not count as told.
            hyper=hyper if weight and hyper != self._hyper else None,
            written=written,
            **named,
        )

    def push(self, push: messages.Push) -> None:
        """Makes the next push. `wait` takes the answers."""
        self._check_failed()
        if self.stopping:
            raise after_the_end(self._worker, self.step)
        if self.pushed is not None:
            raise ConfigurationError(
                f"worker:{self._worker} makes a step, and the one before is not over: only one "
                "thread may make steps"
            )
        self._sequence = push.sequence
        self._hyper = push.hyper if push.hyper is not None else self._hyper
        self.pushed = push

    def _check_failed(self) -> None:
        if self._failed is not None:
            raise type(self._failed)(
                f"worker:{self._worker} makes no more steps, as one has failed and the program "
                f"goes on: {self._failed}. Let that error end the program"
            ) from self._failed

    def message(self, push: messages.Push, shard: int) -> messages.Push:
        """Returns the message of a push to one shard, without the view."""
        if self._extra is not None:
            self._parts = self._parts or self._extra.divided(self._bounds)
            push = msgspec.structs.replace(push, extra=self._parts.of_shard(shard, self._space))
        if shard == 0 or not push.examples:
            return push
        return msgspec.structs.replace(push, examples=())

    def wait(self) -> Operation[PushResult]:
        """Waits for the answers to the push, and publishes the values that they bring."""
        self._check_failed()
        yield from self.settle()
        if isinstance(self._settled, Fenced):
            raise self._settled
        assert self._settled is not None, "there was no push to wait for"
        self.replies, self.step = self._settled
        self.digests = self._digests_of(self.replies)
        self.pushed = self._settled = None
        self._acknowledged = self._sequence
        first = self.replies[0]
        verdict = first.verdict
        if type(verdict) is not messages.Applied and isinstance(decided(verdict), messages.Stale):
            self._hyper = None  # the servers have dropped them with the stale update
        yield PUBLISH
        return PushResult(verdict, self.step, first.staleness, self.stopping, notice=first.notice)

    def pull_extra(self, request: ExtraRequest) -> Operation[Any]:
        while True:
            yield from self.settle()  # lent memory holds one request
            parts = request.divided(self._bounds)
            extras = [parts.of_shard(shard, self._space) for shard in range(self._shards)]
            requests = {i: Request(messages.PullExtra(0, each)) for i, each in enumerate(extras)}
            try:
                answers = self._all((yield from self._ask(requests)), messages.PulledExtra)
            except Divided:
                continue
            return parts.united([answer.extra for answer in answers])

    def settle(self) -> Operation[None]:
        """Waits for the answers to the push under way; `wait` takes them, and reports a fence.

        Every other request settles first: a worker has one request at a time with a server.
        """
        if not self.waits:
            return
        try:
            while True:
                try:
                    replies = self._all((yield AWAIT), messages.PushReply)
                    break
                except Divided:  # each of the new shards decides it if none has before
                    yield from self._divide()
                    yield PUSH
            extra, parts = [reply.extra for reply in replies], self._parts
            # None of what it wanted comes where the shards were divided anew.
            self.brought = parts.united(extra) if parts is not None and all(extra) else None
            self.stopping = replies[0].stop
            self._settled = replies, replies[0].step
            # At once: the next request may find other shards, which these steps are not of.
            step = yield from self.level([reply.step for reply in replies])
            self._settled = replies, step
        except CopiesLost:
            raise
        except Fenced as fence:
            self._settled = fence
        except TriremeError as error:
            self.pushed, self._failed = None, error
            raise

    def level(self, steps: list[int], *, train: bool = True) -> Operation[int]:
        """Pulls until all parts of the values are of one step, in synchronous modes; returns it."""
        while self._rule.synchronous and len(set(steps)) > 1:
            target = max(steps)
            behind = [shard for shard, step in enumerate(steps) if step < target]
            pull = Request(messages.Pull(0, False, target))
            try:
                answers = yield from self._ask(dict.fromkeys(behind, pull))
                replies = [expect(answers[shard], messages.PullReply) for shard in behind]
            except Divided:  # the new shards are of one step
                replies = yield from self._ask_all(messages.Pull(0, False), messages.PullReply)
                behind, steps = [*range(self._shards)], [0] * self._shards
            for shard, reply in zip(behind, replies, strict=True):
                steps[shard] = reply.step
            if train and behind[0] == 0:  # the job may have ended since its first answer
                self.stopping = self.stopping or replies[0].stop
        return steps[0]

    def _pull_all(
        self, request: messages.Pull, *, again: bool
    ) -> Operation[list[messages.PullReply]]:
        """Pulls from all shards; from shard 0 first where this worker has found no values.

        Until shard 0 has values, others may have those of a chief that did not go on.
        """
        if self._waits_for_load:
            try:
                answers = dict((yield from self._ask({0: Request(request)}, again=again)))
                self._waits_for_load = False
                others = dict.fromkeys(range(1, self._shards), Request(request))
                if others:
                    answers.update((yield from self._ask(others, again=again)))
                return self._all(answers, messages.PullReply)
            except Divided:
                self._waits_for_load = False  # the new shards have values
        return (yield from self._ask_all(request, messages.PullReply, again=again))

    def retire(self) -> Operation[None]:
        """Tells the servers that this worker trains no more: nobody waits for it any longer."""
        yield from self._ask_all(messages.Retire(), messages.Done)

    # -- requests to shard 0 --------------------------------------------------------------------

    def lease(
        self,
        dataset: str,
        size: int,
        batch: int,
        count: int,
        **fields: Unpack[messages.LeaseFields],
    ) -> Operation[messages.Leased]:
        """Asks for the next examples: `count` spans of `batch`; see `Lease` for the fields."""
        self._leases += 1
        request = messages.Lease.of(dataset, size, batch, count, self._leases, fields)
        return (yield from self._ask_first(request, messages.Leased))

    def stop(self, reason: str) -> Operation[int]:
        """Asks to end the job; returns the global step at which it will end."""
        return (yield from self._ask_first(messages.StopJob(reason), messages.Stopping)).step

    def drain(self) -> Operation[int]:
        """Waits until every worker has retired, and pulls the values; returns their global step."""
        step = (yield from self._ask_first(messages.Drain(), messages.Stopping)).step
        if self._rule.synchronous and self.step == step:
            return step  # the round that made it has brought them
        yield from self.pull(train=False, at_least=step)
        return self.step

    def status(self) -> Operation[list[messages.ServerStatus]]:
        return self._ask_all(messages.Status(), messages.ServerStatus)

    def share(self, topic: str, data: bytes) -> Operation[None]:
        """Shares bytes with the other workers; without any the servers forget the topic."""
        yield from self._ask_first(messages.Share(topic), messages.Done, [memoryview(data)])

    def collect(self, topic: str) -> Operation[dict[int, bytes]]:
        """Returns the bytes that each worker has shared under a topic."""
        answers = yield from self._ask_until(lambda: {0: Request(messages.Collect(topic))})
        message, joined = expect(answers[0], messages.Collected), b"".join(answers[0][1])
        ends = [*accumulate(message.sizes)]
        return {
            worker: joined[end - size : end]
            for worker, size, end in zip(message.workers, message.sizes, ends, strict=True)
        }

    # -- a consistent copy -----------------------------------------------------------------------

    def snapshot(self, *, state: bool) -> Operation[Copy]:
        """Copies one consistent step of all servers."""
        began = yield Pause(0.0)
        while True:
            copy = yield from self._try_snapshot(state)
            if copy is not None:
                return copy
            now = yield Pause(BACK_OFF * (1 + self._rng.random()))
            if now - began > self._patience_seconds:
                raise WaitTimeout(
                    f"worker:{self._worker} could not copy a consistent state within "
                    f"{self._patience_seconds:.0f} s: servers were lost, or the shards divided "
                    "anew, each time"
                )

    def _try_snapshot(self, state: bool) -> Operation[Copy | None]:
        """Copies one step of all servers; returns None where an answer was lost on its way.

        All servers copy at the same point of the leader's decisions, once each was asked.
        """
        request = Request(TakeSnapshot(self._rng.getrandbits(53), state))
        try:
            answers = yield from self._ask(dict.fromkeys(range(self._shards), request))
        except Divided:
            return None
        if any(isinstance(m, messages.Refused) and m.code == "busy" for m, _ in answers.values()):
            return None
        return [(m, answers[shard][1]) for shard, m in enumerate(self._all(answers, Snapshot))]

    # -- inside ----------------------------------------------------------------------------------

    def _ask(self, requests: Mapping[int, Request], *, again: bool = True) -> Operation[Answers]:
        divisions = self._divisions
        yield from self.settle()
        if self._divisions != divisions:
            raise Divided  # the requests are for the shards before
        try:
            answers: Answers = yield Ask(requests, again)
        except Divided:
            yield from self._divide()
            raise
        return answers

    def _ask_until(
        self, requests: Callable[[], Mapping[int, Request]], *, again: bool = True
    ) -> Operation[Answers]:
        while True:
            try:
                return (yield from self._ask(requests(), again=again))
            except Divided:  # the next requests are for the new shards
                continue

    def _ask_all(
        self, message: Message, wanted: type[_M], *, again: bool = True
    ) -> Operation[list[_M]]:
        answers = yield from self._ask_until(
            lambda: dict.fromkeys(range(self._shards), Request(message)), again=again
        )
        return self._all(answers, wanted)

    def _ask_first(
        self, message: Message, wanted: type[_M], payload: Sequence[Any] = ()
    ) -> Operation[_M]:
        answers = yield from self._ask_until(lambda: {0: Request(message, payload)})
        return expect(answers[0], wanted)

    def _all(self, answers: Answers, wanted: type[_M]) -> list[_M]:
        return [expect(answers[shard], wanted) for shard in range(self._shards)]
