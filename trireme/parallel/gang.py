"""The processes that hold one model together, and what they say to each other at each step.

`torch.distributed` carries it: gloo between CPUs, NCCL between GPUs. A gang lives and dies as one:
when a process of it is gone, every operation of the others fails, with an error that says so.
"""

from __future__ import annotations

import logging
import re
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trireme.cluster.mesh import AXES, Mesh
from trireme.cluster.spec import is_loopback
from trireme.errors import AddressInUse, ConfigurationError, ConnectTimeout, JobFailed, WaitTimeout
from trireme.launch.outcome import says_peer_is_gone

__all__ = ["Gang", "GangConfig", "lost_peer"]

# Shards of shards are joined axis by axis, when something is evaluated or saved: no need to say so.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


@dataclass(frozen=True, slots=True)
class GangConfig:
    """Where and with whom a process computes.

    Attributes:
        mesh: the degrees; its size is the number of processes.
        rank: which of them this is.
        address: `host:port` of the store at which they find each other, served by rank 0; empty
            for one process.
        listen_fd: a listening socket for that store, in rank 0, if its launcher has made one.
        prefix: of these processes' keys in a store that their launcher serves, as torchrun does,
            and keeps for whoever it starts next; empty where rank 0 serves it.
        device: where this process computes.
        join_seconds: until all must have come.
        wait_seconds: how long one operation may wait for the others.
    """

    mesh: Mesh
    rank: int = 0
    address: str = ""
    listen_fd: int | None = None
    prefix: str = ""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    join_seconds: float = 300.0
    wait_seconds: float = 1800.0


