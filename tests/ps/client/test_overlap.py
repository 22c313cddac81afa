"""Early pushes: no server has the whole of one before it is final, and what fails is sent again."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests.faults import Proxies
from tests.ps.client.test_client import JOB, SECRET, Membership, Servers, servers
from trireme.cluster.view import View
from trireme.errors import FrameError
from trireme.ps.client.client import OVERLAP_BYTES, Client
from trireme.ps.client.overlap import Overlap
from trireme.ps.client.server_links import ClientOptions
from trireme.ps.flat import FlatModel
from trireme.ps.messages import Applied, GroupSpec, Push, Span
from trireme.ps.optimizers import spec_of
from trireme.ps.replication_messages import Address
from trireme.ps.rule import Rule
from trireme.ps.server.handler import ShardHandler
from trireme.ps.shard.shard import Shard
from trireme.ps.shard.state import ShownModel
from trireme.ps.snapshot import ModelState
from trireme.wire.frame_reader import Incoming
from trireme.wire.handshake import Identity

LAYERS, WIDTH = 6, 32


@pytest.fixture(autouse=True)
def small_chunks() -> Iterator[None]:
    with mock.patch("trireme.ps.layout.CHUNK_BYTES", WIDTH * 4):
        yield


class Layers(nn.Module):
    """Some vectors; the gradient of each element is the input, whatever the values."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(torch.zeros(WIDTH) for _ in range(LAYERS))

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(())
        for vector in self.vectors:
            total = total + (vector * scale).sum()
        return total


class Worker:
    """A client that computes real gradients and sends them early."""

    def __init__(self, made: Servers, index: int = 0, overlap: Any = "on") -> None:
        self.model = Layers()
        self.flat = FlatModel([list(self.model.named_parameters())], servers=len(made.services))
        options = ClientOptions(JOB, SECRET, index, 1, patience_seconds=10.0, overlap=overlap)
        self.client = Client(options, Membership(made.first_view), self.flat)
        self.client.attach(spec_of(torch.optim.SGD(self.model.parameters(), lr=1.0)), Rule())
        self.client.load(ModelState(0, {n: p.detach() for n, p in self.flat.parameters.items()}))
        self.client.pull()

    def begin(self) -> torch.Tensor:
        """Announces a push; returns the loss to go back from."""
        self.flat.zero_gradients()
        loss: torch.Tensor = self.model(torch.tensor(-1.0))
        self.client.begin(1.0)
        return loss

    def push(self) -> Any:
        self.client.push(1.0)
        return self.client.wait().verdict

    def step(self) -> Any:
        self.begin().backward()  # type: ignore[no-untyped-call]
        return self.push()

    @property
    def values(self) -> list[float]:
        return [float(v) for p in self.model.parameters() for v in p.detach().unique()]

    @property
    def overlap(self) -> Overlap:
        return self.client._overlap


@pytest.fixture(params=[1, 2], ids=["one server", "two servers"])
def made(request: pytest.FixtureRequest) -> Iterator[Servers]:
    with servers(request.param, workers=2) as made:
        yield made


@pytest.fixture
def worker(made: Servers) -> Iterator[Worker]:
    worker = Worker(made)
    yield worker
    worker.client.close()


def decided(made: Servers) -> list[int]:
    """How many pushes of worker 0 each server has decided, asked by somebody else."""
    onlooker = Worker(made, 1, "off")
    counts = [
        sum(row.sequence for row in status.workers if row.worker == 0)
        for status in onlooker.client.status()
    ]
    onlooker.client.close()
    return counts


def test_early_pushes_are_applied_like_others(worker: Worker) -> None:
    for step in range(5):
        assert worker.step() == Applied(step + 1)
    assert worker.values == [5.0] * LAYERS
    assert not worker.overlap.ruled_out


def test_no_server_has_the_whole_of_a_push_before_it_is_made(worker: Worker, made: Servers) -> None:
    worker.begin().backward()  # type: ignore[no-untyped-call]
    links = worker.client._servers.links
    assert all(link.connection is not None and link.connection.in_frame for link in links)
    assert decided(made) == [0] * len(links)
    assert worker.push() == Applied(1)
    assert decided(made) == [1] * len(links)
    assert worker.values == [1.0] * LAYERS


