"""(a) The MNIST replica program: one server, two workers on this host."""

from __future__ import annotations

from benchmarks.context import Context
from benchmarks.data import prepare
from benchmarks.pairs import Plan
from benchmarks.programs.task import NETWORKS
from benchmarks.replicas import Setup, Slice, ddp, loops, take_turns, tensorflow, trireme_job
from benchmarks.results import Goal, Result

LOOPS, FUSED = "two loops", "two loops, fused Adam"
ASYNC, SYNC, ASYNC_TCP = "Trireme async", "Trireme sync", "Trireme async, tcp"
PREFETCH = "Trireme async, prefetch"
ALLREDUCE = "Trireme allreduce"
TF_ASYNC, TF_SYNC, DDP = "TensorFlow async", "TensorFlow sync", "DDP over gloo"

GOALS = [
    Goal("async: of two loops that never talk", "", ASYNC, LOOPS, at_least=0.90),
    Goal("async, prefetch: of two loops", "", PREFETCH, LOOPS, at_least=0.90),
    Goal("sync: of two loops that never talk", "", SYNC, LOOPS, at_least=0.75),
    Goal("async: of TensorFlow async", "", ASYNC, TF_ASYNC, at_least=6),
    Goal("async, prefetch: of TensorFlow async", "", PREFETCH, TF_ASYNC, at_least=6),
    Goal("sync: of TensorFlow sync", "", SYNC, TF_SYNC, at_least=6),
    Goal("sync: of DDP", "", SYNC, DDP, at_least=2.5),
    Goal("allreduce: of DDP", "", ALLREDUCE, DDP, at_least=1.0),
]


def run(context: Context) -> Result:
    """Measures the steps per second of both workers together."""
    result = Result(
        name="replica",
        title=f"{NETWORKS['mlp'].title}: one server, two workers on one host",
        unit="worker steps/s",
        higher_is_better=True,
        references=(LOOPS,),
        goals=GOALS,
    )
    setups = _setups(context)
    data, described = prepare(context, "mlp")
    turn = Slice(0.2, 0.6)
    plan = Plan(2, least=2) if context.quick else Plan(21, seconds=context.seconds, least=5)
    measured, went = take_turns(context, setups, data, "mlp", turn, plan)
    result.notes += went
    result.add(measured, {setup.name: setup.kind for setup in setups})
    result.notes += [
        f"Data: {described}; batches of 100; Adam at 0.01 everywhere.",
        "A worker step is one batch of one worker. Asynchronous: each is a global step. "
        "Synchronous, and DDP: two make a global step, so the global steps per second are half "
        "of the figure.",
        f"{LOOPS}: plain PyTorch loops with the optimizer that `torch.optim.Adam(...)` gives; "
        f"{FUSED}: the same with `fused=True`.",
        f"{PREFETCH}: each gradient is computed while the push before is under way, and so from "
        "values older by one more update.",
        "TensorFlow: the classic program over compat.v1, fed from numpy, one intra-op thread.",
    ]
    if context.peers.python("tensorflow") is None:
        result.skipped.append("TensorFlow: no environment (`make bench-peers`)")
    return result


def _setups(context: Context) -> list[Setup]:
    found = [
        Setup(LOOPS, "limit", 2, loops()),
        Setup(ASYNC, "trireme", 2, trireme_job("async")),
        Setup(PREFETCH, "trireme", 2, trireme_job("async", options=["--prefetch"])),
        Setup(ASYNC_TCP, "trireme", 2, trireme_job("async", options=["--transport", "tcp"])),
        Setup(SYNC, "trireme", 2, trireme_job("sync")),
        Setup(ALLREDUCE, "trireme", 2, trireme_job("allreduce", servers=0)),
        Setup(DDP, "peer", 2, ddp),
        Setup(FUSED, "limit", 2, loops(options=["--fused"])),
    ]
    python = context.peers.python("tensorflow")
    if python is not None:
        found += [
            Setup(TF_ASYNC, "peer", 2, tensorflow(python, synchronous=False)),
            Setup(TF_SYNC, "peer", 2, tensorflow(python, synchronous=True)),
        ]
    return found
