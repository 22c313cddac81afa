"""(g) On a GPU: a network of 25 million parameters with parameter servers, and plain loops."""

from __future__ import annotations

import os

import torch

from benchmarks.context import Context
from benchmarks.data import prepare
from benchmarks.pairs import Plan
from benchmarks.programs.task import NETWORKS
from benchmarks.replicas import Setup, Slice, loops, take_turns, trireme_job
from benchmarks.results import Goal, Result

LOOP, ON_HOST = "plain loop, fused Adam", "plain loop, its fused Adam on the host"


def run(context: Context) -> Result:
    """Measures the steps per second of one worker on the GPU, its servers on the host."""
    cores = len(os.sched_getaffinity(0))
    several = max(2, cores - 4)
    result = Result(
        name="gpu",
        title=f"{NETWORKS['wide'].title}, on a GPU: servers on the host, one worker",
        unit="steps/s",
        higher_is_better=True,
        references=(LOOP, ON_HOST),
    )
    if not torch.cuda.is_available():
        result.skipped.append("NO GPU HERE: this benchmark was not run, and says nothing")
        return result
    device = ["--device", "cuda"]
    host = [*device, "--on-host", "--threads"]
    jobs = {servers: f"Trireme async, {servers} servers" for servers in (1, several)}
    setups = [
        Setup(LOOP, "limit", 1, loops(count=1, options=[*device, "--fused"])),
        Setup(ON_HOST, "limit", 1, loops(count=1, options=[*host, str(several)])),
        Setup(f"{ON_HOST}, one thread", "limit", 1, loops(count=1, options=[*host, "1"])),
    ] + [
        Setup(name, "trireme", 1, trireme_job("async", workers=1, servers=n, program=device))
        for n, name in jobs.items()
    ]
    result.goals += [
        Goal("of Adam on the host", "", jobs[several], ON_HOST, at_least=0.8),
        Goal("one server, of one thread", "", jobs[1], f"{ON_HOST}, one thread", at_least=0.8),
    ]
    data, described = prepare(context, "wide")
    plan = Plan(2, least=2) if context.quick else Plan(9, seconds=context.seconds, least=5)
    measured, went = take_turns(context, setups, data, "wide", Slice(0.5, 2.0), plan)
    result.notes += went
    result.add(measured, {setup.name: setup.kind for setup in setups})
    result.notes += [
        f"Data: {described}; batches of {NETWORKS['wide'].batch}, on the GPU already.",
        "With servers each step moves 100 MB of gradients to the host and 100 MB of values back, "
        "and Adam runs on the host's processor; so it does in the loop beside, which has neither "
        f"servers nor messages. A server has one thread; that loop has {several}, or one.",
    ]
    return result