def test_chunks_leave_during_backward(worker: Worker) -> None:
    given: list[int] = []
    loss = worker.begin()
    sender = worker.overlap._sender
    assert sender is not None
    give = sender.give
    with mock.patch.object(sender, "give", lambda i, p: (given.append(len(p)), give(i, p))):
        loss.backward()  # type: ignore[no-untyped-call]
        outlets = worker.overlap._outlets
        # All but the last of each server.
        assert sum(given) == sum(len(outlet.chunks) - 1 for outlet in outlets)
    assert worker.push() == Applied(1)


def test_the_order_is_that_in_which_gradients_became_final(worker: Worker) -> None:
    finals: list[int] = []
    for position, parameter in enumerate(worker.model.parameters()):
        parameter.register_hook(lambda _, p=position: finals.append(p))
    for step in range(2):
        finals.clear()
        assert worker.step() == Applied(step + 1)
    for server, outlet in enumerate(worker.overlap._outlets):
        chunks = worker.flat.layout.chunks(server)
        ready = [max(finals.index(p) for p in chunks[index].parameters) for index in outlet.order]
        assert ready == sorted(ready)


# What rules it out ---------------------------------------------------------------------------


def test_two_backwards_are_pushed_whole_and_rule_it_out(worker: Worker, made: Servers) -> None:
    worker.begin().backward()  # type: ignore[no-untyped-call]
    worker.model(torch.tensor(-2.0)).backward()
    assert worker.push() == Applied(1)
    assert worker.values == [3.0] * LAYERS
    assert "several parts" in worker.overlap.ruled_out
    loss = worker.begin()
    assert worker.client._protocol.announced is None, "it is ruled out"
    loss.backward()  # type: ignore[no-untyped-call]
    assert worker.push() == Applied(2)
    assert worker.client._protocol.announced is None
    assert worker.values == [4.0] * LAYERS
    assert decided(made) == [2] * len(made.services)


def spoil_by_writing(worker: Worker) -> None:
    for gradient in worker.flat.gradients:
        gradient.mul_(2.0)


def spoil_by_writing_to_one(worker: Worker) -> None:
    gradient = worker.model.vectors[-1].grad
    assert gradient is not None
    gradient.add_(1.0)


def spoil_by_replacing(worker: Worker) -> None:
    for parameter in worker.model.parameters():
        parameter.grad = torch.full((WIDTH,), -7.0)


def spoil_by_dropping(worker: Worker) -> None:
    worker.model.vectors[0].grad = None


@pytest.mark.parametrize(
    ("spoil", "values"),
    [
        (spoil_by_writing, [2.0] * LAYERS),
        (spoil_by_writing_to_one, [1.0] * (LAYERS - 1) + [0.0]),
        (spoil_by_replacing, [7.0] * LAYERS),
        (spoil_by_dropping, [0.0] + [1.0] * (LAYERS - 1)),
    ],
)
def test_what_is_done_to_gradients_after_backward_is_pushed(
    spoil: Any, values: list[float], worker: Worker
) -> None:
    worker.begin().backward()  # type: ignore[no-untyped-call]
    spoil(worker)
    assert worker.push() == Applied(1)
    assert worker.values == values
    assert worker.overlap.ruled_out
    assert worker.client._protocol.announced is None


