"""A server over real connections: the same numbers by tcp, by lent memory, and packed."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from tests.ps.peers import peer_links
from trireme.cluster.member import Member
from trireme.cluster.member_protocol import MemberConfig
from trireme.cluster.messages import JobOver
from trireme.cluster.state import Policy
from trireme.cluster.view import ServerEntry, View, WorkerEntry
from trireme.errors import WireError
from trireme.job_config import JobConfig
from trireme.ps.client.client import Client
from trireme.ps.client.lanes import ClientOptions
from trireme.ps.flat import FlatModel
from trireme.ps.messages import Applied, Push
from trireme.ps.optimizers import spec_of
from trireme.ps.rule import Rule
from trireme.ps.server.handler import ShardHandler
from trireme.ps.server.measures import Measures
from trireme.ps.server.service import Recording, ServerConfig, beside, serve
from trireme.ps.shard.shard import Shard
from trireme.ps.snapshot import ModelState
from trireme.wire.service import Service
from trireme.wire.transport import connect, listen, local_memory

JOB, SECRET = "job", b"s" * 32

lends_memory = pytest.mark.skipif(local_memory() is None, reason="lent memory needs shm and Linux")


class Fixed:
    """A membership that never changes."""

    def __init__(self, view: View) -> None:
        self.view = view

    def check(self) -> None:
        pass


@contextmanager
def servers(count: int, workers: int = 1) -> Iterator[View]:
    """Runs so many servers in threads."""
    listeners = [listen("tcp://127.0.0.1:0") for _ in range(count)]
    entries = tuple(ServerEntry(i, 1, each.address) for i, each in enumerate(listeners))
    view = View(1, entries, tuple(WorkerEntry(w, 1) for w in range(workers)))
    running = []
    links = []
    for index, listener in enumerate(listeners):
        handler = ShardHandler(index)
        service = Service(listener, [handler], job=JOB, secret=SECRET)
        service.listeners += beside(listener.address)
        links.append(peer_links(handler, service, JOB, SECRET))
        service.call_soon(lambda handler=handler: handler.view(view))
        thread = threading.Thread(target=service.run, daemon=True)
        thread.start()
        running.append((service, thread))
    try:
        yield view
    finally:
        for link in links:
            link.close()
        for service, thread in running:
            service.stop()
            thread.join(10)


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 3))


def joined(view: View, *, shared: bool, rule: Rule, epoch: str = "") -> tuple[Client, FlatModel]:
    trained = model()
    optimizer = torch.optim.Adam(trained.parameters(), lr=0.01)
    flat = FlatModel([list(trained.named_parameters())], servers=len(view.servers), shared=shared)
    client = Client(ClientOptions(JOB, SECRET, 0, 1, epoch=epoch), Fixed(view), flat)
    client.attach(spec_of(optimizer), rule)
    client.load(ModelState(0, {n: p.detach().clone() for n, p in flat.parameters.items()}))
    client.pull()
    return client, flat


def train(client: Client, flat: FlatModel, steps: int) -> dict[str, torch.Tensor]:
    """Pushes known gradients; returns the values."""
    generator = torch.Generator().manual_seed(2)
    for step in range(1, steps + 1):
        for gradient in flat.gradients:
            gradient.copy_(torch.randn(gradient.shape, generator=generator))
        client.push(1.0)
        assert client.wait().verdict == Applied(step)
    return {name: p.detach().clone() for name, p in flat.parameters.items()}


def plain(steps: int) -> dict[str, torch.Tensor]:
    trained = model()
    optimizer = torch.optim.Adam(trained.parameters(), lr=0.01)
    flat = FlatModel([list(trained.named_parameters())], servers=1)
    generator = torch.Generator().manual_seed(2)
    for _ in range(steps):
        for gradient in flat.gradients:
            gradient.copy_(torch.randn(gradient.shape, generator=generator))
        optimizer.step()
    return {name: p.detach().clone() for name, p in trained.named_parameters()}


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("shared", [False, pytest.param(True, marks=lends_memory)])
def test_the_values_are_those_of_one_process(count: int, shared: bool) -> None:
    with servers(count) as view:
        client, flat = joined(view, shared=shared, rule=Rule())
        values = train(client, flat, 20)
        connections = [link.connection for link in client._servers.links]
        assert all((c is not None and c.lending is not None) == shared for c in connections)
        client.close()
    for name, expected in plain(20).items():
        torch.testing.assert_close(values[name], expected, rtol=0, atol=1e-5)


@lends_memory
def test_over_lent_memory_a_step_sends_a_few_bytes() -> None:
    with servers(1) as view:
        client, flat = joined(view, shared=True, rule=Rule())
        connection = client._servers.links[0].connection
        assert connection is not None
        before = connection.bytes_sent, connection.bytes_received
        train(client, flat, 10)
        assert connection.bytes_sent - before[0] < 10 * 150
        assert connection.bytes_received - before[1] < 10 * 150
        client.close()


def test_a_snapshot_crosses_whatever_was_lent() -> None:
    with servers(2) as view:
        client, flat = joined(view, shared=True, rule=Rule())
        values = train(client, flat, 3)
        state = client.snapshot(state=True)
        client.close()
    assert state.step == 3
    for name, value in values.items():
        assert torch.equal(state.values[name], value)
        assert state.optimizer[f"{name}/exp_avg"].shape == value.shape


@lends_memory
def test_an_answer_of_the_size_of_the_values_leaves_the_lent_ones_alone() -> None:
    with servers(1) as view:
        client, flat = joined(view, shared=True, rule=Rule())
        trained = train(client, flat, 3)
        size = sum(value.nbytes for value in flat.values)
        client.share("topic", bytes(range(256)) * (size // 256) + bytes(size % 256))
        for value in flat.values:
            value.fill_(0.5)  # as where other workers have pushed since
        state = client.snapshot(state=False)
        assert len(client.collect("topic")[0]) == size
        assert all((value == 0.5).all() for value in flat.values)
        client.close()
    for name, value in trained.items():
        assert torch.equal(state.values[name], value)


@pytest.mark.parametrize("codec", ["fp16", "bf16", "int8", "topk:1.0"])
@pytest.mark.parametrize("count", [1, 2])
def test_packed_pushes_come_close_to_plain_ones(codec: str, count: int) -> None:
    with servers(count) as view:
        client, flat = joined(view, shared=True, rule=Rule(codec=codec))
        values = train(client, flat, 20)
        client.close()
    exact = plain(20)
    atol = 1e-5 if codec == "topk:1.0" else 0.02
    for name, expected in exact.items():
        torch.testing.assert_close(values[name], expected, rtol=0, atol=atol)


def test_a_broken_connection_is_made_again_and_nothing_applied_twice() -> None:
    with servers(1) as view:
        client, flat = joined(view, shared=True, rule=Rule())
        train(client, flat, 3)
        before = {name: p.detach().clone() for name, p in flat.parameters.items()}
        client.push(1.0)
        connection = client._servers.links[0].connection
        assert connection is not None
        connection.stream.close()  # the answer is lost with it
        result = client.wait()
        assert result.step == 4
        assert any(not torch.equal(before[n], p) for n, p in flat.parameters.items())
        assert client.status()[0].step == 4
        client.close()


PACKED = Rule(aggregate=0, staleness=0, every=1, codec="int8")


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"x" * 100, "a packed gradient makes no sense: the deflated bytes"),
        (zlib.compress(bytes(1 << 18)), "not one whole stream of"),
        (b"x" * 4000, "pushed 4000 bytes where this server's part has"),
    ],
    ids=["noise", "too much", "too long"],
)
def test_a_push_that_nobody_packed_ends_its_connection_with_one_clear_error(
    payload: bytes, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    with servers(1) as view:
        client, _ = joined(view, shared=False, rule=PACKED)
        connection = client._servers.links[0].connection
        assert connection is not None
        push = Push(view.number, 1, 0, 0, 1.0)
        connection.send(push, [payload], sequence=77, timeout=5.0)
        with pytest.raises(WireError):
            connection.receive(timeout=5.0)
        assert client.status()[0].step == 0, "the server goes on"
        client.close()
    assert message in caplog.text
    assert "Traceback" not in caplog.text


@pytest.mark.thorough
def test_a_server_that_listens_has_imported_what_optimizers_need() -> None:
    """Importing it takes seconds, in which the service's thread would answer nobody."""
    program = (
        "import sys\n"
        "import trireme.ps.server.service as server\n"
        "def listen(*given, **named):\n"
        "    loaded = set(sys.modules)\n"
        "    import torch\n"
        "    torch.optim.Adam([torch.zeros(1)], fused=True)\n"
        "    sys.exit(len([n for n in set(sys.modules) - loaded if n.startswith('torch')]))\n"
        "server.listen = listen\n"
        "config = server.ServerConfig('job', b's' * 32, 0, 'tcp://127.0.0.1:0', None, None)\n"
        "server.serve(config, print)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], timeout=100, check=False)
    assert ended.returncode == 0, "modules are imported when the first optimizer is made"


class Steps(Measures):
    """Tells the global step of a server's values."""

    def status(self, now: float, shard: Shard, logs: object) -> dict[str, float | str]:
        return {"global_step": shard.state.step}


def test_servers_join_a_job_serve_it_and_end_with_it() -> None:
    """What their processes run; server 0 hosts the coordinator."""
    policy = Policy(workers=1, servers=2, heartbeat_interval=0.1)
    listening: queue.Queue[str] = queue.Queue()
    ends: queue.Queue[JobOver | None] = queue.Queue()
    grown: queue.Queue[bool] = queue.Queue()
    kept: queue.Queue[Mapping[str, float | str]] = queue.Queue()

    def run(index: int, coordinator: str | None) -> None:
        where = "tcp://127.0.0.1:0"
        tcp = JobConfig().replaced("a test", transport="tcp")
        config = ServerConfig(JOB, SECRET, index, where, coordinator, policy, tcp)
        record: Recording = lambda status, last: kept.put(status) if last else None  # noqa: E731
        ends.put(serve(config, listening.put, measures=Steps(), record=record))
        grown.put(torch.is_grad_enabled())

    threads = []
    coordinator = None
    for index in range(2):
        threads.append(threading.Thread(target=run, args=(index, coordinator), daemon=True))
        threads[-1].start()
        coordinator = coordinator or listening.get(timeout=10)
    assert coordinator is not None
    if (memory := local_memory()) is not None:
        with pytest.raises(WireError):
            connect(memory.address(coordinator), timeout=1.0)
    member = Member(MemberConfig(coordinator, JOB, "worker", 0, SECRET))
    member.join(timeout=10)
    view = member.wait_for_view(timeout=10)
    client, flat = joined(view, shared=False, rule=Rule(0, 0), epoch=member.epoch)
    train(client, flat, 2)
    client.close()
    assert member.leave("finished")
    for thread in threads:
        thread.join(10)
    member.close()
    assert [getattr(ends.get(timeout=1), "outcome", None) for _ in threads] == ["finished"] * 2
    assert [grown.get(timeout=1) for _ in threads] == [False] * 2
    assert [kept.get(timeout=1)["global_step"] for _ in threads] == [2.0] * 2
