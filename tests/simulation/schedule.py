"""What happens in one simulated job, drawn from a seed: the same seed is the same job."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from tests.simulation.network import Weather
from trireme.ps.extra import ShownExtension
from trireme.ps.rule import Rule

COUNTS = ShownExtension(
    "tables", ('{"name": "counts", "width": 1, "optimizer": {"type": "Add"}, "dtype": "int64"}',)
)
"""A table whose rows count the updates that have touched them."""

KEYS = tuple(range(-6, 6))
"""The keys of its rows."""


POISON = 7.0
"""The learning rate at which no server can apply an update: its optimizer raises, or its table."""


@dataclass(frozen=True, slots=True)
class Crash:
    """A worker's process dies while it sends a push, or saves the last step as chief.

    Attributes:
        worker: whose.
        push: at which push of this worker's index, from 1; 0 where it saves the last step.
        reached: how many servers have been sent their part by then; 0 where it saves and has not
            begun.
        restart: seconds until its next process joins; None for never.
    """

    worker: int
    push: int
    reached: int
    restart: float | None


@dataclass(frozen=True, slots=True)
class Eviction:
    """A worker's heartbeats stay out, though it lives: it is lost, and joins again later.

    Attributes:
        worker: which.
        at: from when on.
    """

    worker: int
    at: float


@dataclass(frozen=True, slots=True)
class Fault:
    """Something happens to servers, to the network, to the coordinator, or to the job's size.

    Attributes:
        at: when.
        kind: what: one of `KINDS`, of `SIGNALS`, or of `LINK_KINDS`.
        target: to which task, among those that there are.
        other: which is the other end, where it happens to a connection.
        seconds: how long it lasts, or until a process is started again; None for ever.
    """

    at: float
    kind: str
    target: int
    other: int
    seconds: float | None


KINDS = (
    "kill server",
    "kill server",
    "stop server",
    "stop server",
    "silence server",
    "kill all servers",
    "cut one way",
    "cut both ways",
    "add server",
    "add server",
    "remove server",
    "add worker",
    "remove worker",
    "stop worker",
    "kill coordinator",
)
"""What happens to a job beside what becomes of single workers."""

SIGNALS = ("signal worker", "signal worker", "signal chief", "signal all", "signal server")
"""What process managers do."""

LINK_KINDS = (*("cut pair",) * 6, *("cut worker",) * 2, *("stick server",) * 4)
"""What happens beside to jobs in the modes of broken links and stuck loops. In one in four a server
becomes deaf too."""


@dataclass(frozen=True)
class Schedule:
    """One simulated job.

    Attributes:
        mode: the name of its kind of rule.
        seed: what it was drawn from; also of all that is drawn while it runs.
        rule: what its shards go by.
        workers, servers: how many.
        resumed_servers: how many servers go on from its last checkpoint.
        momentum: SGD's; 0 or 0.5, so that all values stay exact.
        faster_from: the global step from which on the learning rate is 2 and not 1.
        slower_from: the one from which on it is 1 again; None for never.
        batch: examples in a worker's batch.
        think: each worker's mean seconds between two pushes.
        empty: the chance that a push weighs nothing.
        weather: the network's.
        view_delay: the longest time that a message of the coordinator takes.
        crashes, evictions: what becomes of workers.
        cuts: when a cut is asked for by somebody who pushes nothing.
        vanishing: when somebody asks some servers for a copy and is never heard of again; None for
            never.
        stop_at: when the job is asked to stop; None where `rule.max_steps` ends it.
        slower_from: see `faster_from`.
        replicas: how many copies of each shard there are.
        survives: whether the job goes on from a checkpoint when all copies of a shard are lost.
        hosts: on how many hosts the servers are.
        poison: the chance that no server can apply a push.
        grows_at: from which global step on workers add a parameter; None for never.
        faults: what else happens.
    """

    mode: str
    seed: int
    rule: Rule
    workers: int
    servers: int
    resumed_servers: int
    momentum: float
    faster_from: int
    batch: int
    think: tuple[float, ...]
    empty: float
    weather: Weather
    view_delay: float
    crashes: tuple[Crash, ...] = ()
    evictions: tuple[Eviction, ...] = ()
    cuts: tuple[float, ...] = ()
    vanishing: float | None = None
    stop_at: float | None = None
    slower_from: int | None = None
    replicas: int = 1
    survives: bool = True
    hosts: int = 4
    poison: float = 0.0
    grows_at: int | None = None
    faults: tuple[Fault, ...] = ()

    @property
    def counts(self) -> bool:
        """Whether values count the updates in them."""
        return self.mode == "counts"

    @property
    def links(self) -> bool:
        """Whether single links break and loops of servers are stuck, and who notices is checked."""
        return self.mode in ("links", "sync-links")

    @property
    def extension(self) -> ShownExtension | None:
        """The sparse tables that the model has beside its values: one that counts, or none."""
        return COUNTS if self.mode in ("rows", "sync-rows") else None

    @property
    def resizes_workers(self) -> bool:
        """Whether workers come or go beside those that are lost."""
        return any(fault.kind in ("add worker", "remove worker") for fault in self.faults)

    def rate_at(self, step: int) -> float:
        """Returns the learning rate for the update on top of a step."""
        slower = self.slower_from is not None and step >= self.slower_from
        return 1.0 if step < self.faster_from or slower else 2.0

    def __str__(self) -> str:
        lines = [f"schedule {self.mode}, seed {self.seed}:"]
        for name, value in vars(self).items():
            if name not in ("mode", "seed") and value not in ((), None):
                shown = value if not isinstance(value, tuple) else ", ".join(map(str, value))
                lines.append(f"  {name}: {shown}")
        return "\n".join(lines)


def _asynchronous(rng: random.Random, workers: int) -> Rule:
    return Rule(aggregate=1, staleness=None)


def _ssp(rng: random.Random, workers: int) -> Rule:
    return Rule(aggregate=1, staleness=rng.randint(1, 3))


def _sync(rng: random.Random, workers: int) -> Rule:
    return Rule(aggregate=0, staleness=0)


def _backup(rng: random.Random, workers: int) -> Rule:
    return Rule(aggregate=rng.randint(1, max(1, workers - 1)), staleness=0)


def _clip(rng: random.Random, workers: int) -> Rule:
    aggregate = rng.choice((0, 0, max(1, workers - 1)))
    return Rule(aggregate=aggregate, staleness=0, clip_norm=rng.choice((300.0, 700.0)))


def _grow(rng: random.Random, workers: int) -> Rule:
    return Rule(aggregate=1, staleness=rng.choice((None, None, 1, 3)))


def _sync_grow(rng: random.Random, workers: int) -> Rule:
    return rng.choice((_sync, _sync, _backup, _clip))(rng, workers)


def _deltas(rng: random.Random, workers: int) -> Rule:
    return Rule(aggregate=0, staleness=0, every=rng.randint(2, 5))


def _async_deltas(rng: random.Random, workers: int) -> Rule:
    return Rule(aggregate=1, staleness=rng.choice((None, 1, 2, 3)), every=rng.randint(2, 5))


MODES: Mapping[str, Callable[[random.Random, int], Rule]] = {
    "async": _asynchronous,
    "counts": _asynchronous,
    "ssp": _ssp,
    "sync": _sync,
    "backup": _backup,
    "clip": _clip,
    "deltas": _deltas,
    "async-deltas": _async_deltas,
    "rows": _asynchronous,
    "sync-rows": _sync,
    "links": _asynchronous,
    "sync-links": _sync,
    "grow": _grow,
    "sync-grow": _sync_grow,
}
"""How the rule of each kind of job is drawn."""


def draw(mode: str, seed: int) -> Schedule:
    """Returns the schedule of a seed: one in four has no faults at all.

    Raises:
        KeyError: there is no such mode.
    """
    rng = random.Random(f"{mode} {seed}")
    workers = rng.choice((1, 2, 2, 3, 3, 4))
    servers = rng.choice((1, 2, 2, 3, 3, 4))
    replicas = min(servers, rng.choice((1, 2, 2, 2, 3)))
    rule = MODES[mode](rng, workers)
    stop_at = rng.uniform(0.2, 2.0) if rng.random() < 0.2 else None
    faulty = rng.random() < 0.75
    rounds = rng.randint(2, 10 if faulty else 5) * (1 if rule.synchronous else workers)
    steps = rounds * rule.period + rng.randint(0, 2)
    counts = mode == "counts"
    kinds = (*KINDS, *LINK_KINDS) if "links" in mode else KINDS
    signals = _signals(random.Random(f"{mode} {seed} signals"))
    deaf = _deafness(random.Random(f"{mode} {seed} deaf")) if "links" in mode else ()
    grows = "grow" in mode
    last = _last_crashes(random.Random(f"{mode} {seed} saves"), workers)
    return Schedule(
        mode=mode,
        seed=seed,
        rule=msgspec.structs.replace(rule, max_steps=None if stop_at is not None else steps),
        workers=workers,
        servers=servers,
        resumed_servers=rng.choice([n for n in (1, 2, 3, 4) if n != servers]),
        momentum=0.0 if counts else rng.choice((0.0, 0.5)),
        faster_from=1 << 30 if counts else rng.randint(0, steps),
        batch=rng.randint(1, 4),
        think=tuple(rng.choice((0.01, 0.03, 0.2)) for _ in range(workers)),
        empty=0.1 if rule.synchronous and rng.random() < 0.3 else 0.0,
        weather=_weather(rng) if faulty else Weather(),
        view_delay=rng.choice((0.02, 0.2, 1.0)),
        crashes=(*_crashes(rng, workers, servers), *last) if faulty else (),
        evictions=_evictions(rng, workers) if faulty else (),
        cuts=tuple(sorted(rng.uniform(0.1, 4.0) for _ in range(rng.randint(0, 3)))),
        vanishing=rng.uniform(0.1, 2.0) if faulty and rng.random() < 0.1 else None,
        stop_at=stop_at,
        replicas=replicas,
        survives=rng.random() < 0.8 and not grows,
        grows_at=random.Random(f"{mode} {seed} grows").randint(0, steps // 2) if grows else None,
        hosts=rng.choice((1, 2, 4)),
        faults=(*_faults(rng, kinds), *signals, *deaf) if faulty else (),
    )


def _faults(rng: random.Random, kinds: tuple[str, ...]) -> tuple[Fault, ...]:
    faults = [
        Fault(
            at=rng.uniform(0.1, 2.5),
            kind=rng.choice(kinds),
            target=rng.randrange(64),
            other=rng.randrange(64),
            seconds=rng.choice((0.2, 1.0, 3.0, None)),
        )
        for _ in range(rng.choice((0, 1, 1, 2, 3)))
    ]
    return tuple(sorted(faults, key=lambda fault: fault.at))


def _signals(rng: random.Random) -> tuple[Fault, ...]:
    """Returns the signals of a schedule: one in four of those with faults has some."""
    return tuple(
        Fault(
            at=rng.uniform(0.1, 2.5),
            kind=rng.choice(SIGNALS),
            target=rng.randrange(64),
            other=0,
            seconds=rng.choice((0.1, 1.0, None)),
        )
        for _ in range(rng.choice((0, 0, 0, 0, 0, 0, 1, 2)))
    )


def _deafness(rng: random.Random) -> tuple[Fault, ...]:
    """Returns the faults by which a server becomes deaf, for a while or until it is given up."""
    seconds, at = rng.choice((0.2, 3.0, None)), rng.uniform(0.1, 2.5)
    fault = Fault(at, "deafen server", rng.randrange(64), 0, seconds)
    return (fault,) if rng.random() < 0.25 else ()


def _weather(rng: random.Random) -> Weather:
    return Weather(
        latency=rng.choice((0.002, 0.01, 0.05)),
        slow=rng.choice((0.0, 0.05, 0.2)),
        breaks=rng.choice((0.0, 0.02, 0.1)),
        calm_from=10.0,
    )


def _crashes(rng: random.Random, workers: int, servers: int) -> tuple[Crash, ...]:
    return tuple(
        Crash(
            worker=rng.randrange(workers),
            push=rng.randint(1, 5),
            reached=rng.randint(0, servers),
            restart=rng.choice((0.1, 1.0, None)) if workers > 1 else 0.5,
        )
        for _ in range(rng.choice((0, 0, 1, 1, 2)))
    )


def _last_crashes(rng: random.Random, workers: int) -> tuple[Crash, ...]:
    return tuple(
        Crash(worker, 0, 0, rng.choice((0.1, 1.0, None)) if workers > 1 else 0.5)
        for worker in range(workers)
        if rng.random() < 0.15
    )


def _evictions(rng: random.Random, workers: int) -> tuple[Eviction, ...]:
    return tuple(
        Eviction(rng.randrange(workers), rng.uniform(0.05, 1.5))
        for _ in range(rng.choice((0, 0, 1, 1, 2)))
    )
