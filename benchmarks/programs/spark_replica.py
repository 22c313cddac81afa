"""Training as a dataflow of Spark: the driver of a job with two executors.

In each step the driver broadcasts all parameters, every executor computes the gradient of a batch
of its own, `treeReduce` adds the gradients, and the driver updates the parameters. Logistic
regression with `--features`, the MNIST replica program's network without. Runs in Spark's own
environment. Source: Zhang et al., A Comparison of Distributed Machine Learning Platforms (ICCCN
2017), section II.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from pyspark import SparkConf, SparkContext

from benchmarks.programs.lane import Lane
from benchmarks.programs.sparse_examples import RATE, batches, loss_and_slope
from benchmarks.programs.task import NETWORKS, arguments

EXECUTORS = 2
_WARM_UP = 2
HIDDEN = 100

Gradient = Callable[[Any, int, int], tuple[float, Any]]
"""Returns loss and gradient, given parameters, step and executor."""


def main() -> None:
    parser = arguments()
    parser.add_argument("--memory", default="1g", help="of the driver, and of each executor")
    parser.add_argument("--steps", type=int, default=0, help="end after so many more; 0 for never")
    given = parser.parse_args()
    root = str(Path(__file__).parents[2])
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYTHONPATH"] = root
    megabytes = 1024 * int(given.memory.removesuffix("g"))
    conf = SparkConf().setMaster(f"local-cluster[{EXECUTORS},1,{megabytes}]")
    conf = conf.setAppName("replica").set("spark.driver.memory", given.memory)
    conf = conf.set("spark.executor.memory", f"{megabytes}m").set("spark.ui.enabled", "false")
    conf = conf.set("spark.executorEnv.PYTHONPATH", root).set("spark.driver.host", "127.0.0.1")
    conf = conf.set("spark.driver.bindAddress", "127.0.0.1").set("spark.log.level", "ERROR")
    with SparkContext(conf=conf) as context:
        train(given, context)


def train(given: argparse.Namespace, context: SparkContext) -> None:
    """Makes steps while the gate is open; both executors' lanes are stamped by the driver."""
    gradient, parameters = _logistic(given) if given.features else _network(given)
    executors = context.parallelize(range(EXECUTORS), EXECUTORS)
    lanes = [Lane(given.lanes, f"worker-{index}") for index in range(EXECUTORS)]
    update = _descend(RATE) if given.features else _adam(parameters, NETWORKS["mlp"].learning_rate)
    step = 0

    def make_step() -> float:
        sent = context.broadcast(parameters)
        loss, total = executors.map(
            lambda index, sent=sent, step=step: gradient(sent.value, step, index)
        ).treeReduce(lambda one, other: (one[0] + other[0], one[1] + other[1]))
        sent.destroy()
        update(parameters, total / EXECUTORS)
        return float(loss) / EXECUTORS

    while step < _WARM_UP:  # the first one starts the executors' processes
        make_step()
        step += 1
    lanes[0].wait()  # for both: it is one process
    while not given.steps or step < _WARM_UP + given.steps:
        loss, step = make_step(), step + 1
        for lane in lanes:
            lane.tell(loss=loss, global_step=step)
            lane.step()
    print(f"made {step} steps, loss {loss:.4f}", flush=True)


def _descend(rate: float) -> Callable[[Any, Any], None]:
    def update(parameters: Any, gradient: Any) -> None:
        parameters -= rate * gradient

    return update


def _adam(like: Any, rate: float) -> Callable[[Any, Any], None]:
    first, second, times = np.zeros_like(like), np.zeros_like(like), [0]

    def update(parameters: Any, gradient: Any) -> None:
        times[0] += 1
        first[:] = 0.9 * first + 0.1 * gradient
        second[:] = 0.999 * second + 0.001 * gradient**2
        mean, square = first / (1 - 0.9 ** times[0]), second / (1 - 0.999 ** times[0])
        parameters -= rate * mean / (np.sqrt(square) + 1e-8)

    return update


def _logistic(given: argparse.Namespace) -> tuple[Gradient, Any]:
    features = given.features

    def gradient(weights: Any, step: int, index: int) -> tuple[float, Any]:
        chosen, labels = _kept(
            ("examples", features, index), lambda: batches(features, index), step
        )
        loss, slope = loss_and_slope(weights[chosen].sum(1), labels)
        each = np.repeat(slope, chosen.shape[1])
        return loss, np.bincount(chosen.reshape(-1), each, features).astype(np.float32)

    return gradient, np.zeros(features, np.float32)


def _network(given: argparse.Namespace) -> tuple[Gradient, Any]:
    size, data = NETWORKS["mlp"].batch, given.data
    random = np.random.default_rng(0)
    first = random.normal(0, 1 / 28, (784, HIDDEN))
    second = random.normal(0, 0.1, (HIDDEN, 10))
    arrays = [first, np.zeros(HIDDEN), second, np.zeros(10)]
    parameters = np.concatenate([array.reshape(-1) for array in arrays]).astype(np.float32)

    def gradient(flat: Any, step: int, index: int) -> tuple[float, Any]:
        inputs, targets = _kept(("mnist", index), lambda: _images(data, size, index), step)
        return _cross_entropy(flat, inputs, targets)

    return gradient, parameters


def _images(data: str, size: int, index: int) -> Iterator[tuple[Any, Any]]:
    """Yields shuffled batches, epoch after epoch."""
    inputs, targets = (
        np.load(Path(data) / f"{name}.npy", mmap_mode="r") for name in ("inputs", "targets")
    )
    random = np.random.default_rng(index)
    while True:
        order = random.permutation(len(inputs))
        for start in range(0, len(order) - size + 1, size):
            chosen = order[start : start + size]
            yield inputs[chosen], targets[chosen]


def _cross_entropy(flat: Any, inputs: Any, targets: Any) -> tuple[float, Any]:
    """Returns the mean loss of the MNIST replica program's network, and its gradient."""
    ends = np.cumsum([784 * HIDDEN, HIDDEN, HIDDEN * 10, 10])
    w1, b1, w2, b2 = np.split(flat, ends[:-1])
    w1, w2 = w1.reshape(784, HIDDEN), w2.reshape(HIDDEN, 10)
    hidden = np.maximum(inputs @ w1 + b1, 0)
    logits = hidden @ w2 + b2
    logits -= logits.max(1, keepdims=True)
    probabilities = np.exp(logits)
    probabilities /= probabilities.sum(1, keepdims=True)
    rows = np.arange(len(targets))
    loss = float(-np.log(np.maximum(probabilities[rows, targets], 1e-12)).mean())
    probabilities[rows, targets] -= 1
    probabilities /= len(targets)
    back = (probabilities @ w2.T) * (hidden > 0)
    parts = [inputs.T @ back, back.sum(0), hidden.T @ probabilities, probabilities.sum(0)]
    return loss, np.concatenate([part.reshape(-1) for part in parts]).astype(np.float32)


def _kept(key: tuple[Any, ...], make: Callable[[], Iterator[Any]], step: int) -> Any:
    """Returns the next item of an iterator that an executor's process keeps between steps."""
    import builtins  # the task's own globals are shipped anew with each step

    kept = builtins.__dict__.setdefault("_trireme_benchmark", {})
    if key not in kept:
        kept[key] = islice(make(), step, None)
    return next(kept[key])


if __name__ == "__main__":
    main()
