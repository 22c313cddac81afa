"""A Trireme job of forked processes: real servers and members, workers that bring their own loop.

What a session does besides (hooks, progress, checkpoints) is left out; the coordinator, the
servers, the membership and the client are those of a session.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Literal

import torch
from torch import nn

from benchmarks.forked import Forked, fork
from benchmarks.paced import pace
from trireme.certificates import Certificates
from trireme.cluster.member import Member
from trireme.cluster.member_protocol import MemberConfig
from trireme.cluster.state import Policy
from trireme.cluster.view import View
from trireme.errors import JobFailed
from trireme.job_config import JobConfig
from trireme.ps.client.client import Client
from trireme.ps.client.lanes import ClientOptions
from trireme.ps.flat import FlatModel
from trireme.ps.optimizers import spec_of
from trireme.ps.rule import Rule
from trireme.ps.server.service import ServerConfig, serve
from trireme.ps.snapshot import ModelState
from trireme.tables.job.pushed_rows import PushedRows
from trireme.tables.table_spec import TableSpec
from trireme.tls.authority import JobAuthority

Transport = Literal["tcp", "tls", "shm"]

_JOB = "benchmark"
_SECONDS = 120.0


@dataclass(frozen=True)
class Address:
    """Where a job is, for its workers.

    Attributes:
        coordinator: the coordinator's address.
        secret: the job's.
        workers, servers: how many.
        certificates: the tasks', by name, where they connect by TLS.
    """

    coordinator: str
    secret: bytes
    workers: int
    servers: int
    certificates: Mapping[str, Certificates] = field(default_factory=dict)


def start_servers(
    *,
    workers: int,
    servers: int,
    shared: bool,
    bits: float = 0.0,
    tls: bool = False,
    replicas: int = 1,
) -> tuple[Address, list[Forked]]:
    """Starts servers, the first of which hosts the coordinator.

    Args:
        workers: how many workers will come.
        servers: how many to start.
        shared: whether workers may lend them memory.
        bits: how many a second each of their connections sends at most; 0 for no limit.
        tls: whether the tasks connect by TLS.
        replicas: how many servers hold each shard.
    """
    secret = secrets.token_bytes(32)
    started: list[Forked] = []
    coordinator: str | None = None
    names = [f"ps:{index}" for index in range(servers)]
    names += [f"worker:{index}" for index in range(workers)]
    authority = JobAuthority.make() if tls else None
    certificates = {name: Certificates(authority.issue(name)) for name in names if authority}
    for index in range(servers):
        config = ServerConfig(
            job=_JOB,
            secret=secret,
            index=index,
            listen=f"{'tls' if tls else 'tcp'}://127.0.0.1:0",
            coordinator=coordinator,
            policy=Policy(workers, servers, join_timeout=_SECONDS, replicas=replicas),
            config=JobConfig().replaced("a benchmark", transport="auto" if shared else "tcp"),
            certificates=certificates.get(f"ps:{index}"),
        )
        process = fork(f"ps:{index}", _serve, config, bits)
        started.append(process)
        address = process.receive(_SECONDS)
        coordinator = coordinator or address
    assert coordinator is not None
    return Address(coordinator, secret, workers, servers, certificates), started


def _serve(pipe: Connection, config: ServerConfig, bits: float) -> None:
    pace(bits)
    serve(config, pipe.send)


class _Watch:
    """A member as the client sees it."""

    def __init__(self, member: Member) -> None:
        self._member = member

    @property
    def view(self) -> View | None:
        """The newest view."""
        return self._member.view

    def check(self) -> None:
        """Raises JobFailed when the job is over."""
        over = self._member.over
        if over is not None:
            raise JobFailed(f"the job is over, {over.outcome}: {over.reason}")


@dataclass(frozen=True)
class Replica:
    """A worker that has joined, with the values of the first step.

    Attributes:
        flat: its model.
        client: its connection to the servers.
        member: its membership.
    """

    flat: FlatModel
    client: Client
    member: Member

    def exchange(self, weight: float = 1.0) -> None:
        """Pushes the gradients and has the new values."""
        self.client.push(weight)
        self.client.wait()


def join(
    address: Address,
    index: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rule: Rule,
    *,
    transport: Transport = "shm",
    tables: Sequence[TableSpec] = (),
) -> Replica:
    """Joins a job as one of its workers, and has the first values."""
    certificates = address.certificates.get(f"worker:{index}")
    named = [[(name, parameter) for name, parameter in model.named_parameters()]]
    flat = FlatModel(named, servers=address.servers, shared=transport == "shm")
    member = Member(
        MemberConfig(
            coordinator=address.coordinator,
            job=_JOB,
            role="worker",
            index=index,
            secret=address.secret,
            certificates=certificates,
            connect_timeout=_SECONDS,
        )
    )
    incarnation = member.join()
    view = member.wait_for_view(timeout=_SECONDS)
    options = ClientOptions(
        _JOB,
        address.secret,
        index,
        incarnation,
        epoch=member.epoch,
        share_memory=transport == "shm",
        certificates=certificates,
    )
    client = Client(options, _Watch(member), flat)
    extension = None
    if tables:
        extension = PushedRows()
        extension.specs = tuple(tables)
    loaded = client.attach(spec_of(optimizer), rule, extension)
    if not loaded and view.chief == index:
        client.load(ModelState(0, {name: p.detach() for name, p in flat.parameters.items()}))
    client.pull()
    return Replica(flat, client, member)


def flat_vector(numbers: int) -> nn.Module:
    """Returns a model that is one vector: bytes are bytes."""
    model = nn.Module()
    model.register_parameter("vector", nn.Parameter(torch.zeros(numbers)))
    return model


def kill(processes: Sequence[Forked]) -> None:
    """Ends processes."""
    for process in processes:
        process.kill()
