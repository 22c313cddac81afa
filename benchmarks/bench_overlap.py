"""(h) Pushes that leave while backward runs, over links of several speeds."""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Literal

import torch
from torch import nn

from benchmarks.cluster import Address, join, start_servers
from benchmarks.context import Context
from benchmarks.exchange.contender import Exchange, answer, fork_client
from benchmarks.paced import pace
from benchmarks.pairs import Plan, interleave
from benchmarks.results import Goal, Kind, Result
from trireme.ps.client.client import OVERLAP_BYTES
from trireme.ps.rule import Rule

Way = Literal["auto", "off", "none"]

EARLY, AFTER, ALONE = "while backward runs (auto)", "after backward", "forward and backward alone"
CONTENDERS: dict[str, Way] = {EARLY: "auto", AFTER: "off", ALONE: "none"}
KINDS: dict[str, Kind] = {EARLY: "trireme", AFTER: "trireme", ALONE: "limit"}


@dataclass(frozen=True)
class _Model:
    """So many square layers, and examples a batch."""

    layers: int
    width: int
    batch: int

    @property
    def megabytes(self) -> float:
        return self.layers * (self.width + 1) * self.width * 4e-6

    def make(self) -> nn.Sequential:
        pairs = [(nn.Linear(self.width, self.width), nn.ReLU()) for _ in range(self.layers)]
        return nn.Sequential(*(module for pair in pairs for module in pair))


SMALL, MIDDLE, LARGE = _Model(8, 128, 64), _Model(8, 512, 128), _Model(8, 1024, 256)
LINKS = {"1 Gbit/s": 1e9, "10 Gbit/s": 1e10, "loopback": 0.0}


def run(context: Context) -> Result:
    """Measures the milliseconds of a step, one worker and one server."""
    result = Result(
        name="overlap",
        title="A step over TCP: the push leaves while backward runs, or after it",
        unit="ms",
        higher_is_better=False,
        references=(AFTER,),
        goals=[
            _goal(LARGE, "1 Gbit/s", 0.85),
            _goal(LARGE, "10 Gbit/s", 0.95),
            _goal(MIDDLE, "1 Gbit/s", 1.0),
            _goal(MIDDLE, "10 Gbit/s", 0.95),
            _goal(LARGE, "loopback", 1.0),
            _goal(MIDDLE, "loopback", 1.0),
            _goal(SMALL, "loopback", 1.02),
        ],
    )
    models = (SMALL, MIDDLE) if context.quick else (SMALL, MIDDLE, LARGE)
    seconds = context.seconds / (len(models) * len(LINKS))
    for model in models:
        for link, bits in LINKS.items():
            _measure(context, result, model, link, bits, seconds)
    result.notes += [
        "One worker trains layers of equal size with SGD on one server, asynchronously: forward, "
        "backward, push, and the new values back. Both are on one host, one thread each; the "
        "kernel paces what each side's sockets send (SO_MAX_PACING_RATE), each direction by "
        "itself.",
        f"Below {OVERLAP_BYTES / 1e6:.1f} MB `auto` pushes after backward: those rows should be "
        "equal.",
        f"{ALONE}: no server; what is above it is the network's and the server's.",
    ]
    return result


def _goal(model: _Model, link: str, at_most: float) -> Goal:
    condition = _condition(model, link)
    return Goal(f"{condition}: of pushing {AFTER}", condition, EARLY, AFTER, at_most=at_most)


def _condition(model: _Model, link: str) -> str:
    return f"{model.megabytes:.1f} MB, {link}"


def _measure(
    context: Context, result: Result, model: _Model, link: str, bits: float, seconds: float
) -> None:
    contenders: list[Exchange] = []
    try:
        for name, way in CONTENDERS.items():
            contenders.append(_start(name, way, model, bits, 0.1 if context.quick else 0.5))
        plan = Plan(3, least=3) if context.quick else Plan(15, 1, seconds=seconds, least=5)
        measured = interleave(contenders, plan, say=context.say)
    finally:
        for contender in contenders:
            contender.close()
    result.add(measured, KINDS, condition=_condition(model, link))


def _start(name: str, way: Way, model: _Model, bits: float, burst: float) -> Exchange:
    if way == "none":
        return fork_client(name, burst, _alone, model)
    address, started = start_servers(workers=1, servers=1, shared=False, bits=bits)
    return fork_client(name, burst, _worker, address, way, model, bits, servers=started)


def _alone(pipe: Connection, model: _Model) -> None:
    torch.set_num_threads(1)
    module, batch = model.make(), torch.randn(model.batch, model.width)

    def step() -> None:
        module.zero_grad(set_to_none=False)
        module(batch).square().mean().backward()

    answer(pipe, step)


def _worker(
    pipe: Connection, address: Address, way: Literal["auto", "off"], model: _Model, bits: float
) -> None:
    torch.set_num_threads(1)
    pace(bits)
    module, batch = model.make(), torch.randn(model.batch, model.width)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    replica = join(address, 0, module, optimizer, Rule(), transport="tcp", overlap=way)

    def step() -> None:
        replica.flat.zero_gradients()
        loss = module(batch).square().mean()
        replica.client.begin(1.0)
        loss.backward()
        replica.exchange()

    answer(pipe, step)