def test_a_hook_that_changes_gradients_behind_autograds_back_rules_it_out(worker: Worker) -> None:
    assert worker.step() == Applied(1)

    def double(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.data.mul_(2.0)  # not counted as a write

    for parameter in worker.model.parameters():
        parameter.register_post_accumulate_grad_hook(double)  # type: ignore[no-untyped-call]
    assert worker.step() == Applied(2)
    assert worker.values == [3.0] * LAYERS
    assert "another hook" in worker.overlap.ruled_out


class Failing(torch.autograd.Function):
    """Fails half way through backward."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        raise ArithmeticError("half way")


def test_a_backward_that_fails_leaves_no_trace(worker: Worker, made: Servers) -> None:
    assert worker.step() == Applied(1)
    first = worker.model.vectors[0]
    worker.flat.zero_gradients()
    loss = Failing.apply(first.sum()) + sum(v.sum() * 9 for v in list(worker.model.vectors)[1:])
    worker.client.begin(1.0)
    with pytest.raises(ArithmeticError):
        loss.backward()
    assert worker.client.status()[0].step == 1  # another request: the push is given up
    assert worker.client._protocol.announced is None
    assert worker.step() == Applied(2)
    assert worker.values == [2.0] * LAYERS
    assert decided(made) == [2] * len(made.services)
    assert not worker.overlap.ruled_out


def test_a_push_that_is_begun_anew_takes_the_place_of_the_one_before(worker: Worker) -> None:
    worker.begin().backward()  # type: ignore[no-untyped-call]
    assert worker.step() == Applied(1)
    assert worker.values == [1.0] * LAYERS


OTHER_WORDS = {
    "weight": 2.0,
    "hyper": (GroupSpec({"lr": 3.0}),),
    "examples": (Span("d", 0, 4),),
    "pulled": 0,
}


@pytest.mark.parametrize(("name", "value"), OTHER_WORDS.items(), ids=OTHER_WORDS)
def test_a_push_of_other_words_than_announced_is_sent_whole_in_those_words(
    name: str, value: Any, worker: Worker, made: Servers
) -> None:
    assert worker.step() == Applied(1)
    worker.begin().backward()  # type: ignore[no-untyped-call]
    heard: dict[int, Push] = {}
    push = Shard.push

    def noted(shard: Shard, now: float, route: object, who: Any, said: Push, part: Any) -> Any:
        heard[shard.server] = said
        return push(shard, now, route, who, said, part)

    with mock.patch.object(Shard, "push", noted):
        worker.client.push(**{"weight": 1.0, name: value})
        assert worker.client.wait().verdict == Applied(2)
    assert getattr(heard[0], name) == value
    assert [said.order for said in heard.values()] == [()] * len(made.services)
    assert worker.values == [4.0 if name == "hyper" else 2.0] * LAYERS
    assert not worker.overlap.ruled_out


def test_what_surprises_again_and_again_rules_it_out(worker: Worker) -> None:
    assert worker.step() == Applied(1)
    worker.begin()
    for _ in range(2):
        worker.overlap.note_mismatch()
    assert not worker.overlap.ruled_out
    worker.overlap.note_mismatch()
    assert "changes from step to step" in worker.overlap.ruled_out


def test_a_client_that_closes_in_backward_ends_its_thread_and_its_watch(made: Servers) -> None:
    worker = Worker(made)
    worker.begin()
    overlap = worker.overlap
    sender = overlap._sender
    assert sender is not None
    worker.client.close()
    assert not sender._thread.is_alive()
    again = FlatModel([list(worker.model.named_parameters())], servers=1)
    with mock.patch.object(again, "_bound", again._bound):
        handles = again.watch_gradients(lambda position: None)
        assert again.watched_alone
    for handle in handles:
        handle.remove()


def test_small_models_push_after_backward(made: Servers) -> None:
    worker = Worker(made, overlap="auto")
    assert worker.flat.layout.bytes < OVERLAP_BYTES
    assert worker.step() == Applied(1)
    assert not worker.overlap._handles
    with mock.patch("trireme.ps.client.client.OVERLAP_BYTES", worker.flat.layout.bytes):
        assert worker.step() == Applied(2)
    assert [link.index for link in worker.overlap._open] == [*range(len(made.services))]
    worker.client.close()


def test_who_turns_it_off_pushes_after_backward(made: Servers) -> None:
    worker = Worker(made, overlap="off")
    assert not worker.client.pushes_early
    assert worker.step() == Applied(1)
    assert not worker.overlap._handles
    worker.client.close()


def test_gradients_that_are_copied_before_they_are_sent_cannot_leave_early(made: Servers) -> None:
    worker = Worker(made)
    assert worker.client.pushes_early
    with mock.patch.object(FlatModel, "pushes_in_place", False):
        assert not worker.client.pushes_early
        assert worker.step() == Applied(1)
    assert not worker.overlap._handles
    worker.client.close()


# What breaks ---------------------------------------------------------------------------------


def test_a_connection_that_breaks_in_backward_is_made_again(made: Servers) -> None:
    with Proxies() as proxies:
        worker = Worker(made)
        loss = worker.begin()
        list(proxies.by_server.values())[-1].cut()
        loss.backward()  # type: ignore[no-untyped-call]
        assert worker.push() == Applied(1)
        assert worker.step() == Applied(2)
        assert worker.values == [2.0] * LAYERS
        assert not worker.overlap.ruled_out
        worker.client.close()
    assert decided(made) == [2] * len(made.services)


@pytest.mark.parametrize("seed", range(4))
def test_each_push_counts_once_however_often_connections_break(made: Servers, seed: int) -> None:
    finish, sent = Overlap.finish, list[int]()

    def counted(overlap: Overlap) -> list[int]:
        reached = finish(overlap)
        sent.append(len(reached))
        return reached

    # A push and its answer are some 1,700 bytes, and a handshake some hundred more.
    with (
        Proxies(seed, mean_lifetime=6000) as proxies,
        mock.patch.object(Overlap, "finish", counted),
    ):
        worker = Worker(made)
        for step in range(60):
            worker.begin().backward()  # type: ignore[no-untyped-call]
            worker.client.push(1.0)
            assert worker.client.wait().decided == Applied(step + 1)
        assert worker.values == [60.0] * LAYERS
        assert proxies.cuts > 5
        worker.client.close()
    assert sum(sent) > 20
    assert decided(made) == [60] * len(made.services)


# What a server takes ---------------------------------------------------------------------------


class StandIn:
    """What a handler needs of a link to place a payload."""

    def __init__(self) -> None:
        self.context: Any = None
        self.identity = Identity("job", "worker:0", 1)
        self.connection = SimpleNamespace(destination=None, lending=None)
        self.opened_here = False


def asked(handler: ShardHandler) -> Any:
    """A link that asks the handler's shard."""
    link: Any = StandIn()
    handler.authenticated(link)
    handler.received(link, Incoming(Address(0, 1), 0, (), 0))
    return link


def shown(flat: FlatModel) -> ShownModel:
    optimizer = spec_of(torch.optim.SGD(flat.parameters.values(), lr=1.0))
    return ShownModel("worker:0", flat.layout, optimizer, Rule())


def test_a_server_receives_chunks_in_the_order_that_the_push_names() -> None:
    handler, flat = ShardHandler(0), FlatModel([list(Layers().named_parameters())], servers=1)
    handler.view(View(1, (), ()))
    handler.shard.state.shown = shown(flat)
    link = asked(handler)
    order = (2, 0, 5, 1, 4, 3)
    length = flat.layout.bytes
    message = Push(1, 1, 0, 0, 1.0, order=order)
    for number, view in zip(order, handler._place(link, message, length), strict=True):
        view[:] = bytes([number]) * len(view)
    received = bytes(link.context.gradients.views[0])
    assert received == b"".join(bytes([n]) * (WIDTH * 4) for n in range(LAYERS))
    plain = handler._place(link, Push(1, 2, 1, 0, 1.0), length)
    assert plain == link.context.gradients.views


@pytest.mark.parametrize("order", [(0,), (0, 1, 2, 3, 4, 4), (1, 2, 3, 4, 5, 6), (0,) * 7, (-1,)])
def test_a_server_refuses_what_is_no_order_of_its_chunks(order: tuple[int, ...]) -> None:
    handler, flat = ShardHandler(0), FlatModel([list(Layers().named_parameters())], servers=1)
    handler.view(View(1, (), ()))
    handler.shard.state.shown = shown(flat)
    message = Push(1, 1, 0, 0, 1.0, order=order)
    with pytest.raises(FrameError, match="not each once"):
        handler._place(asked(handler), message, flat.layout.bytes)


def test_a_server_refuses_packed_gradients_in_chunks() -> None:
    handler, flat = ShardHandler(0), FlatModel([list(Layers().named_parameters())], servers=1)
    handler.view(View(1, (), ()))
    handler.shard.state.shown = shown(flat)
    handler.shard.state.rule = Rule(codec="fp16")
    message = Push(1, 1, 0, 0, 1.0, order=tuple(range(LAYERS)))
    with pytest.raises(FrameError, match="packed"):
        handler._place(asked(handler), message, flat.layout.bytes // 2)
