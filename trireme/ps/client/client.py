"""A worker's client of the parameter servers: push, pull, wait.

`ClientProtocol` makes the requests, and `Lanes` decides what is sent when. The client owns the
buffers: it receives values into the flat buffers of the worker's model, and sends gradients from
them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, Unpack

import torch

from trireme.errors import CopiesLost, Fenced
from trireme.ps.client.lanes import Answer, Divided, Request
from trireme.ps.client.model_parts import ModelParts
from trireme.ps.client.operations import PUBLISH, Ask, Operation, Pause
from trireme.ps.client.protocol import ClientProtocol
from trireme.ps.client.server_links import (
    ClientOptions,
    Membership,
    ServerLinks,
    SharedBuffer,
)
from trireme.ps.extension import Extension
from trireme.ps.extra import ShownExtension
from trireme.ps.flat import FlatModel, as_bytes
from trireme.ps.messages import (
    Attach,
    Attached,
    OptimizerSpec,
    Push,
    PushTerms,
    Traced,
    Verdict,
)
from trireme.ps.packing import Residuals
from trireme.ps.results import PushResult, ServerTrace
from trireme.ps.rule import Rule
from trireme.ps.shard.values.snapshot_tensors import Tensors, tensors_from
from trireme.ps.snapshot import Mark, ModelState, assemble, disassemble, values_of
from trireme.ps.snapshot_messages import TensorSpec
from trireme.wire.message import Message

_T = TypeVar("_T")
_P = ParamSpec("_P")


def _carried_out(
    operation: Callable[Concatenate[ClientProtocol, _P], Operation[_T]],
) -> Callable[Concatenate[Client, _P], _T]:
    """Returns the method of `Client` that carries an operation of its protocol out."""

    @wraps(operation)
    def method(client: Client, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return client._run(operation(client._protocol, *args, **kwargs))

    return method


class Client:
    """A worker's connections to all parameter servers.

    Raises:
        WaitTimeout: there is no view yet.
    """

    def __init__(self, options: ClientOptions, membership: Membership, flat: FlatModel) -> None:
        # The bytes of updates, as they are packed, that pushes have carried, and those of values
        # that answers have brought. Both count lent memory as they count a network, and leave out
        # headers, and copies for checkpoints and evaluations.
        self.bytes_sent = self.bytes_received = 0
        self._membership = membership
        self._parts = ModelParts(flat)
        self._shown: tuple[OptimizerSpec, Rule, ShownExtension | None] | None = None
        self._extension: Extension | None = None
        self._pushed: Push | None = None  # whose answers are missing
        self._written = 0  # a digest of the values that were written since the last push
        self._lost = False  # whether all copies of a shard were lost since
        self._servers = ServerLinks(options, membership, flat.layout.spec.shards, self._place)
        self._protocol = ClientProtocol(
            options.worker,
            flat.layout.spec.shards,
            patience_seconds=options.patience_seconds,
            rng=random.Random(),
            space=self._servers.space,
        )
        view = membership.view
        self._lay_out(flat.layout.spec.bounds if view is None or not view.shards else view.bounds)

    @property
    def options(self) -> ClientOptions:
        """The worker's identity and timeouts; `renew` changes the incarnation."""
        return self._servers.options

    @property
    def residuals(self) -> Residuals:
        """The residuals of packed pushes."""
        return self._parts.residuals

    @property
    def silent(self) -> tuple[float, str] | None:
        """Since when servers are out of reach, and their names; None where all are within it."""
        return self._servers.lanes.silent

    @property
    def step(self) -> int:
        """The global step of the values that this worker has."""
        return self._protocol.step

    @property
    def stopping(self) -> bool:
        """Whether this worker has been told to stop."""
        return self._protocol.stopping

    @property
    def verdicts(self) -> list[Verdict]:
        """Each server's verdict on the last push."""
        return [reply.verdict for reply in self._protocol.replies]

    # -- joining the job -------------------------------------------------------------------------

    def attach(
        self, optimizer: OptimizerSpec, rule: Rule, extension: Extension | None = None
    ) -> bool:
        """Shows every server the model, the optimizer, the rule and the extra values.

        Returns:
            Whether the values are loaded already, on every server.

        Raises:
            ModelMismatchError: another worker showed another model; names the first difference.
            UnsupportedOptimizerError: the server has no such optimizer.
        """
        shown = None if extension is None else extension.shown
        self._shown, self._extension = (optimizer, rule, shown), extension
        self._servers.lends_extra = extension is not None
        if self._lost:
            self._begin_anew()
        if not self._parts.packers:
            self._pack_by(rule)
        return self._run(self._protocol.attach(self._parts.layout.spec, optimizer, rule, shown))

    def _pack_by(self, rule: Rule) -> None:
        self._parts.pack_by(rule)
        if self._parts.packers:
            self._servers.shared_buffers = ()  # packed gradients lie elsewhere

    def load(self, state: ModelState) -> None:
        """Gives every server its part of the first values, or of a checkpoint.

        Raises:
            CheckpointError: the state is of another model.
        """
        layout, shards = self._parts.layout, range(len(self._parts.values))
        tensors = [
            [*disassemble(layout, state, shard), *self._extra_tensors(state, shard)]
            for shard in shards
        ]
        self._run(self._protocol.load(state, [*map(_payload_of, tensors)]))

    def write_values(self, values: Mapping[str, torch.Tensor], digest: int = 0) -> None:
        """Replaces values of parameters on the servers by those that the program has written.

        Args:
            digest: what the next push says of them: all workers of a round must say the same.

        Raises:
            Fenced: this worker is out of the job.
            Rejected: the servers take no such values.
        """
        self._written = digest
        while True:
            layout, shards = self._parts.layout, range(len(self._parts.values))
            parts = [_payload_of(values_of(layout, values, shard)) for shard in shards]
            try:
                self._run(self._protocol.write_values(parts))
                return
            except Divided:
                continue

    # -- training --------------------------------------------------------------------------------

    pull = _carried_out(ClientProtocol.pull)

    def check(self) -> None:
        """Returns while the job runs.

        Raises:
            JobFailed: it has ended; says who ended it, and why.
        """
        self._membership.check()

    def push(self, weight: float, **terms: Unpack[PushTerms]) -> None:
        """Sends the flat gradients to all servers; `wait` has the answer. One push at a time.

        Args:
            weight: the number of examples that the gradient is the mean of.
            terms: see `PushTerms`.

        Raises:
            ConfigurationError: the job has told this worker to stop, or a push is under way.
        """
        protocol = self._protocol
        terms.setdefault("absent", self._parts.flat.absent)
        made = protocol.next_push(weight, self._written, **terms)
        self._written = 0
        protocol.push(made)
        self._pushed = made
        self._parts.flat.collect_gradients()
        try:
            while not self._asked(made):
                self._divide()
        except CopiesLost:
            self._lost = True
            raise

    def _asked(self, made: Push) -> bool:
        """Sends a push to all servers; returns False where the shards were divided anew."""
        try:
            self._servers.ask(self._requests_of(made))
        except Divided:
            return False
        return True

    def _requests_of(self, made: Push) -> dict[int, Request]:
        """Returns the requests of a push, whose gradients are packed where they must be."""
        requests = {}
        for server in range(len(self._parts.values)):
            message = self._protocol.message(made, server)
            payload, nbytes = self._parts.payload_of(server, message)
            requests[server] = Request(message, payload)
            self.bytes_sent += nbytes
        return requests

    def wait(self) -> PushResult:
        """Waits for the answers to the push, and brings their values into the model.

        Raises:
            Fenced: this worker was replaced, or taken out of the job.
            Rejected: a server has refused the push, as it makes no sense.
            WaitTimeout: the answer was withheld too long; names those it was withheld for.
            JobFailed: the job ended meanwhile.
        """
        return self._run(self._protocol.wait())

    pull_extra = _carried_out(ClientProtocol.pull_extra)

    @property
    def brought(self) -> Any:
        """The extra values that the last push wanted, once `wait` has taken its answers.

        None where the shards were divided anew meanwhile: pull them.
        """
        return self._protocol.brought

    def end(self) -> None:
        """Makes no further update: this worker is to leave, and the job goes on without it."""
        self._protocol.stopping = True

    settle = _carried_out(ClientProtocol.settle)
    retire = _carried_out(ClientProtocol.retire)

    # -- requests to shard 0, and to all --------------------------------------------------------

    lease = _carried_out(ClientProtocol.lease)
    stop = _carried_out(ClientProtocol.stop)
    drain = _carried_out(ClientProtocol.drain)
    status = _carried_out(ClientProtocol.status)
    share = _carried_out(ClientProtocol.share)
    collect = _carried_out(ClientProtocol.collect)

    def trace(self, action: Literal["start", "stop", "read"]) -> list[ServerTrace]:
        """Asks each server in turn to begin or end a trace, or for the notes of its trace."""
        traces = []
        for shard in range(len(self._parts.values)):
            self.settle()
            message, payload = self._run(self._protocol.trace(shard, action))
            assert isinstance(message, Traced)
            traces.append(ServerTrace(message.offset, b"".join(payload)))
        return traces

    # -- a consistent copy -----------------------------------------------------------------------

    def snapshot(self, *, state: bool, since: Mark | None = None) -> ModelState:
        """Copies the values of one consistent step from all servers.

        Args:
            since: what has changed in the extra values after this mark is enough.

        Raises:
            WaitTimeout: no copy could be completed in time.
        """
        copy = self._run(self._protocol.snapshot(state=state, since=since))
        parts = [(cut, tensors_from(cut.tensors, payload)) for cut, payload in copy]
        found = assemble(self._parts.layout, parts)
        if self._extension is None:
            return found
        return replace(
            found,
            extra=self._extension.joined([tensors for _, tensors in parts]),
            since=since if parts[0][0].since >= 0 else None,
            mark=Mark(parts[0][0].step, min(cut.view for cut, _ in parts)),
        )

    def _extra_tensors(self, state: ModelState, shard: int) -> Tensors:
        """Returns a shard's part of the extra values of a state."""
        if self._extension is None or not state.extra:
            return []
        return self._extension.tensors(state.extra, self._parts.layout.spec.bounds, shard)

    def renew(self, incarnation: int) -> None:
        """Begins again as another incarnation: this worker had been taken for lost.

        The verdict on a push under way is not known. Its examples are leased again, unless it was
        applied.
        """
        self.close()
        self._servers.options = replace(self.options, incarnation=incarnation)
        self._servers.lanes.incarnation = incarnation
        self._protocol.renew()

    def close(self) -> None:
        """Closes all connections. May be repeated."""
        self._servers.close()

    # -- inside ----------------------------------------------------------------------------------

    def _run(self, operation: Operation[_T]) -> _T:
        """Carries out an operation of the protocol; returns its result."""
        result: Any = None
        try:
            while True:
                failed = isinstance(result, (Fenced, Divided))
                wanted = operation.throw(result) if failed else operation.send(result)
                if wanted == PUBLISH:
                    self._parts.flat.publish_values()
                    result = None
                elif isinstance(wanted, Pause):
                    time.sleep(wanted.seconds)
                    result = time.monotonic()
                else:
                    result = self._answers(wanted)
        except StopIteration as ended:
            value: _T = ended.value
            return value
        finally:
            # One that is left behind by an error would end when the interpreter has gone.
            operation.close()

    def _answers(self, wanted: Ask | Literal["await"]) -> Mapping[int, Answer] | Exception:
        """Asks, and waits for the answers; or returns why there are none."""
        try:
            if isinstance(wanted, Ask):
                self._servers.ask(wanted.requests, again=wanted.again)
            answers = self._servers.finish()
        except Fenced as fence:
            self._lost = self._lost or isinstance(fence, CopiesLost)
            return fence
        except Divided:
            return self._ask_anew(wanted)
        self.bytes_received += self._parts.bytes_in(answers)
        return answers

    def _ask_anew(self, wanted: Ask | Literal["await"]) -> Mapping[int, Answer] | Exception:
        """Asks the new shards, as those before were divided; or returns why that cannot be.

        What is under way is a push: each shard decides it if none has before. Other requests are
        made anew by the protocol.
        """
        try:
            self._divide()
            if isinstance(wanted, Ask):
                return Divided()
            return self._ask_again(wanted)
        except Fenced as fence:
            self._lost = self._lost or isinstance(fence, CopiesLost)
            return fence

    def _ask_again(self, wanted: Literal["await"]) -> Mapping[int, Answer] | Exception:
        """Pushes once more what the shards before may not have decided."""
        assert self._pushed is not None
        try:
            self._servers.ask(self._requests_of(self._pushed))
        except Divided:
            return self._ask_anew(wanted)
        return self._answers(wanted)

    def _divide(self) -> None:
        """Lays all out over the shards of the newest view, and shows them the model.

        Raises:
            Fenced: no values were loaded yet: the chief may be another worker now.
        """
        if self._pushed is not None and self._protocol.waits:
            for packer in self._parts.packers:
                packer.take_back()
        while True:
            residuals = self.residuals.export() if self._parts.packers else None
            self._lay_out(self._servers.lanes.known_view().bounds)
            if self._shown is None:
                return
            self._pack_by(self._shown[1])
            if residuals is not None:
                self.residuals.restore(residuals)
            attach = Attach(0, self._parts.layout.spec, *self._shown)
            try:
                self._servers.ask(dict.fromkeys(range(len(self._parts.values)), Request(attach)))
                answers = self._servers.finish()
            except Divided:
                continue
            attached = [message for message, _ in answers.values()]
            if not all(isinstance(each, Attached) and each.loaded for each in attached):
                raise Fenced("the shards were divided anew before values were loaded", 0)
            return

    def _begin_anew(self) -> None:
        """Begins anew with empty shards, as all copies of one were lost."""
        self._lost = False
        self._lay_out(self._servers.lanes.known_view().bounds)
        self._protocol.renew()

    def _lay_out(self, bounds: tuple[int, ...]) -> None:
        """Lays messages out over shards that begin at these slots."""
        parts, shards = self._parts, len(bounds) - 1
        parts.divide(bounds)
        self._servers.divide(shards)
        memory = parts.flat.memory
        if memory is not None and self.options.share_memory:
            self._servers.shared_buffers = [
                SharedBuffer(memory, gradients.views, values.views)
                for gradients, values in zip(parts.gradients, parts.values, strict=True)
            ]
        self._protocol.divide(shards, bounds)

    def _place(self, server: int, message: Message, length: int) -> Sequence[memoryview]:
        return self._parts.place(server, message, length, self._servers.lanes.task(server))


def _payload_of(tensors: Tensors) -> tuple[tuple[TensorSpec, ...], list[memoryview]]:
    """Returns how tensors are described, and their memory."""
    payload = [as_bytes(tensor) for _, tensor in tensors if tensor.numel()]
    return tuple(spec for spec, _ in tensors), payload
