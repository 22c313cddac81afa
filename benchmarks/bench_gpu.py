"""(g) On a GPU: a network of 25 million parameters with a parameter server, and a plain loop."""

from __future__ import annotations

import torch

from benchmarks.context import Context
from benchmarks.data import prepare
from benchmarks.pairs import Plan
from benchmarks.programs.task import NETWORKS
from benchmarks.replicas import Setup, Slice, loops, take_turns, trireme_job
from benchmarks.results import Goal, Result

LOOP, FUSED, ASYNC = "plain loop", "plain loop, fused Adam", "Trireme async, one worker"


def run(context: Context) -> Result:
    """Measures the steps per second of one worker on the GPU, its server on the host."""
    result = Result(
        name="gpu",
        title=f"{NETWORKS['wide'].title}, on a GPU: one server, one worker",
        unit="steps/s",
        higher_is_better=True,
        references=(LOOP, FUSED),
    )
    if not torch.cuda.is_available():
        result.skipped.append("NO GPU HERE: this benchmark was not run, and says nothing")
        return result
    device = ["--device", "cuda"]
    setups = [
        Setup(LOOP, "limit", 1, loops(count=1, options=device)),
        Setup(FUSED, "limit", 1, loops(count=1, options=[*device, "--fused"])),
        Setup(ASYNC, "trireme", 1, trireme_job("async", workers=1, program=device)),
    ]
    result.goals.append(Goal("of the plain loop", "", ASYNC, LOOP, at_least=0.5))
    data, described = prepare(context, "wide")
    plan = Plan(2, least=2) if context.quick else Plan(9, seconds=context.seconds, least=5)
    measured, went = take_turns(context, setups, data, "wide", Slice(0.5, 2.0), plan)
    result.notes += went
    result.add(measured, {setup.name: setup.kind for setup in setups})
    result.notes += [
        f"Data: {described}; batches of {NETWORKS['wide'].batch}, on the GPU already.",
        "Each step moves 100 MB of gradients to the host and 100 MB of values back, and the "
        "server's Adam runs on the host's processor.",
    ]
    return result