class Gang:
    """This process's place in a mesh, and the groups along its axes.

    Args:
        config: see `GangConfig`.

    Attributes:
        mesh: the degrees.
        rank: this process's, from 0; rank 0 is the chief.
        place: where it stands on each axis.
        wishes: what this process would have all do after the step, as numbers that are added up.

    Raises:
        WaitTimeout: not all processes came in time.
        ConnectTimeout: the store of rank 0 was not found.
    """

    def __init__(self, config: GangConfig) -> None:
        self.mesh = config.mesh
        self.rank = config.rank
        self.device = config.device
        self.place = config.mesh.coordinates(config.rank)
        self._config = config
        self._met_at = _meet(config)
        self._devices = self._make_mesh()
        # What processes tell each other besides tensors of the model: always between CPUs.
        self._control = dist.new_group(
            backend="gloo", timeout=timedelta(seconds=config.wait_seconds)
        )
        self._replicas = self._replica_group()
        # A thread of gloo's that lets go of an exchange wants Python's lock for its tensors. Should
        # Python end just then, the process would abort: so the last exchanges are let go of here.
        self._recent: deque[object] = deque(maxlen=_RECENT)
        self.wishes: Sequence[float] = ()  # what this process would have all do after the step
        self._votes: Callable[[], list[float]] | None = None

    def _make_mesh(self) -> DeviceMesh:
        shape = tuple(getattr(self.mesh, axis) for axis in AXES)
        return init_device_mesh(self.device.type, shape, mesh_dim_names=AXES)

    def _replica_group(self) -> dist.ProcessGroup | None:
        """Returns the processes that hold the same part of the model: along dp and fsdp."""
        mine: dist.ProcessGroup | None = None
        members: dict[tuple[int, int], list[int]] = {}
        for rank in range(self.mesh.size):
            place = self.mesh.coordinates(rank)
            members.setdefault((place["pp"], place["tp"]), []).append(rank)
        if self.mesh.replicas == 1:
            return None
        for key, ranks in members.items():
            group = dist.new_group(ranks, timeout=timedelta(seconds=self._config.wait_seconds))
            if key == (self.place["pp"], self.place["tp"]):
                mine = group
        return mine

    # -- groups ---------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """How many processes there are."""
        return self.mesh.size

    @property
    def replica(self) -> int:
        """Which of the batches that are computed at a time is this process's."""
        return self.mesh.replica(self.rank)

    @property
    def is_chief(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def counts(self) -> bool:
        """Whether this process's loss and metrics are its replica's: one speaks for each."""
        return self.place["tp"] == 0 and self.place["pp"] == self.mesh.pp - 1

    @property
    def speaks(self) -> bool:
        """Whether this process has something to say that no other one says."""
        return self.is_chief or (self.mesh.pp == self.mesh.tp == 1)

    @property
    def first_of_stage(self) -> bool:
        """Whether this process speaks for its pipeline stage."""
        return all(self.place[axis] == 0 for axis in AXES if axis != "pp")

    @property
    def replicas(self) -> dist.ProcessGroup | None:
        """The processes that average gradients with this one; None where there is one replica."""
        return self._replicas

    def along(self, *axes: str) -> DeviceMesh:
        """Returns the part of the mesh along some axes that this process is in."""
        return self._devices[axes]

    def group(self, axis: str) -> dist.ProcessGroup:
        """Returns the processes that differ from this one along one axis only."""
        return self._devices.get_group(axis)

    # -- talking --------------------------------------------------------------------------------

    def total(self, numbers: Sequence[float]) -> Callable[[], list[float]]:
        """Begins to add numbers over all processes; returns what waits for the sums."""
        tensor = torch.tensor(numbers, dtype=torch.float64)
        with lost_peer():
            work = dist.all_reduce(tensor, group=self._control, async_op=True)
        self._recent.append(work)

        sums: list[float] = []

        def finish() -> list[float]:
            if not sums:
                with lost_peer():
                    assert work is not None
                    work.wait()
                sums.extend(tensor.tolist())
            return sums

        return finish

    def count(self, examples: float) -> Callable[[], float]:
        """Begins to add up the examples of a step; the wishes of all go along.

        Returns:
            What waits for the sum.
        """
        total = self.total([float(examples), *self.wishes])
        self._votes = lambda: total()[1:]
        return lambda: total()[0]

    def vote(self) -> Callable[[], list[float]]:
        """Returns what waits for the sums of the wishes of all, as they were at `count`, or are."""
        votes, self._votes = self._votes, None
        return self.total(self.wishes) if votes is None else votes

    def broadcast(self, data: bytes | None, source: int = 0) -> bytes:
        """Gives every process the bytes of one of them.

        Args:
            data: what to send, in the source; not looked at elsewhere.
            source: its rank.
        """
        mine = self.rank == source
        assert data is not None or not mine
        with lost_peer():
            size = torch.tensor([len(data) if mine and data is not None else 0])
            dist.broadcast(size, source, group=self._control)
            payload = torch.empty(int(size), dtype=torch.uint8)
            if mine and data:
                payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            if int(size):
                dist.broadcast(payload, source, group=self._control)
        return data if mine and data is not None else payload.numpy().tobytes()

    def exchange(self, data: bytes, sources: Sequence[int] | None = None) -> list[bytes]:
        """Gives every process the bytes of several, in the order of the ranks; all of them so."""
        ranks = range(self.size) if sources is None else sources
        return [self.broadcast(data if rank == self.rank else None, rank) for rank in ranks]

    def broadcast_tensor(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Fills a CPU tensor with that of one process."""
        with lost_peer():
            dist.broadcast(tensor, source, group=self._control)

    def reduce_tensor(self, tensor: torch.Tensor, target: int = 0) -> None:
        """Adds a CPU tensor of all processes into that of one; elsewhere it is undefined then."""
        with lost_peer():
            dist.reduce(tensor, target, group=self._control)

    def barrier(self) -> None:
        """Waits for all processes."""
        self.total([0.0])()

    def stage_speakers(self) -> list[int]:
        """Returns the ranks that speak for the pipeline stages, first stage first."""
        per_stage = self.size // self.mesh.pp
        return [stage * per_stage for stage in range(self.mesh.pp)]

    def put(self, key: str, value: bytes) -> None:
        """Leaves bytes where every process can read them, without waiting for any."""
        with lost_peer():
            _store().set(key, value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes | None:
        """Returns what was left under a key; None while there is nothing."""
        with lost_peer():
            store = _store()
            return bytes(store.get(key)) if store.check([key]) else None

    def close(self, *, together: bool) -> None:
        """Leaves the gang.

        Args:
            together: wait for the others first, who may still need this process.
        """
        if not dist.is_initialized():
            return
        if together:
            if self.is_chief and self._config.prefix:
                self._met_at.add(
                    f"{self._config.prefix}/{_ERA}", 1
                )  # before anybody is started anew
            self.barrier()
        dist.destroy_process_group()
        _LAST.append(self._recent)
        time.sleep(_LET_GO)


_RECENT = 64
_LET_GO = 0.02
_LAST: list[object] = []
"""The last exchanges of gangs that are closed, until Python ends: see `Gang.__init__`."""


def _store() -> Store:
    return dist.distributed_c10d._get_default_store()


def _meet(config: GangConfig) -> Store:
    """Makes the group of all processes; returns the store at which they met."""
    if dist.is_initialized():
        raise ConfigurationError(
            "torch.distributed is initialised already: a session makes its own process groups; "
            "leave init_process_group out of the program"
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
        store = _of_this_era(served, config.prefix) if config.prefix else served
        _wait_for_all(store, config)
        dist.init_process_group(
            backend,
            store=store,
            rank=config.rank,
            world_size=config.mesh.size,
            timeout=timedelta(seconds=config.wait_seconds),
        )
    except (dist.DistError, RuntimeError) as error:
        raise ConnectTimeout(
            f"rank {config.rank} of {config.mesh.size} could not join the others at "
            f"{config.address} within {config.join_seconds:.0f} s: "
            f"{_first_line(error)}; are all processes started, and can this one reach rank 0?"
        ) from error
    return served


def _listen(config: GangConfig) -> int | None:
    """Returns the socket at which rank 0 serves the store; None leaves it to torch.

    Torch would listen at every address of the host, also where all are on this one.

    Raises:
        AddressInUse: the port is taken.
    """
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


def _of_this_era(store: Store, prefix: str) -> Store:
    """Returns a store for those who come between two orderly ends: see `Gang.close`."""
    return PrefixStore(f"{prefix}/{store.add(f'{prefix}/{_ERA}', 0)}", store)


def _wait_for_all(store: Store, config: GangConfig) -> None:
    """Waits until every rank has come, and says who has not when the time is over."""
    store.set(f"here/{config.rank}", "1")
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


_ERA = "era"
_ROLL_CALL = 1.0
"""Seconds for the others to notice: well below what a launcher gives them."""

_LATE = re.compile(r"timed? ?out", re.IGNORECASE)


@contextmanager
def lost_peer() -> Iterator[None]:
    """Turns what torch.distributed raises when another process is gone into our own error.

    Raises:
        JobFailed: another process of the gang is gone.
        WaitTimeout: another process did not come to an operation in time.
    """
    try:
        yield
    except RuntimeError as error:  # every error of torch.distributed is one
        line = _first_line(error)
        if says_peer_is_gone(error):
            raise JobFailed(
                f"{_roll_call()}, and its part of the model with it ({line})"
            ) from error
        if (_LATE.search(line) and isinstance(error, dist.DistError)) or _gloo_late(line):
            raise WaitTimeout(
                "another process of this job did not come to an exchange in time: did every one "
                f"of them call the same methods of its session? ({line})"
            ) from error
        raise


def _roll_call() -> str:
    """Says who is gone: each who has noticed tells the others so, and waits for what they tell."""
    me, size = dist.get_rank(), dist.get_world_size()
    try:
        store = _store()
        store.set(f"noticed/{me}", "1")
        keys = {rank: f"noticed/{rank}" for rank in range(size) if rank != me}
        deadline = time.monotonic() + _ROLL_CALL
        # Not `wait`, which warns on standard error when the time is over, as it will be.
        while not store.check(list(keys.values())) and time.monotonic() < deadline:
            time.sleep(0.02)
        silent = [rank for rank, key in keys.items() if not store.check([key])]
    except RuntimeError:  # every error of torch.distributed is one
        return f"rank 0 of {size}, at which the others met, is gone"
    if len(silent) == 1:
        return f"rank {silent[0]} of {size} is gone"
    if not silent:
        return f"another process of the {size} of this job is gone"
    names = ", ".join(str(rank) for rank in silent)
    return f"at least one of the ranks {names} of {size} is gone"


def _gloo_late(line: str) -> bool:
    return "gloo" in line.lower() and bool(_LATE.search(line))


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]
