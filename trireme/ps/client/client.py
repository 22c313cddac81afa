"""A worker's client of the parameter servers: push, pull, wait.

It carries out what `ClientProtocol` and `Lanes` decide, and owns the buffers.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, Unpack

import numpy as np
import torch
from msgspec import structs

from trireme.errors import FrameError, TriremeError
from trireme.ps.client.lanes import Answer, ClientOptions, Divided, Request
from trireme.ps.client.operations import DIVIDE, PUBLISH, PUSH, Ask, Operation, Parts, Pause
from trireme.ps.client.protocol import ClientProtocol
from trireme.ps.client.server_links import Membership, ServerLinks, SharedBuffer
from trireme.ps.extension import Extension
from trireme.ps.extra import bytes_in
from trireme.ps.flat import FlatModel, NamedGroups, PartBuffer, as_bytes, specs_of
from trireme.ps.layout import Layout
from trireme.ps.messages import (
    LayoutSpec,
    OptimizerSpec,
    ParameterSpec,
    PulledExtra,
    PullReply,
    Push,
    PushFields,
    PushReply,
)
from trireme.ps.packing import PACKING, Packer, Residuals
from trireme.ps.results import PushResult
from trireme.ps.rule import Rule
from trireme.ps.shard.values.snapshot_tensors import Tensors, tensors_from
from trireme.ps.snapshot import ModelState, assemble, disassemble, values_of
from trireme.ps.snapshot_messages import TensorSpec
from trireme.wire.message import Message

_T = TypeVar("_T")
_P = ParamSpec("_P")


def _carried_out(
    operation: Callable[Concatenate[ClientProtocol, _P], Operation[_T]],
) -> Callable[Concatenate[Client, _P], _T]:
    @wraps(operation)
    def method(client: Client, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return client._run(operation(client._protocol, *args, **kwargs))

    return method


class Client:
    """A worker's connections to all parameter servers."""

    def __init__(self, options: ClientOptions, membership: Membership, flat: FlatModel) -> None:
        # The bytes of updates, as they are packed, that pushes have carried, and those of values
        # that answers have brought. Both count lent memory as they count a network, and leave out
        # headers, and copies for checkpoints and evaluations.
        self.bytes_sent = self.bytes_received = 0
        self._membership = membership
        self._flat = flat
        self._values: list[PartBuffer] = []  # the parts of the model, by shard
        self._gradients: list[PartBuffer] = []
        self._packers: list[Packer] = []  # one a shard, where pushes are packed
        self._packing_rule = Rule()
        self._packed = False  # whether a push is under way that was packed
        self._extension: Extension | None = None
        self._written = 0  # a digest of the values that were written since the last push
        # returns a digest of a gradient that is sent, 0 for none
        self.seal: Callable[[PartBuffer], int] = lambda gradient: 0
        self._servers = ServerLinks(options, membership, flat.layout.spec.shards, self._place)
        self._protocol = ClientProtocol(
            options.worker,
            flat.layout.spec.shards,
            patience_seconds=options.patience_seconds,
            rng=random.Random(),
            space=self._servers.space,
        )
        self._lay_out()

    @property
    def options(self) -> ClientOptions:
        """The worker's identity and timeouts; `renew` changes the incarnation."""
        return self._servers.lanes.options

    @property
    def residuals(self) -> Residuals:
        return PACKING.load("codecs").residuals(self._flat.layout, self._packers)

    @property
    def silent(self) -> tuple[float, str] | None:
        return self._servers.lanes.silent

    @property
    def step(self) -> int:
        """The global step of the values that this worker has."""
        return self._protocol.step

    @property
    def stopping(self) -> bool:
        return self._protocol.stopping

    @property
    def digests(self) -> Sequence[int]:
        """The digests of the values that came last, by shard; another object for each."""
        return self._protocol.digests

    # -- joining the job -------------------------------------------------------------------------

    def attach(
        self, optimizer: OptimizerSpec, rule: Rule, extension: Extension | None = None
    ) -> bool:
        """Shows every server the model, the optimizer, the rule and the extra values.

        Returns whether the values are loaded already, on every server. Raises `ModelMismatchError`
        where another worker showed another model.
        """
        self._extension, self._servers.lends_extra = extension, extension is not None
        shown = None if extension is None else extension.shown
        if self._servers.lanes.lost:  # begins anew with empty shards
            self._packers = []
            self._lay_out()
            self._protocol.renew()
        self._pack_by(rule)
        if self._packers:
            self._servers.shared_buffers = ()  # packed gradients lie elsewhere
        return self._run(self._protocol.attach(self._flat.layout.spec, optimizer, rule, shown))

    def load(self, state: ModelState) -> None:
        """Gives every server its part of the first values, or of a checkpoint."""
        layout, bounds = self._flat.layout, self._flat.layout.spec.bounds
        parts = [[*disassemble(layout, state, shard)] for shard in range(layout.spec.shards)]
        if self._extension is not None and state.extra:
            for shard, part in enumerate(parts):
                part += self._extension.tensors(state.extra, bounds, shard)
        self._run(self._protocol.load(state, [*map(_payload_of, parts)]))

    def write_values(self, values: Mapping[str, torch.Tensor], digest: int = 0) -> None:
        """Replaces values on the servers by those that the program has written.

        The next push says the digest: all workers of a round must say the same.
        """
        self._written = digest

        def parts() -> Parts:
            layout = self._flat.layout
            return [
                _payload_of(values_of(layout, values, shard)) for shard in range(layout.spec.shards)
            ]

        self._run(self._protocol.write_values(parts))

    def add_parameters(
        self,
        groups: NamedGroups,
        optimizer: OptimizerSpec,
        state: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Adds parameters to those that the job trains, and receives the values of all.

        Args:
            groups: those of the model and the added ones, as `FlatModel` takes them.
            state: what a checkpoint has of the optimizer's state, by `PARAMETER/STATE`.

        Raises:
            Fenced: this worker is out of the job.
            ModelMismatchError: others have added others.
        """
        flat = self._flat
        named = {name: parameter for group in groups for name, parameter in group}

        def grown(known: tuple[ParameterSpec, ...]) -> tuple[LayoutSpec, Parts]:
            before = flat.layout.spec
            layout = Layout(LayoutSpec(known or before.parameters, before.bounds))
            has = {each.name for each in layout.spec.parameters}
            added = ModelState(
                self.step,
                {name: each.detach().cpu() for name, each in named.items() if name not in has},
                optimizer={
                    key: tensor
                    for key, tensor in (state or {}).items()
                    if key.rpartition("/")[0] in named.keys() - has
                },
            )
            layout = layout.grown(specs_of(groups))
            shards = range(layout.spec.shards)
            parts = [disassemble(layout, added, shard, complete=False) for shard in shards]
            return layout.spec, [*map(_payload_of, parts)]

        def lay_out(known: tuple[ParameterSpec, ...]) -> None:
            flat.lay_out(groups, Layout(LayoutSpec(known, flat.layout.spec.bounds)))

        self._run(self._protocol.add_parameters(optimizer, grown, lay_out))

    # -- training --------------------------------------------------------------------------------

    pull = _carried_out(ClientProtocol.pull)

    def check(self) -> None:
        """Returns while the job runs; raises `JobFailed` when it has ended."""
        self._membership.check()

    def push(self, weight: float, **fields: Unpack[PushFields]) -> None:
        """Sends the flat gradients to all servers; `wait` has the answer. One push at a time.

        The weight is the number of examples that the gradient is the mean of; see `PushFields`.
        """
        protocol = self._protocol
        fields.setdefault("absent", self._flat.absent)
        written = self._written | fields.pop("optimizer", 0) << 32
        protocol.push(protocol.next_push(weight, written, **fields))
        self._written = 0
        self._flat.collect_gradients()
        with suppress(Divided):  # else it is sent to other shards when it is waited for
            self._servers.transmit(self._servers.lanes.ask(time.monotonic(), self._push_requests()))

    def _push_requests(self) -> dict[int, Request]:
        requests = {}
        assert self._protocol.pushed is not None
        for shard in range(len(self._values)):
            message = self._protocol.message(self._protocol.pushed, shard)
            payload, nbytes = self._payload(shard, message)
            if not self._packers and (digest := self.seal(self._gradients[shard])):
                message = structs.replace(message, digest=digest)
            requests[shard] = Request(message, payload)
            self.bytes_sent += nbytes
        return requests

    def wait(self) -> PushResult:
        """Waits for the answers to the push, and brings their values into the model."""
        return self._run(self._protocol.wait())

    pull_extra = _carried_out(ClientProtocol.pull_extra)

    @property
    def brought(self) -> Any:
        """The extra values that the last push wanted; None where they must be pulled."""
        return self._protocol.brought

    def end(self) -> None:
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

    def server(self, shard: int) -> int:
        return self._servers.lanes.server(shard)

    # -- a consistent copy -----------------------------------------------------------------------

    def snapshot(self, *, state: bool) -> ModelState:
        """Copies the values of one consistent step from all servers."""
        copy = self._run(self._protocol.snapshot(state=state))
        parts = [(cut, tensors_from(cut.tensors, payload)) for cut, payload in copy]
        grown = copy[0][0].layout
        layout = self._flat.layout if grown is None else Layout(grown)
        found = assemble(layout, parts)
        if self._extension is None:
            return found
        return replace(found, extra=self._extension.joined([tensors for _, tensors in parts]))

    def renew(self, incarnation: int) -> None:
        """Begins again as another incarnation: this worker had been taken for lost."""
        self._servers.close()
        self._servers.lanes.options = replace(self.options, incarnation=incarnation)
        self._protocol.renew()

    def close(self) -> None:
        if not self._servers.lanes.waiting:  # no server has a request to answer
            self._servers.shared_buffers = ()
        self._servers.close()
        if self._flat.memory is not None:
            self._flat.memory.close()

    # -- inside ----------------------------------------------------------------------------------

    def _run(self, operation: Operation[_T]) -> _T:
        result: Any = None
        servers, lanes = self._servers, self._servers.lanes
        try:
            while True:
                failed = isinstance(result, (TriremeError, Divided))
                wanted = operation.throw(result) if failed else operation.send(result)
                result = None
                if wanted == PUBLISH:
                    self._flat.publish_values()
                elif wanted == DIVIDE:
                    result = self._lay_out()
                elif isinstance(wanted, Pause):
                    time.sleep(wanted.seconds)
                    result = time.monotonic()
                else:
                    try:
                        if wanted == PUSH:
                            with suppress(Divided):  # else it is sent when it is waited for
                                servers.transmit(lanes.ask(time.monotonic(), self._push_requests()))
                            continue
                        if isinstance(wanted, Ask):
                            asked = lanes.ask(time.monotonic(), wanted.requests, again=wanted.again)
                            servers.transmit(asked)
                        result = servers.finish()
                        self._packed = False
                        self.bytes_received += self._received(result)
                    except (TriremeError, Divided) as error:
                        result = error
        except StopIteration as ended:
            value: _T = ended.value
            return value
        finally:
            # One that is left behind by an error would end when the interpreter has gone.
            operation.close()

    def _lay_out(self) -> LayoutSpec:
        """Lays the model out over the shards of the newest view; returns how."""
        flat, view = self._flat, self._membership.view
        bounds = flat.layout.spec.bounds if view is None or not view.shards else view.bounds
        residuals = None
        if self._packers:
            if self._packed:  # a push under way is packed once more, for the new shards
                for packer in self._packers:
                    packer.take_back()
            residuals = self.residuals.export()
        shards = range(len(bounds) - 1)
        flat.divide(bounds)
        self._packed, self._packers = False, []
        self._values = [flat.part_values(shard) for shard in shards]
        self._gradients = [flat.part_gradients(shard) for shard in shards]
        if residuals is not None:
            self._pack_by(self._packing_rule)
            self.residuals.restore(residuals)
        self._servers.divide(len(shards))
        self._servers.shared_buffers = ()
        if flat.memory is not None and self.options.share_memory and not self._packers:
            self._servers.shared_buffers = [
                SharedBuffer(flat.memory, gradients.views, values.views)
                for gradients, values in zip(self._gradients, self._values, strict=True)
            ]
        self._protocol.divide(len(shards), bounds)
        return flat.layout.spec

    def _pack_by(self, rule: Rule) -> None:
        self._packing_rule = rule
        if rule.codec != "none" and not self._packers:
            packing = PACKING.load("codecs")
            self._packers = [packing.packer(rule.codec, g, rule.deflates) for g in self._gradients]

    def _payload(self, shard: int, message: Push) -> tuple[Sequence[memoryview], int]:
        payload: Sequence[memoryview] = self._gradients[shard].views
        nbytes = self._gradients[shard].nbytes
        if self._packers:
            packer, layout = self._packers[shard], self._flat.layout
            if message.weight > 0:  # else it is not read there, and must not use up the residuals
                self._packed = True
                packer.pack(layout.ranges(message.absent, shard) if message.absent else ())
            payload = packer.views
            nbytes = sum(view.nbytes for view in payload)
        return payload, nbytes + sum(map(len, bytes_in(message.extra)))

    def _place(self, shard: int, message: Message, length: int) -> Sequence[memoryview]:
        """Returns the memory for a payload from a server: that of the model for values."""
        if not isinstance(message, (PushReply, PullReply)):
            return [np.empty(length, np.uint8).data]  # a `bytearray` would be zeroed first
        buffer = self._values[shard]
        if length != buffer.nbytes:
            raise FrameError(
                f"{self._servers.lanes.task(shard)} sent {length} bytes of values where its part "
                f"has {buffer.nbytes}"
            )
        return buffer.views

    def _received(self, answers: Mapping[int, Answer]) -> int:
        total = 0
        for shard, (message, _) in answers.items():
            if isinstance(message, PushReply | PulledExtra):
                total += sum(map(len, bytes_in(message.extra)))
            if isinstance(message, (PushReply, PullReply)):
                total += self._values[shard].nbytes
        return total


def _payload_of(tensors: Tensors) -> tuple[tuple[TensorSpec, ...], list[memoryview]]:
    payload = [as_bytes(tensor) for _, tensor in tensors if tensor.numel()]
    return tuple(spec for spec, _ in tensors), payload
