"""The processes that hold one model together, and the collectives between them.

The transport is `torch.distributed`: gloo between CPUs, NCCL between GPUs. A process group fails as
a whole: when one of its processes is gone, every operation of the others raises an error that says
so.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, partial

import numpy as np
import psutil
import torch
import torch.distributed as dist
from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trireme.cluster.spec import is_loopback
from trireme.errors import (
    AddressInUse,
    ConfigurationError,
    ConnectTimeout,
    TriremeError,
    WaitTimeout,
)
from trireme.mesh import AXES, Mesh
from trireme.parallel.processes.lost_peers import (
    REASONS,
    first_line,
    lost_peer,
    store_of_all,
    why_broken,
)
from trireme.parallel.sharding import refused_average
from trireme.session.model.process_group import ProcessGroup
from trireme.tensors import mean_of

# Evaluation and saving join shards axis by axis, of which torch warns needlessly.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


@dataclass(frozen=True, slots=True)
class ProcessGroupConfig:
    """The address, the mesh and the deadlines of a process group."""

    mesh: Mesh
    rank: int = 0
    address: str = ""  # `host:port` of the store by which processes meet; empty for one process
    listen_fd: int | None = None  # rank 0's listening socket, if the launcher has opened one
    # the prefix of the processes' keys in a store that the launcher serves, as torchrun does, and
    # keeps for later starts; empty where rank 0 serves the store
    prefix: str = ""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    join_seconds: float = 300.0  # within which all processes must join


class TorchProcessGroup(ProcessGroup):
    """This process's coordinates in a mesh, and the process groups along its axes."""

    def __init__(self, config: ProcessGroupConfig) -> None:
        self.mesh = config.mesh
        self.rank = config.rank
        self.device = config.device
        self.coordinates = config.mesh.coordinates(config.rank)
        self.output_part = self.mesh.parts - 1  # has the model's outputs; a graph may change it
        self._config = config
        before = _connections()
        self._met_at = _rendezvous(config)
        shape = tuple(getattr(self.mesh, axis) for axis in AXES)
        self._devices = init_device_mesh(self.device.type, shape, mesh_dim_names=AXES)
        # The group of all messages besides the model's tensors: always between CPUs.
        self._control: dist.ProcessGroup = dist.new_group(backend="gloo")
        # Those that hold the same part of the model, and average gradients with this one.
        self.replicas: dist.ProcessGroup | None = None
        if self.mesh.replicas > 1:
            self.replicas = self._devices["dp", "fsdp"]._flatten().get_group()
        # Each pair of processes is connected when a group is made.
        self._connections = {
            fd: ends for fd, ends in _connections().items() if before.get(fd) != ends
        }
        # A gloo thread that releases an operation takes Python's lock for its tensors. If the
        # interpreter ends at that moment, the process aborts: so the last operations are kept.
        self._recent: deque[object] = deque(maxlen=_RECENT)
        # This process's requests for the end of the step, such as to stop, as numbers; and what is
        # called with their sums over all processes, to raise an exception in all of them alike.
        self.votes: Sequence[float] = ()
        self.waiting: Callable[[], AbstractContextManager[None]] = nullcontext  # see StragglerWatch
        self.judge: Callable[[Sequence[float]], None] = lambda totals: None
        self._vote_totals: Callable[[], list[float]] | None = None

    @property
    def reports_metrics(self) -> bool:
        return self.coordinates["tp"] == 0 and self.part == self.output_part

    @property
    def part(self) -> int:
        """The index of this process's part of the layers, along pp or graph."""
        return self.coordinates["pp"] + self.coordinates["graph"]

    def submesh(self, *axes: str) -> DeviceMesh:
        """Returns the submesh along the given axes that contains this process."""
        return self._devices[axes]

    def group(self, axis: str) -> dist.ProcessGroup:
        """Returns the processes that differ from this process only along one axis."""
        return self._devices.get_group(axis)

    def total(self, numbers: Sequence[float]) -> Callable[[], list[float]]:
        tensor = torch.tensor(numbers, dtype=torch.float64)
        with lost_peer(), self.waiting():
            work = dist.all_reduce(tensor, group=self._control, async_op=True)
        self._recent.append(work)

        @cache
        def finish() -> list[float]:
            with lost_peer(), self.waiting():
                assert work is not None
                work.wait()
            sums: list[float] = tensor.tolist()
            return sums

        return finish

    def count(self, examples: float) -> Callable[[], float]:
        total = self.total([float(examples), *self.votes])
        self._vote_totals = lambda: total()[1:]

        def counted() -> float:
            numbers = total()
            self.judge(numbers[1:])
            return numbers[0]

        return counted

    def vote(self) -> Callable[[], list[float]]:
        votes, self._vote_totals = self._vote_totals, None
        return self.total(self.votes) if votes is None else votes

    def broadcast(self, data: bytes | None, source: int = 0) -> bytes:
        mine = data if self.rank == source else None
        assert mine is not None or self.rank != source
        head, rest = _framed(mine or b"")
        with lost_peer(), self.waiting():
            dist.broadcast(head, source, group=self._control)
            send = partial(dist.broadcast, src=source, group=self._control)
            if mine is None:
                return _received(head, send)
            if rest.numel():
                send(rest)
        return mine

    def gather(self, data: bytes) -> list[bytes]:
        """Returns the bytes of every process, in the order of ranks, in rank 0; elsewhere none."""
        head, rest = _framed(data)
        heads = [torch.empty_like(head) for _ in range(self.size)] if self.is_chief else None
        with lost_peer(), self.waiting():
            dist.gather(head, heads, 0, group=self._control)
            if heads is None:
                if rest.numel():
                    dist.send(rest, 0, group=self._control)
                return []
            found = [data]
            for rank, other in enumerate(heads[1:], 1):
                receive = partial(dist.recv, src=rank, group=self._control)
                found.append(_received(other, receive))
        return found

    def broadcast_tensor(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Broadcasts a CPU tensor from one process, in place."""
        with lost_peer(), self.waiting():
            dist.broadcast(tensor, source, group=self._control)

    def reduce_tensor(self, tensor: torch.Tensor, target: int = 0) -> None:
        """Sums a CPU tensor into that of one process; those of the others become undefined."""
        with lost_peer(), self.waiting():
            dist.reduce(tensor, target, group=self._control)

    def send_tensor(self, tensor: torch.Tensor, target: int) -> None:
        """Sends a tensor to one process, which calls `receive_tensor`."""
        if tensor.numel():
            flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            with lost_peer(), self.waiting():
                dist.send(flat, target, group=self._control)

    def receive_tensor(self, tensor: torch.Tensor, source: int) -> None:
        """Receives a tensor of one process into a contiguous CPU tensor of the same size."""
        if tensor.numel():
            with lost_peer(), self.waiting():
                dist.recv(tensor.view(-1).view(torch.uint8), source, group=self._control)

    def united(self, mine: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        joined = self.joined(mine)
        if self.mesh.replicas == 1:
            return joined
        parts = self.exchange(save_bytes(joined), self.reporting_ranks)
        everyone = [load_bytes(data) for data in parts]
        return {name: mean_of([one[name] for one in everyone]) for name in joined}

    def joined(self, mine: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the tensors of all parts of the layers together, on the CPU."""
        if self.mesh.parts == 1:
            return dict(mine)
        found: dict[str, torch.Tensor] = {}
        for data in self.exchange(save_bytes(dict(mine)), self.part_leaders()):
            found |= load_bytes(data)
        return found

    def part_leaders(self) -> list[int]:
        """Returns the first rank of each part of the layers, in the order of the parts."""
        per_part = self.size // self.mesh.parts
        return [part * per_part for part in range(self.mesh.parts)]

    def put(self, key: str, value: bytes) -> None:
        """Stores at most 8 MiB under a key for all processes, without waiting for any of them."""
        with lost_peer():
            store_of_all().set(key, value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes | None:
        """Returns the bytes stored under a key; None while there are none."""
        with lost_peer():
            store = store_of_all()
            return bytes(store.get(key)) if store.check([key]) else None

    def explain_by(self, reason: Callable[[float], TriremeError | None]) -> None:
        """Sets who knows why a collective has failed."""
        REASONS[:] = [reason]

    def why_broken(self, error: BaseException) -> TriremeError | None:
        sharded = refused_average(error) if self.mesh.sharded else None
        return sharded or why_broken(error)

    def interrupt(self) -> None:
        """Has each collective that waits for other processes fail, here and there, for good.

        No call of torch.distributed does that: it would wait for its deadline. The connections to
        the store stay.
        """
        port = int(self._config.address.rpartition(":")[2] or 0)
        for fd, ends in _connections().items():
            if self._connections.get(fd) == ends and port not in ends[1::2]:
                with suppress(OSError), socket.socket(fileno=os.dup(fd)) as ours:
                    ours.shutdown(socket.SHUT_RDWR)

    def close(self, *, together: bool) -> None:
        if not dist.is_initialized():
            return
        if together:
            if self.is_chief and self._config.prefix:  # before a process is started again
                self._met_at.add(f"{self._config.prefix}/{_GENERATION}", 1)
            self.total([0.0])()  # waits for all processes
        dist.destroy_process_group()
        REASONS.clear()
        _LAST.append(self._recent)
        time.sleep(_RELEASE_SECONDS)


# Bytes travel as a head of fixed size, which holds their length and the first of them, and the
# remaining ones: a short message takes one operation.
_LENGTH = 8
_INLINE = 248


def _framed(data: bytes) -> tuple[torch.Tensor, torch.Tensor]:
    head = len(data).to_bytes(_LENGTH, "little") + data[:_INLINE].ljust(_INLINE, b"\0")
    parts = (np.frombuffer(bytearray(part), np.uint8) for part in (head, data[_INLINE:]))
    first, rest = (torch.from_numpy(part) for part in parts)
    return first, rest


def _received(head: torch.Tensor, receive: Callable[[torch.Tensor], object]) -> bytes:
    length = int.from_bytes(head[:_LENGTH].numpy().tobytes(), "little")
    rest = torch.empty(max(length - _INLINE, 0), dtype=torch.uint8)
    if rest.numel():
        receive(rest)
    return head[_LENGTH:][:length].numpy().tobytes() + rest.numpy().tobytes()


_GENERATION = "generation"
_RECENT = 64
_RELEASE_SECONDS = 0.02
_LAST: list[object] = []
"""The last operations of closed process groups, kept until Python ends: see
`ProcessGroup.__init__`."""


def _rendezvous(config: ProcessGroupConfig) -> Store:
    if dist.is_initialized():
        raise ConfigurationError(
            "torch.distributed is initialised already: a session creates its own process groups; "
            "remove init_process_group from the program"
        )
    backend = "cpu:gloo,cuda:nccl" if config.device.type == "cuda" else "gloo"
    if config.device.type == "cuda":
        torch.cuda.set_device(config.device)
    timeout = timedelta(seconds=config.join_seconds)
    listen_fd = _listen(config)
    try:
        host, _, port = config.address.rpartition(":")
        served = TCPStore(
            host.strip("[]") or "127.0.0.1",
            int(port or 0),
            config.mesh.size,
            is_master=config.rank == 0 and not config.prefix,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listen_fd,
            use_libuv=True,
        )
        store = _generation_store(served, config.prefix) if config.prefix else served
        _wait_for_all(store, config)
        if config.device.type == "cuda":
            _refuse_shared_gpus(store, config)
        dist.init_process_group(backend, store=store, rank=config.rank, world_size=config.mesh.size)
    except (dist.DistError, RuntimeError) as error:
        raise ConnectTimeout(
            f"rank {config.rank} of {config.mesh.size} could not join the others at "
            f"{config.address} within {config.join_seconds:.0f} s: "
            f"{first_line(error)}; are all processes started, and can this one reach rank 0?"
        ) from error
    return served


def _listen(config: ProcessGroupConfig) -> int | None:
    """Returns rank 0's socket for the store: torch would listen on every address."""
    if config.rank or config.prefix or config.listen_fd is not None:
        return config.listen_fd if config.rank == 0 else None
    if not is_loopback(config.address):
        return None
    host, _, port = config.address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host.strip("[]"), int(port)), family=family).detach()
    except OSError as error:
        raise AddressInUse(
            f"rank 0 cannot listen at {config.address}, where the others look for it: "
            f"{error.strerror}; give all of them another port (MASTER_PORT)"
        ) from error


