"""Rows on TensorFlow's parameter servers: one task of a compat.v1 job.

A variable of 16 float32 a row is divided among the servers. The worker deduplicates a batch of
keys, looks their rows up, and then pushes a gradient for each, which the servers apply by the
operation of `AdagradOptimizer`. It talks over lines of JSON:

    {"count": C}    exchanges C batches; answers {"seconds": ...}

Runs in TensorFlow's own environment.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import tensorflow as tf

from benchmarks.key_draws import BATCH, WIDTH, Batch, batches, draw_by, gradients

v1 = tf.compat.v1

_FIRST_SQUARES = 0.1  # as AdagradOptimizer has it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", required=True, choices=("ps", "worker"))
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--ps", required=True, help="the servers' addresses")
    parser.add_argument("--worker", required=True, help="the worker's address")
    parser.add_argument("--rows", type=int, default=0)
    parser.add_argument("--rate", type=float, default=0.01)
    parser.add_argument("--exponent", type=float, help="of Zipf's law; else keys are uniform")
    given = parser.parse_args()
    # The benchmark reads answers from standard output: what libraries print must go elsewhere.
    talk = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    v1.disable_eager_execution()
    servers = given.ps.split(",")
    cluster = tf.train.ClusterSpec({"ps": servers, "worker": [given.worker]})
    config = v1.ConfigProto(intra_op_parallelism_threads=1)
    server = v1.train.Server(cluster, given.job, given.rank, config=config)
    if given.job == "ps":
        server.join()
    exchange = worker(given.rows, len(servers), given.rate, server.target, config)
    draw = batches(draw_by(given.exponent), given.rows)
    exchange(draw())
    print(json.dumps({"ready": tf.__version__}), file=talk)
    for line in sys.stdin:
        seconds = 0.0
        for _ in range(json.loads(line)["count"]):
            batch = draw()
            began = time.perf_counter()
            exchange(batch)
            seconds += time.perf_counter() - began
        print(json.dumps({"seconds": seconds}), file=talk)


def worker(
    rows: int, servers: int, rate: float, target: str, config: Any
) -> Callable[[Batch], object]:
    """Makes the table; returns what exchanges a batch: pulls its rows, then pushes gradients."""
    with v1.device(v1.train.replica_device_setter(servers, worker_device="/job:worker/task:0")):
        weights = variable("rows", rows, servers, v1.random_uniform_initializer(-0.01, 0.01))
        squares = variable("squares", rows, servers, v1.constant_initializer(_FIRST_SQUARES))
    with v1.device("/job:worker/task:0"):
        prepared = v1.Variable(gradients(), trainable=False, use_resource=True)
        keys = v1.placeholder(tf.int64, [BATCH])
        wanted, _ = tf.unique(keys)
        found = v1.nn.embedding_lookup(weights, wanted, partition_strategy="div")
        with tf.control_dependencies([found]):  # the push follows the pull, as in a step
            pushed = tf.identity(prepared[: tf.size(wanted)])
        slices = v1.gradients([found], weights, grad_ys=[pushed])
    done = tf.group(*map(partial(update, rate), weights, squares, slices))
    session = v1.Session(target, config=config)
    session.run(v1.global_variables_initializer())
    # `found` is named so that its rows come to the worker: nothing else there needs their values.
    run: Callable[[Batch], object] = session.make_callable([done, found.op], feed_list=[keys])
    return run


def variable(name: str, rows: int, servers: int, first: Any) -> list[Any]:
    """Returns the parts of a variable of (rows, WIDTH) float32, one on each server."""
    partitioner = v1.fixed_size_partitioner(servers)
    return list(
        v1.get_variable(
            name, [rows, WIDTH], initializer=first, partitioner=partitioner, use_resource=True
        )
    )


def update(rate: float, weight: Any, square: Any, slices: Any) -> Any:
    """Returns the update of one server's rows, which no key of `slices` repeats."""
    with v1.device(weight.device):
        return tf.raw_ops.ResourceSparseApplyAdagrad(
            var=weight.handle,
            accum=square.handle,
            lr=rate,
            grad=slices.values,
            indices=slices.indices,
        )


if __name__ == "__main__":
    main()
