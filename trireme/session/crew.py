"""A worker of several processes before a parameter server: a leader speaks for all of them.

The leader, rank 0, brings the gradients of all parts together, pushes and pulls as any worker
does, and hands the values out. The others do as it does, call by call.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from trireme.parallel.gang import Gang
from trireme.parallel.part import ModelPart
from trireme.ps.client import Client
from trireme.ps.dense import FlatModel
from trireme.ps.messages import GroupSpec, OptimizerSpec, Span, Verdict
from trireme.ps.results import PullResult, PushResult
from trireme.ps.rule import Rule
from trireme.ps.snapshot import ModelState
from trireme.session.averager import Averager

__all__ = ["CrewFollower", "CrewLeader"]


class _Told(msgspec.Struct, frozen=True):
    """What the leader has learned from the servers."""

    step: int
    stop: bool
    staleness: int = 0
    verdict: Verdict | None = None
    steps: int = 1


class _Crew:
    """What leader and followers have in common: gradients go up, values come down."""

    def __init__(self, gang: Gang, part: ModelPart, flat: FlatModel) -> None:
        self._gang = gang
        self._part = part
        self._flat = flat
        self._position = {name: position for position, name in enumerate(flat.parameters)}

    def _gather(self) -> None:
        """Adds up each process's share of the gradient in the leader's flat vectors.

        What no process has a gradient for has none in the leader afterwards either.
        """
        flat, gang = self._flat, self._gang
        flat.restore_gradients()
        for vector in flat.gradients:
            vector.zero_()
        here = torch.zeros(len(flat.parameters))
        for name, gradient in self._part.whole_gradients():
            here[self._position[name]] = 1.0
            if gang.first_of_stage:
                target = flat.parameters[name].grad
                assert target is not None
                target.copy_(gradient)
        for vector in flat.gradients:
            gang.reduce_tensor(vector)
        if gang.mesh.pp > 1:  # else every process has shares of all parameters
            gang.reduce_tensor(here)
        for name, position in self._position.items():
            if not here[position]:
                flat.parameters[name].grad = None

    def _spread(self) -> None:
        """Fills every process's part with the leader's values."""
        for vector in self._flat.values:
            self._gang.broadcast_tensor(vector)
        self._part.fill({n: p.detach() for n, p in self._flat.parameters.items()})


class CrewLeader(_Crew):
    """Rank 0, which has the connections to the servers.

    Args:
        gang: the processes of this worker.
        part: what this one holds.
        flat: the whole model, as the servers know it.
        client: the connections; or what trains by itself between exchanges by them.
    """

    def __init__(
        self, gang: Gang, part: ModelPart, flat: FlatModel, client: Client | Averager
    ) -> None:
        super().__init__(gang, part, flat)
        self._client = client
        self.attach = client.attach
        self.load = client.load
        self.stop = client.stop
        self.set_end = client.set_end
        self.retire = client.retire
        self.share = client.share
        self.collect = client.collect
        self.snapshot = client.snapshot
        self.close = client.close

    @property
    def step(self) -> int:
        """The global step of the values at hand."""
        return self._client.step

    @property
    def stopping(self) -> bool:
        """Whether this worker has been told to stop."""
        return self._client.stopping

    @property
    def bytes_sent(self) -> int:
        """Bytes sent to the servers."""
        return self._client.bytes_sent

    @property
    def bytes_received(self) -> int:
        """Bytes received from them."""
        return self._client.bytes_received

    def pull(self, *, train: bool = True) -> PullResult:
        """Receives the values and hands them out; all processes of the worker must ask."""
        result = self._client.pull(train=train)
        self._tell(_Told(result.step, result.stop))
        self._spread()
        return result

    def push(
        self,
        weight: float,
        *,
        hyper: tuple[GroupSpec, ...] | None = None,
        examples: Sequence[Span] = (),
        pull: bool = True,
    ) -> None:
        """Brings the gradients together and sends them."""
        self._gather()
        self._client.push(weight, hyper=hyper, examples=examples, pull=pull)

    def wait(self) -> PushResult | None:
        """Waits for the answers, if there was a push, and hands the values out."""
        result = self._client.wait()
        self._tell_result(result)
        return result

    def complete(self) -> PushResult | None:
        """Exchanges what this worker has learned by itself, and hands the values out."""
        if not isinstance(self._client, Averager):
            return None
        result = self._client.complete()
        self._tell_result(result)
        return result

    def _tell_result(self, result: PushResult | None) -> None:
        if result is None:
            told = _Told(self.step, self.stopping)
        else:
            told = _Told(result.step, result.stop, result.staleness, result.verdict, result.steps)
        self._tell(told)
        self._spread()

    def lease(
        self, dataset: str, size: int, batch: int, count: int, *, resized: bool = False
    ) -> tuple[Span, ...]:
        """Asks for the next examples, and tells the others."""
        spans = self._client.lease(dataset, size, batch, count, resized=resized)
        self._gang.broadcast(msgspec.msgpack.encode(spans))
        return spans

    def drain(self) -> int:
        """Waits until every worker has retired, and hands out the values then."""
        step = self._client.drain()
        self._tell(_Told(step, True))
        self._spread()
        return step

    def _tell(self, told: _Told) -> None:
        self._gang.broadcast(msgspec.msgpack.encode(told))


class CrewFollower(_Crew):
    """Any other process of a worker: it has no connection, and does as the leader does.

    Args:
        gang: the processes of this worker.
        part: what this one holds.
        flat: the whole model.
        averages: whether the leader trains by itself between exchanges.
    """

    def __init__(
        self, gang: Gang, part: ModelPart, flat: FlatModel, *, averages: bool = False
    ) -> None:
        super().__init__(gang, part, flat)
        self._averages = averages
        self.step = 0
        self.stopping = False
        self.bytes_sent = 0
        self.bytes_received = 0

    def attach(self, optimizer: OptimizerSpec, rule: Rule) -> bool:
        """The leader has shown the model, and sees to it that values are loaded."""
        return True

    def load(self, state: ModelState) -> None:
        """The leader loads."""

    def pull(self, *, train: bool = True) -> PullResult:
        """Takes the values that the leader has pulled."""
        told = self._listen()
        self._spread()
        return PullResult(told.step, told.stop)

    def push(
        self,
        weight: float,
        *,
        hyper: tuple[GroupSpec, ...] | None = None,
        examples: Sequence[Span] = (),
        pull: bool = True,
    ) -> None:
        """Gives the leader this process's gradients."""
        self._gather()

    def wait(self) -> PushResult | None:
        """Takes the leader's answer, if there was a push, and the values."""
        told = self._listen()
        self._spread()
        if told.verdict is None:
            return None
        return PushResult(told.verdict, told.step, told.staleness, told.stop, told.steps)

    def complete(self) -> PushResult | None:
        """Takes the values to which the leader's last exchange has led."""
        return self.wait() if self._averages else None

    def _listen(self) -> _Told:
        told = msgspec.msgpack.decode(self._gang.broadcast(None), type=_Told)
        self.step, self.stopping = told.step, told.stop
        return told

    def lease(
        self, dataset: str, size: int, batch: int, count: int, *, resized: bool = False
    ) -> tuple[Span, ...]:
        """Takes the examples that the leader was given."""
        return msgspec.msgpack.decode(self._gang.broadcast(None), type=tuple[Span, ...])

    def stop(self, reason: str) -> int:
        """The leader asks; whoever stops this process stops that one too."""
        return self.step

    def set_end(self, max_steps: int) -> int:
        """The leader says so."""
        return max_steps

    def retire(self) -> None:
        """The leader retires."""

    def drain(self) -> int:
        """Waits until every worker has retired, and takes the values then."""
        told = self._listen()
        self._spread()
        return told.step

    def share(self, topic: str, data: bytes) -> None:
        """The leader shares what is theirs together."""

    def collect(self, topic: str) -> dict[int, bytes]:
        """The leader hands out what there is."""
        return {}

    def snapshot(self, *, state: bool) -> ModelState:
        """Returns the values at hand: a cut of the servers is the leader's business."""
        return ModelState(
            self.step, {n: p.detach().cpu().clone() for n, p in self._flat.parameters.items()}
        )

    def close(self) -> None:
        """There is no connection."""
