"""A whole job in threads of this process: the coordinator, the servers, a `Session` per worker.

All of it is the real thing, over `memory://` or loopback TCP: only the processes are missing, and
with them the seconds that each takes to import torch. What a process has one of, the threads
share, and this is how they get along:

- The task that a session is comes from the environment, read when the session is made: sessions
  are made one after the other, in the test's thread.
- torch's default generator: a session seeds it, and nothing that is trained here draws from it.
  Models are made beforehand and handed over as modules; none has dropout.
- Signals stay with the test: a session takes them over only in the main thread. What they do is
  for `tests/integration`, with real processes.
- Grad mode is each thread's own; deterministic mode is everybody's and put back at the end.
"""

from __future__ import annotations

import faulthandler
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar
from unittest import mock

import torch

from tests.faults.proxy import unnoticed
from trireme.cluster.coordinator import Coordinator
from trireme.cluster.messages import JobOver
from trireme.cluster.state import Policy
from trireme.cluster.view import View
from trireme.job_config import STRATEGIES, JobConfig
from trireme.launch.config.task_config import TASK_VARIABLE, TaskConfig, encode_task
from trireme.ps.packing import PACKING
from trireme.ps.server.service import ServerConfig, serve
from trireme.ps.shard.values.segment_optimizer import load_optimizers
from trireme.session.session import Session
from trireme.session.worker.worker import Worker
from trireme.strategies import BACKENDS
from trireme.wire.refusals import ServiceLimits
from trireme.wire.service import Service
from trireme.wire.transport import listen

JOB = "job-in-threads"
SECRET = b"a secret of thirty-two bytes .. "
SECONDS = 60.0
"""No job here takes nearly so long; what does, hangs."""

T = TypeVar("T")
Program = Callable[[Session], T]


@dataclass(frozen=True)
class Cluster:
    """The size and the strategy of a job.

    Attributes:
        workers, servers: how many; without servers one worker trains in its own memory.
        strategy, aggregate, staleness, every, prefetch, compress: as on the command line.
        scheme: `memory`, `tcp`, or `shm`: TCP where workers lend servers their memory.
        run_dir: where checkpoints go; None for nowhere.
        policy: what the coordinator does otherwise than the harness would have it.
        options: those of plug-ins.
        coordinator_seen_at: gives the address at which a worker finds the coordinator that listens
            at another, such as a proxy's.
    """

    workers: int = 1
    servers: int = 1
    strategy: str | None = None
    aggregate: int | None = None
    staleness: int | None = None
    every: int | None = None
    prefetch: bool = False
    compress: str = "none"
    scheme: str = "memory"
    run_dir: Path | None = None
    policy: Mapping[str, float] = field(default_factory=dict)
    options: Mapping[str, str | int | float] = field(default_factory=dict)
    coordinator_seen_at: Callable[[int, str], str] = field(default=lambda worker, address: address)

    def __str__(self) -> str:
        """What it has that is not the default: a name for a test, the same in every process."""
        size = f"{self.workers}x{self.servers}"
        named = [
            f"{each.name}={value}"
            for each in fields(self)
            if each.name not in ("workers", "servers", "strategy", "coordinator_seen_at")
            and (value := getattr(self, each.name)) not in (each.default, {})
        ]
        return "-".join([size, self.strategy or "default", *named])

    def task(self, index: int, coordinator: str) -> TaskConfig:
        """What worker `index` finds in its environment."""
        return TaskConfig(
            job=JOB,
            index=index,
            workers=self.workers,
            servers=self.servers,
            coordinator=coordinator and self.coordinator_seen_at(index, coordinator),
            secret=SECRET.hex(),
            config=JobConfig().replaced(
                "a test",
                run_dir=None if self.run_dir is None else str(self.run_dir),
                strategy=self.strategy,
                aggregate=self.aggregate,
                staleness=self.staleness,
                every=self.every,
                prefetch=self.prefetch,
                compress=self.compress,
                transport="tcp" if self.scheme == "tcp" else "auto",
                join_timeout=SECONDS,
                **self.options,
            ),
            display="none",
        )


@dataclass
class Ran(Generic[T]):
    """What came of a job: for each worker what its program returned, or what it raised."""

    returned: dict[int, T] = field(default_factory=dict)
    raised: dict[int, BaseException] = field(default_factory=dict)
    over: JobOver | None = None

    @property
    def values(self) -> list[T]:
        """What each worker returned, by index.

        Raises:
            BaseException: what the first of the workers that failed by itself raised.
        """
        for worker in sorted(self.raised, key=lambda w: type(self.raised[w]).__name__ in _VICTIMS):
            raise self.raised[worker]
        return [self.returned[worker] for worker in sorted(self.returned)]


_VICTIMS = ("JobFailed", "WaitTimeout")


def newer_view(worker: Worker, number: int) -> View:
    """Waits until a worker has a view with a higher number, and returns it."""
    lifecycle, member = worker.lifecycle, worker.lifecycle.member
    assert member is not None
    newer = member.wait_until(lambda: lifecycle.view_number > number, time.monotonic() + 20)
    assert newer and member.view is not None, f"there is no view after {number}"
    return member.view


