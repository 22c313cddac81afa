"""(k) LeNet-5 and the CIFAR network on two servers, with each shard on one of them, or on both."""

from __future__ import annotations

from benchmarks.context import Context
from benchmarks.data import prepare
from benchmarks.pairs import Plan
from benchmarks.programs.task import NETWORKS
from benchmarks.replicas import Setup, Slice, take_turns, trireme_job
from benchmarks.results import Goal, Result

BOUNDS = {"lenet": 0.90, "cifar": 0.95}
SECONDS = {"lenet": (0.2, 0.8), "cifar": (0.4, 1.6)}
STRATEGIES = ("async", "sync")


def run(context: Context) -> Result:
    """Measures the examples per second of both workers together."""
    result = Result(
        name="replication",
        title="Copies of the parameters: two servers, two workers on one host",
        unit="examples/s",
        higher_is_better=True,
        references=tuple(_name(strategy, 1) for strategy in STRATEGIES),
        goals=[
            Goal(f"{network}, {strategy}: two copies of one", NETWORKS[network].title,
                 _name(strategy, 2), _name(strategy, 1), at_least=bound)
            for network, bound in BOUNDS.items()
            for strategy in STRATEGIES
        ],
    )  # fmt: skip
    for network in BOUNDS:
        _measure(context, result, network)
    result.notes.append(
        "Two copies: each server is the primary of half of the parameters and the backup of the "
        "other half. The backup makes every update too. One thread a process."
    )
    return result


def _measure(context: Context, result: Result, network: str) -> None:
    setups = [
        Setup(
            _name(strategy, replicas),
            "trireme",
            2,
            trireme_job(strategy, servers=2, options=["--replicas", str(replicas)]),
        )
        for strategy in STRATEGIES
        for replicas in (1, 2)
    ]
    training = NETWORKS[network]
    data, described = prepare(context, network)
    settle, seconds = SECONDS[network]
    turn = Slice(settle, seconds, training.batch)
    plan = Plan(9, seconds=context.seconds / len(BOUNDS), least=5)
    if context.quick:
        turn, plan = Slice(0.2, 2.0, training.batch), Plan(1, least=1)
    measured, went = take_turns(context, setups, data, network, turn, plan)
    result.notes += [f"{network}: {line}" for line in went]
    result.notes.append(
        f"{training.title}: batches of {training.batch}, {training.optimizer}; data: {described}."
    )
    result.add(measured, {s.name: s.kind for s in setups}, condition=training.title)


def _name(strategy: str, replicas: int) -> str:
    return f"{strategy}, {replicas} {'copy' if replicas == 1 else 'copies'}"