def _generation_store(store: Store, prefix: str) -> Store:
    return PrefixStore(f"{prefix}/{store.add(f'{prefix}/{_GENERATION}', 0)}", store)


def _wait_for_all(store: Store, config: ProcessGroupConfig) -> None:
    """Waits until every rank has joined; names the missing ranks when the time is over."""
    on_gpu = config.device.type == "cuda"
    store.set(
        f"here/{config.rank}",
        str(torch.cuda.get_device_properties(config.device).uuid) if on_gpu else "cpu",
    )
    keys = [f"here/{rank}" for rank in range(config.mesh.size)]
    try:
        store.wait(keys, timedelta(seconds=config.join_seconds))
    except dist.DistStoreError as error:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        names = ", ".join(f"rank {rank}" for rank in missing)
        raise WaitTimeout(
            f"{names} of {config.mesh.size} did not come within {config.join_seconds:.0f} s: "
            "start every process of the job, or give them longer (--join-timeout or "
            "TRIREME_JOIN_TIMEOUT)"
        ) from error


def _refuse_shared_gpus(store: Store, config: ProcessGroupConfig) -> None:
    """Refuses several processes on one GPU: NCCL needs one for each."""
    ranks: dict[bytes, list[int]] = {}
    for rank in range(config.mesh.size):
        ranks.setdefault(store.get(f"here/{rank}"), []).append(rank)
    shared = next((found for found in ranks.values() if len(found) > 1), None)
    if shared is not None:
        raise ConfigurationError(
            f"{config.mesh.size} processes compute together on {len(ranks)} GPU(s): "
            f"ranks {', '.join(map(str, shared))} have the same one. Start at most one process "
            "for each GPU; hide the GPUs to train on the processors (CUDA_VISIBLE_DEVICES=); or "
            "add servers (--ps 1), with which several workers can share a GPU"
        )


def _connections() -> dict[int, tuple[str | int, ...]]:
    """Returns the hosts and ports of both ends of this process's connections, by descriptor."""
    open_ = psutil.Process().net_connections("tcp")
    return {
        each.fd: (*each.laddr, *each.raddr) for each in open_ if each.status != psutil.CONN_LISTEN
    }
