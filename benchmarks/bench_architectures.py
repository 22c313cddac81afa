"""(q) Three architectures: a dataflow (Spark), TensorFlow's servers, and Trireme.

Two synchronous workers each. Logistic regression whose number of features grows, and the network of
the MNIST replica program. Spark's driver sends all parameters to every executor and receives whole
gradients; the servers exchange what a batch touches.

Source of the comparison: Zhang et al., A Comparison of Distributed Machine Learning Platforms
(ICCCN 2017).
"""

from __future__ import annotations

import os
import subprocess

from benchmarks.context import Context
from benchmarks.data import prepare
from benchmarks.gate import Gate
from benchmarks.machine import ROOT
from benchmarks.pairs import Interleaved, Plan, Sample
from benchmarks.processes import free_ports
from benchmarks.programs.sparse_examples import BATCH
from benchmarks.programs.task import NETWORKS
from benchmarks.replicas import (
    PROGRAMS,
    Commands,
    Place,
    Setup,
    Slice,
    take_turns,
    tensorflow,
    trireme_job,
)
from benchmarks.results import Goal, Result

SPARK, TENSORFLOW, TRIREME = "Spark", "TensorFlow", "Trireme"

FEATURES = {10_000: 1.5, 100_000: 1.5, 1_000_000: 4.0, 4_000_000: 10.0}
"""The numbers of features, and the seconds of a turn: Spark makes few steps with many."""

_MEMORY = "1g"
_FEWEST, _MOST = 16_000_000, 256_000_000
_TCP = ("--transport", "tcp")


def run(context: Context) -> Result:
    """Measures the examples per second of both workers together, and the bytes of a step."""
    result = Result(
        name="architectures",
        title="Spark, TensorFlow's servers and Trireme: two synchronous workers on one host",
        unit="examples/s",
        higher_is_better=True,
        references=(TENSORFLOW, SPARK),
        goals=[
            goal
            for condition in (*map(_condition, FEATURES), NETWORKS["mlp"].title)
            for goal in (
                Goal(f"{condition}: of Spark", condition, TRIREME, SPARK, at_least=1),
                Goal(f"{condition}: of TensorFlow", condition, TRIREME, TENSORFLOW, at_least=1),
            )
        ],
    )
    features = {10_000: 1.5} if context.quick else FEATURES
    for number, seconds in features.items():
        options = ("--features", str(number))
        setups = [
            Setup(TRIREME, "trireme", 2, _trireme(options)),
            *_spark(context, options),
            *_tensorflow(context, options),
        ]
        _measure(context, result, _condition(number), setups, Slice(0.3, seconds, BATCH))
    setups = [Setup(TRIREME, "trireme", 2, trireme_job("sync", options=_TCP)), *_spark(context, ())]
    if (python := context.peers.python("tensorflow")) is not None:
        setups.append(Setup(TENSORFLOW, "peer", 2, tensorflow(python, synchronous=True)))
    mlp = NETWORKS["mlp"]
    _measure(context, result, mlp.title, setups, Slice(0.3, 1.5, mlp.batch))
    for name in ("spark", "tensorflow"):
        if context.peers.python(name) is None:
            result.skipped.append(f"{name}: no environment (`make bench-peers`)")
    if not context.quick:
        result.notes += _driver_s_end(context)
    result.notes += [
        f"Logistic regression: {BATCH} examples a step of one worker, 40 features each; plain "
        "gradient descent. Trireme: two servers, a table of width 1. TensorFlow: two servers, a "
        "partitioned variable, sparse gradients, SyncReplicasOptimizer. Spark: two executors, "
        "broadcast, treeReduce, the update in the driver.",
        "MB a step: what passes the loopback interface, for a step of both workers; all by TCP.",
    ]
    return result


def _condition(features: int) -> str:
    return f"{features:,} features"


def _measure(
    context: Context, result: Result, condition: str, setups: list[Setup], turn: Slice
) -> None:
    data, _ = prepare(context, "mlp")
    plan = Plan(1, warmup=0, least=1) if context.quick else Plan(3, least=3)
    measured, went = take_turns(context, setups, data, "mlp", turn, plan)
    result.notes += [f"{condition}: {line}" for line in went]
    result.add(measured, {setup.name: setup.kind for setup in setups}, condition=condition)
    sizes = (f"{name} {_megabytes(measured, name):.3g}" for name in measured.samples)
    result.notes.append(f"{condition}: MB a step: {', '.join(sizes)}.")


def _megabytes(measured: Interleaved, name: str) -> float:
    samples: list[Sample] = measured.samples[name]
    steps = sum(sample.work for sample in samples) / 2  # each worker's step is counted
    return sum(sample.nbytes for sample in samples) / steps / 1e6


# The contenders --------------------------------------------------------------------------------


def _trireme(options: tuple[str, ...]) -> Commands:
    return trireme_job(
        "sync", servers=2, options=_TCP, program=options, script="trireme_logistic.py"
    )


def _spark(context: Context, options: tuple[str, ...]) -> list[Setup]:
    python = context.peers.python("spark")
    if python is None:
        return []

    def commands(place: Place) -> list[list[str]]:
        return [[str(python), str(PROGRAMS / "spark_replica.py"), *place.common, *options]]

    return [Setup(SPARK, "peer", 1, commands)]


def _tensorflow(context: Context, options: tuple[str, ...]) -> list[Setup]:
    python = context.peers.python("tensorflow")
    if python is None:
        return []

    def commands(place: Place) -> list[list[str]]:
        hosts = [f"127.0.0.1:{port}" for port in free_ports(4)]
        program = [str(python), str(PROGRAMS / "tensorflow_logistic.py"), *place.common, *options]
        program += ["--ps", ",".join(hosts[:2]), "--workers", ",".join(hosts[2:])]
        tasks = [("ps", 0), ("ps", 1), ("worker", 0), ("worker", 1)]
        return [[*program, "--job", job, "--rank", str(rank)] for job, rank in tasks]

    return [Setup(TENSORFLOW, "peer", 2, commands)]


def _driver_s_end(context: Context) -> list[str]:
    """Returns the number of features at which Spark's driver runs out of memory, and its error."""
    python = context.peers.python("spark")
    if python is None:
        return []
    features = _FEWEST
    while features <= _MOST:
        directory = context.scratch / f"driver-{features}"
        directory.mkdir()
        gate = Gate(directory)
        gate.open()
        command = [str(python), str(PROGRAMS / "spark_replica.py"), "--lanes", str(directory)]
        command += ["--data", "-", "--features", str(features), "--steps", "2"]
        command += ["--memory", _MEMORY]
        ended = _ended(command)
        if ended is not None:
            return [f"Spark's driver with {_MEMORY} ends at {features:,} features: {ended}"]
        features *= 2
    return [f"Spark's driver with {_MEMORY} has memory for {_MOST:,} features."]


def _ended(command: list[str]) -> str | None:
    """Returns why a program has failed; None where it has not."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "examples")])},
        )
    except subprocess.TimeoutExpired:
        return "no step within 300 s"
    if done.returncode == 0:
        return None
    lines = (done.stdout + done.stderr).splitlines()
    telling = [line for line in lines if "OutOfMemory" in line or "maxResultSize" in line]
    return (telling or lines or [f"status {done.returncode}"])[-1].strip()[:200]