def run_job(cluster: Cluster, make: Callable[[int], Session], program: Program[T]) -> Ran[T]:
    """Runs a job to its end; nothing of it is left when this returns.

    Args:
        cluster: its size.
        make: makes the session of a worker.
        program: what each worker does inside its session.

    Raises:
        AssertionError: a thread did not end in time, or a server ended by an error.
    """
    check_installed(cluster.strategy, cluster.compress)
    ran: Ran[T] = Ran()
    passing_on = mock.patch("trireme.cluster.member.connect", unnoticed)
    with _global_state(), passing_on, keepers(cluster, ran) as coordinator:
        sessions = {
            index: _session(cluster, make, index, coordinator) for index in range(cluster.workers)
        }
        threads = _Threads()
        for index, session in sessions.items():
            threads.start(f"worker:{index}", lambda i=index, s=session: _work(ran, i, s, program))
        threads.join(SECONDS)
        check_none_is_missing(map(str, ran.raised.values()))
    return ran


def check_installed(strategy: str | None, compress: str, processes: int = 1) -> None:
    """Raises `ConfigurationError` if a job needs a plug-in that is not installed.

    It would find that by itself, but others would wait for the tasks that fail.
    """
    if strategy is not None:
        STRATEGIES.load(strategy)
    if compress != "none":
        PACKING.load("codecs")
    if processes > 1:  # that hold a model together
        BACKENDS.load("parallel")


def check_none_is_missing(errors: Iterable[str]) -> None:
    """Raises at once where a program asked for a plug-in that is not installed.

    Servers would wait for a worker that fails before it has joined.
    """
    for error in errors:
        if "is in a plug-in that is not installed" in error or "No module named 'tri" in error:
            raise AssertionError(error)


def _session(
    cluster: Cluster, make: Callable[[int], Session], index: int, coordinator: str
) -> Session:
    task = encode_task(cluster.task(index, coordinator))
    with mock.patch.dict(os.environ, {TASK_VARIABLE: task}):
        return make(index)


def _work(ran: Ran[T], index: int, session: Session, program: Program[T]) -> None:
    try:
        with session:
            value = program(session)
        ran.returned[index] = value
    except BaseException as error:  # SystemExit too: it is how an interrupted session ends
        ran.raised[index] = error


@contextmanager
def keepers(cluster: Cluster, ran: Ran[T]) -> Iterator[str]:
    """Serves coordinator and servers while the block runs; gives the coordinator's address."""
    if not cluster.servers:
        yield ""
        return
    threads = _Threads()
    times = {"join_timeout": SECONDS, "reconnect_grace": 10.0, **cluster.policy}
    policy = Policy(cluster.workers, cluster.servers, **times)
    coordinator = Coordinator(policy, on_done=lambda: service.stop())
    service = Service(
        listen(_any(cluster.scheme)),
        [coordinator],
        job=JOB,
        secret=SECRET,
        epoch=coordinator.state.epoch,
        limits=ServiceLimits(tick_seconds=0.02),
    )
    address = service.address
    threads.start("coordinator", service.run)
    for index in range(cluster.servers):
        transport = "tcp" if cluster.scheme == "tcp" else "auto"
        options = JobConfig().replaced("a test", transport=transport, **cluster.options)
        place = _any(cluster.scheme)
        config = ServerConfig(JOB, SECRET, index, place, address, policy, config=options)
        threads.start(f"ps:{index}", lambda c=config: serve(c, lambda _: None))
    try:
        yield address
        try:
            threads.join(SECONDS)
        except AssertionError as error:  # as where workers have failed before they joined
            raise AssertionError(f"{error}; workers raised {ran.raised}") from error
    except BaseException:  # servers that go on would disturb the tests after this one
        deadline = time.monotonic() + 10.0
        while time.monotonic() < deadline and any(
            server.state == "expected" for server in coordinator.state.of("ps")
        ):
            time.sleep(0.02)  # else they would look for a coordinator that has gone
        service.call_soon(partial(coordinator.stop_job, "the test has failed", final=True))
        with suppress(AssertionError):
            threads.join(10.0)
        raise
    finally:
        service.stop()
        ran.over = coordinator.state.over


_names = itertools.count()


def _any(scheme: str) -> str:
    return f"memory://harness-{next(_names)}" if scheme == "memory" else "tcp://127.0.0.1:0"


class _Threads:
    """Threads that must end, and not by an exception."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._failures: list[str] = []

    def start(self, name: str, function: Callable[[], object]) -> None:
        def run() -> None:
            try:
                function()
            except BaseException as error:
                self._failures.append(f"{name}: {type(error).__name__}: {error}")

        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def join(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        late = [thread.name for thread in self._threads if thread.is_alive()]
        if late:
            faulthandler.dump_traceback()
        assert not late, f"{', '.join(late)} did not end within {seconds:.0f} s"
        assert not self._failures, "; ".join(self._failures)


@contextmanager
def _global_state() -> Iterator[None]:
    """Puts back what a session sets for its whole process."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    generator = torch.get_rng_state()
    # Both import parts of torch that import each other: not on two threads at once.
    load_optimizers()
    torch.use_deterministic_algorithms(deterministic)
    # A later job of this process may have its coordinator at the port of an earlier one.
    left = mock.patch.dict("trireme.launch.environment._LEFT", clear=True)
    try:
        with left:
            yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.set_rng_state(generator)
