"""(b) One push and pull with Adam, from 4 KB to 256 MB, on one host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

from benchmarks.context import Context
from benchmarks.exchange.contender import Exchange
from benchmarks.exchange.limits import memory_exchange, socket_exchange
from benchmarks.exchange.ours import trireme_exchange
from benchmarks.exchange.ray_peer import Ray, ray_exchange
from benchmarks.exchange.torch_peers import gloo_exchange, rpc_exchange
from benchmarks.pairs import Plan, interleave
from benchmarks.results import Goal, Kind, Result
from trireme.wire.transport import local_memory

SIZES = (4 << 10, 64 << 10, 318_080, 4 << 20, 32 << 20, 256 << 20)
SERVERS = (1, 2)
TCP, SHM = "Trireme tcp", "Trireme shm"
RAW, MEMORY = "raw socket + Adam", "memcpy + Adam + memcpy"
RPC, RPC_TCP, RAY, GLOO = "torch RPC", "torch RPC, tcp", "Ray", "gloo send/recv"

_COPIES = 40  # of the vector, in all contenders of one turn together, roughly


@dataclass(frozen=True)
class _Entrant:
    """A contender that is started for each size anew."""

    name: str
    kind: Kind
    start: Callable[[int, float], Exchange]


def run(context: Context) -> Result:
    """Measures the milliseconds of one exchange, one worker and one or two servers."""
    sizes = (4 << 10, 318_080, 4 << 20) if context.quick else SIZES
    result = Result(
        name="push_pull",
        title="One push and pull with Adam, one worker, one host",
        unit="ms",
        higher_is_better=False,
        references=(RAW, MEMORY),
        work="exchange",
        x_label="bytes each way",
        goals=_goals(sizes),
    )
    share = context.seconds / (len(sizes) * len(SERVERS))
    with _ray(context, result) as ray:
        for nbytes in sizes:
            for servers in SERVERS:
                _measure(context, result, _entrants(servers, ray), nbytes, servers, share)
    result.notes += [
        "Every exchange sends the gradient, applies Adam on the server, and has the new values in "
        "the worker's own memory. Ours makes it by the client that a session has, with "
        "exactly-once bookkeeping; the peers' servers and the limits call PyTorch's fused kernel.",
        f"{MEMORY}: one process copies the gradient in, steps, copies the values out (two: a "
        "thread for each half). Trireme over shm has the gradient in shared memory already and "
        "copies only the values.",
        f"{RPC} and {RAY} pass tensors of one host through shared memory, as Trireme does where it "
        f"is not told otherwise; {RPC_TCP} and {TCP} through sockets.",
        f"{GLOO}: no optimizer and nothing kept; for information.",
        "The figure is the mean over a burst of exchanges one after the other.",
    ]
    return result


def _goals(sizes: tuple[int, ...]) -> list[Goal]:
    big = _condition(32 << 20, 1)
    goals = [
        Goal("32 MB over shm: of the memory limit", big, SHM, MEMORY, at_most=1.25),
        Goal("32 MB over tcp: of the socket limit", big, TCP, RAW, at_most=1.2),
    ]
    for nbytes in sizes:
        condition = _condition(nbytes, 1)
        goals += [
            Goal(f"{_size(nbytes)}: {ours} ahead of {peer}", condition, ours, peer, at_most=1.0)
            for ours, peer in ((SHM, RPC), (SHM, RAY), (TCP, RPC_TCP))
        ]
    return goals


def _entrants(servers: int, ray: Ray | None) -> list[_Entrant]:
    found = [
        _Entrant(
            TCP,
            "trireme",
            lambda n, b: trireme_exchange(TCP, n, b, servers=servers, transport="tcp"),
        ),
        _Entrant(RAW, "limit", lambda n, b: socket_exchange(RAW, n, b, servers=servers)),
        _Entrant(MEMORY, "limit", lambda n, b: memory_exchange(MEMORY, n, b, servers=servers)),
        _Entrant(RPC, "peer", lambda n, b: rpc_exchange(RPC, n, b, servers=servers)),
        _Entrant(
            RPC_TCP, "peer", lambda n, b: rpc_exchange(RPC_TCP, n, b, servers=servers, tcp=True)
        ),
    ]
    if local_memory() is not None:
        shared = _Entrant(
            SHM,
            "trireme",
            lambda n, b: trireme_exchange(SHM, n, b, servers=servers, transport="shm"),
        )
        found.insert(1, shared)
    if ray is not None:
        running = ray
        found.append(
            _Entrant(RAY, "peer", lambda n, b: ray_exchange(RAY, running, n, b, servers=servers))
        )
    if servers == 1:
        found.append(_Entrant(GLOO, "information", lambda n, b: gloo_exchange(GLOO, n, b)))
    return found


def _measure(
    context: Context,
    result: Result,
    entrants: list[_Entrant],
    nbytes: int,
    servers: int,
    seconds: float,
) -> None:
    condition = _condition(nbytes, servers)
    if nbytes * _COPIES > psutil.virtual_memory().available:
        result.skipped.append(
            f"{condition}: all contenders together need about {nbytes * _COPIES >> 20} MB, and "
            f"{psutil.virtual_memory().available >> 20} MB are free"
        )
        return
    context.say(f"  {condition}")
    burst = 0.02 if context.quick else min(0.1, seconds / 100)
    plan = Plan(2, least=2) if context.quick else Plan(15, seconds=seconds, least=3)
    kinds = {entrant.name: entrant.kind for entrant in entrants}
    with _started(entrants, nbytes, burst) as (contenders, failed):
        measured = interleave(contenders, plan, say=context.say)
        measured.failed.update(failed)
    result.add(measured, kinds, condition=condition, x=nbytes)


@contextmanager
def _started(
    entrants: list[_Entrant], nbytes: int, burst: float
) -> Iterator[tuple[list[Exchange], dict[str, str]]]:
    contenders: list[Exchange] = []
    failed: dict[str, str] = {}
    try:
        for entrant in entrants:
            try:
                contenders.append(entrant.start(nbytes, burst))
            except (RuntimeError, TimeoutError, OSError) as error:
                failed[entrant.name] = f"{type(error).__name__}: {error}"
        yield contenders, failed
    finally:
        for contender in contenders:
            contender.close()


@contextmanager
def _ray(context: Context, result: Result) -> Iterator[Ray | None]:
    python = context.peers.python("ray")
    if python is None:
        result.skipped.append("Ray: no environment (`make bench-peers`)")
        yield None
        return
    try:
        ray = Ray(python, context.scratch)
    except (RuntimeError, TimeoutError, OSError) as error:
        result.skipped.append(f"Ray did not start: {error}")
        yield None
        return
    try:
        yield ray
    finally:
        ray.close()


def _condition(nbytes: int, servers: int) -> str:
    return f"{_size(nbytes)}, {servers} server{'s' if servers > 1 else ''}"


def _size(nbytes: int) -> str:
    if nbytes >= 1 << 20:
        return f"{nbytes >> 20} MB"
    return f"{nbytes >> 10} KB" if nbytes % 1024 == 0 else f"{nbytes / 1000:.0f} KB"
