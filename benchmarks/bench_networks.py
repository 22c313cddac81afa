"""(f) LeNet-5 and the CIFAR network: examples per second of two workers."""

from __future__ import annotations

from benchmarks.context import Context
from benchmarks.data import prepare
from benchmarks.pairs import Plan
from benchmarks.programs.task import NETWORKS
from benchmarks.replicas import Setup, Slice, ddp, loops, take_turns, trireme_job
from benchmarks.results import Goal, Result

LOOPS, ASYNC, SYNC, DDP = "two loops", "Trireme async", "Trireme sync", "DDP over gloo"
ALLREDUCE = "Trireme allreduce"
PREFETCH, KEEPING = "Trireme async, prefetch", "two loops, memory kept"
SECONDS = {"lenet": (0.2, 0.8), "cifar": (0.4, 1.6)}


def run(context: Context) -> Result:
    """Measures the examples per second of both workers together."""
    result = Result(
        name="networks",
        title="LeNet-5 and the CIFAR network: one server, two workers on one host",
        unit="examples/s",
        higher_is_better=True,
        references=(LOOPS,),
        goals=[
            Goal(f"{network}: {contender} of two loops", NETWORKS[network].title, contender, LOOPS,
                 at_least=bound)
            for network in SECONDS
            for contender, bound in ((ASYNC, 0.97), (SYNC, 0.93))
        ]
        + [
            Goal(f"{network}: allreduce of DDP", NETWORKS[network].title, ALLREDUCE, DDP,
                 at_least=1.0)
            for network in SECONDS
        ],
    )  # fmt: skip
    for network in SECONDS:
        _measure(context, result, network)
    result.notes.append(f"{LOOPS}: plain PyTorch loops that never talk. One thread a process.")
    result.notes.append(
        f"{KEEPING}: the same, with the allocator set up as `trireme run` does it for its tasks "
        "(`trireme.launch.process_setup.resources`): freed memory is not given back to the system."
    )
    return result


def _measure(context: Context, result: Result, network: str) -> None:
    setups = [
        Setup(LOOPS, "limit", 2, loops()),
        Setup(ASYNC, "trireme", 2, trireme_job("async")),
        Setup(PREFETCH, "trireme", 2, trireme_job("async", options=["--prefetch"])),
        Setup(SYNC, "trireme", 2, trireme_job("sync")),
        Setup(ALLREDUCE, "trireme", 2, trireme_job("allreduce", servers=0)),
        Setup(DDP, "peer", 2, ddp),
        Setup(KEEPING, "limit", 2, loops(options=["--keep-memory"])),
    ]
    if network == "cifar":  # whose steps are long: neither of these makes a difference there
        setups = [setup for setup in setups if setup.name not in (PREFETCH, KEEPING)]
    training = NETWORKS[network]
    data, described = prepare(context, network)
    settle, seconds = SECONDS[network]
    turn = Slice(settle, seconds, training.batch)
    plan = Plan(9, seconds=context.seconds / len(SECONDS), least=5)
    if context.quick:
        turn, plan = Slice(0.2, 2.0, training.batch), Plan(1, least=1)
    measured, went = take_turns(context, setups, data, network, turn, plan)
    result.notes += [f"{network}: {line}" for line in went]
    result.notes.append(
        f"{training.title}: batches of {training.batch}, {training.optimizer}; data: {described}."
    )
    result.add(measured, {s.name: s.kind for s in setups}, condition=training.title)
