"""Jobs in which one bit changes by itself, at a place and a step that a test names.

A job runs in threads of this process, see `tests/harness.py`. Each of its tasks has memory of its
own, and a bit of it changes as hardware would change it: nobody is told.
"""

from __future__ import annotations

import hashlib
import logging
import math
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import trireme
from tests.harness import Cluster, Ran, run_job
from trireme.corruption.server import ServerChecks
from trireme.ps.messages import Push
from trireme.ps.shard.values.parameters import Values
from trireme.session.checkpoint import CheckpointData
from trireme.session.options import Checkpoint
from trireme.session.session import Session

STEPS = 12
PLACES = ("worker", "server", "backup", "checkpoint", "push", "values")
"""The five places of the watch; a message carries a push, or values."""


@dataclass(frozen=True)
class Flip:
    """One bit that changes.

    Attributes:
        place: one of `PLACES`.
        task: the index of the worker or server whose memory it is in, or that receives the message.
        step: the global step after which it changes; of a message, before which.
        where: the share of the memory that lies before it.
        bit: which of 8 of that byte.
        computing: whether a worker computes a gradient meanwhile.
    """

    place: str
    task: int
    step: int
    where: float = 0.5
    bit: int = 6
    computing: bool = False

    @property
    def named(self) -> str:
        """What a finding must name."""
        if self.place in ("server", "backup", "push"):
            return f"ps:{self.task}"
        return f"worker:{self.task}"

    @classmethod
    def drawn(cls, rng: random.Random) -> Flip:
        """Returns a random one."""
        place = rng.choice(PLACES)
        task = 0 if place == "checkpoint" else rng.randrange(2)
        step = SAVED if place == "checkpoint" else rng.randrange(1, STEPS - 1)
        where, bit = rng.random(), rng.randrange(8)
        return cls(place, task, step, where, bit, computing=rng.random() < 0.5)


SAVED = 6
"""The step of the checkpoint that a flip changes."""


@dataclass
class Outcome:
    """What came of a job.

    Attributes:
        ran, failure: how it ended; what failed besides workers.
        told: what was found, with the global step of the worker that was furthest then.
        flipped: whether the bit has changed.
        digests: of the values of the workers that came to its end.
    """

    ran: Ran[None] | None = None
    failure: str = ""
    told: list[tuple[int, str]] = field(default_factory=list)
    flipped: bool = False
    digests: set[str] = field(default_factory=set)


def run(
    flip: Flip | None,
    action: str = "heal",
    *,
    every: int = 2,
    strategy: str = "sync",
    run_dir: Path | None = None,
    scheme: str = "memory",
    servers: int = 2,
    replicas: int = 2,
    share: float = math.inf,
    local_steps: int | None = None,
    writes: bool = False,
    **more: Any,
) -> Outcome:
    """Runs a job of two workers in which a bit changes, and none where there is no flip.

    Args:
        local_steps: of a worker between two exchanges.
        writes: whether the program clips its weights itself, unknown to autograd.
        more: fields of `Cluster`.
        share: of the time that digests may take between checks. By default all updates are looked
            at, as of a model whose steps take long; with 0 the checks alone.
    """
    outcome, at = Outcome(), [0]
    cluster = Cluster(
        2,
        servers,
        strategy,
        every=local_steps,
        scheme=scheme,
        run_dir=run_dir,
        policy={"replicas": replicas, "survives_loss": replicas > 1, "reconnect_grace": 0.5},
        options={"check_every": every, "on_corruption": action},
        **more,
    )

    def program(session: Session) -> None:
        worker, values = session.task.index, session.worker.setup.flat
        if flip is not None and flip.place == "checkpoint" and worker == 0:
            _spoil_checkpoint(session, flip, outcome)
        if flip is not None and flip.place == "values" and flip.task == worker:
            _spoil_values(session, flip, outcome)
        while not session.should_stop():
            step = session.global_step
            at[0] = max(at[0], step)
            here = flip is not None and flip.place == "worker" and flip.task == worker
            loss: Any = None
            if flip is not None and here and step >= flip.step and not outcome.flipped:
                if flip.computing:
                    loss = _spoiling(flip, outcome, session)
                else:
                    outcome.flipped = _change(values.parameters.values(), flip)
            session.step(_batch(step, worker), loss=loss)
            if writes:
                for parameter in session.parameters.values():
                    parameter.data.clamp_(-0.2, 0.2)
        outcome.digests.add(_digest(session.worker.setup.flat.values))

    shared = mock.patch("trireme.corruption.checks.SHARE", share)
    with _told(outcome, at), shared, ExitStack() as patched:
        if flip is not None and flip.place in ("server", "backup"):
            patched.enter_context(_spoiled_server(flip, outcome))
        if flip is not None and flip.place == "push":
            patched.enter_context(_spoiled_push(flip, outcome))
        try:
            outcome.ran = run_job(cluster, lambda _: make(run_dir), program)
            outcome.failure = "; ".join(map(str, outcome.ran.raised.values()))
        except AssertionError as error:
            outcome.failure = str(error)
    return outcome


