"""(t) What it costs to look for values that have changed by themselves: `--check-every 100`."""

from __future__ import annotations

from benchmarks.context import Context
from benchmarks.data import prepare
from benchmarks.pairs import Plan
from benchmarks.programs.task import NETWORKS
from benchmarks.replicas import Setup, Slice, take_turns, trireme_job
from benchmarks.results import Goal, Result

NETWORKS_OF = {"mlp": (0.2, 0.6), "cifar": (0.4, 1.6)}
"""The seconds that do not count, and those that do, of a turn."""
STRATEGIES = ("async", "sync")
CHECKS = ("--check-every", "100")


def run(context: Context) -> Result:
    """Measures the steps per second of both workers together, with and without checks."""
    result = Result(
        name="corruption",
        title="Checks of values, every 100 steps: one server, two workers on one host",
        unit="worker steps/s",
        higher_is_better=True,
        references=STRATEGIES,
        goals=[
            Goal(f"{network}, {strategy}: with checks, of without", NETWORKS[network].title,
                 _checked(strategy), strategy, at_least=0.99)
            for network in NETWORKS_OF
            for strategy in STRATEGIES
        ],
    )  # fmt: skip
    for network, (settle, seconds) in NETWORKS_OF.items():
        setups = [
            Setup(name, "trireme", 2, trireme_job(strategy, options=options))
            for strategy in STRATEGIES
            for name, options in ((strategy, ()), (_checked(strategy), CHECKS))
        ]
        data, described = prepare(context, network)
        plan = Plan(21, seconds=context.seconds / len(NETWORKS_OF), least=5)
        if context.quick:
            plan = Plan(2, least=2)
        measured, went = take_turns(context, setups, data, network, Slice(settle, seconds), plan)
        result.notes += [f"{network}: {line}" for line in went]
        result.notes.append(f"{NETWORKS[network].title}: data: {described}.")
        kinds = {setup.name: setup.kind for setup in setups}
        result.add(measured, kinds, condition=NETWORKS[network].title)
    return result


def _checked(strategy: str) -> str:
    return f"{strategy}, checked"