def make(run_dir: Path | None) -> Session:
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return trireme.Session(
        model,
        nn.MSELoss(),
        torch.optim.Adam(model.parameters(), lr=0.01),
        max_steps=STEPS,
        checkpoint=None if run_dir is None else Checkpoint(every_steps=SAVED, keep=5),
    )


def _batch(step: int, worker: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + worker)
    return torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)


def _digest(tensors: Any) -> str:
    found = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        found.update(tensor.detach().numpy().tobytes())
    return found.hexdigest()


# -- how a bit changes -----------------------------------------------------------------------------


def _change(tensors: Any, flip: Flip) -> bool:
    """Changes a bit of tensors, unknown to PyTorch."""
    views = [tensor.detach().reshape(-1).view(torch.uint8).numpy() for tensor in tensors]
    at = int(flip.where * sum(len(view) for view in views))
    for view in views:
        if at < len(view):
            view[at] ^= 1 << flip.bit
            return True
        at -= len(view)
    return False


def _spoiling(flip: Flip, outcome: Outcome, session: Session) -> Callable[[Any, Any], Any]:
    """Returns a loss that changes a bit once, between forward and backward."""

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if not outcome.flipped:
            outcome.flipped = _change(session.parameters.values(), flip)
        return nn.functional.mse_loss(outputs, targets)

    return loss


@contextmanager
def _spoiled_server(flip: Flip, outcome: Outcome) -> Iterator[None]:
    """Changes memory of a server before an update changes it."""
    before = ServerChecks.before_change

    def spoiled(checks: ServerChecks, step: int, values: Values) -> None:
        here, replica = checks.task == f"ps:{flip.task}", checks.replica(values)
        primary = replica is not None and replica.log is not None
        here &= step >= flip.step and primary == (flip.place == "server")
        if here and not outcome.flipped:
            outcome.flipped = _change([t for _, t in values.live(state=True)], flip)
        before(checks, step, values)

    with mock.patch.object(ServerChecks, "before_change", spoiled):
        yield


@contextmanager
def _spoiled_push(flip: Flip, outcome: Outcome) -> Iterator[None]:
    """Changes a gradient that a server has received, before it looks at it."""
    accepts = ServerChecks.accepts

    def spoiled(checks: ServerChecks, task: str, push: Push, gradients: Any) -> bool:
        here = checks.task == f"ps:{flip.task}" and push.pulled >= flip.step
        if here and not outcome.flipped:
            outcome.flipped = _change(gradients.vectors, flip)
        return accepts(checks, task, push, gradients)

    with mock.patch.object(ServerChecks, "accepts", spoiled):
        yield


def _spoil_values(session: Session, flip: Flip, outcome: Outcome) -> None:
    """Changes values as they come."""
    flat = session.worker.setup.flat
    publish = flat.publish_values

    def spoiled() -> None:
        if session.global_step >= flip.step and not outcome.flipped:
            outcome.flipped = _change(flat.values, flip)
        publish()

    flat.publish_values = spoiled  # type: ignore[method-assign]


def _spoil_checkpoint(session: Session, flip: Flip, outcome: Outcome) -> None:
    """Changes a checkpoint in memory, before it is written."""
    saver = session.worker.storage._saver
    assert saver is not None
    write = saver._write

    def spoiled(place: Any, data: CheckpointData, **options: Any) -> Any:
        if data.step >= flip.step and not outcome.flipped:
            outcome.flipped = _change([*data.model.values(), *data.optimizer.values()], flip)
        return write(place, data, **options)

    saver._write = spoiled


@contextmanager
def _told(outcome: Outcome, at: list[int]) -> Iterator[None]:
    """Takes what tasks say of corrupted values."""

    class Take(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "corrupted values" in (text := record.getMessage()):
                outcome.told.append((at[0], text))

    log, handler = logging.getLogger("trireme"), Take()
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
