"""The classic TensorFlow replica program: one task of a compat.v1 parameter server job.

As `mnist_replica.py` had it: `tf.train.Server`, variables placed by `replica_device_setter`, a
`Supervisor`, feeds from numpy, and `SyncReplicasOptimizer` where it is synchronous. Runs in
TensorFlow's own environment.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.programs.lane import Lane
from benchmarks.programs.task import NETWORKS, arguments

v1 = tf.compat.v1


def main() -> None:
    parser = arguments()
    parser.add_argument("--job", required=True, choices=("ps", "worker"))
    parser.add_argument("--ps", required=True, help="the server's address")
    parser.add_argument("--workers", required=True, help="the workers' addresses")
    parser.add_argument("--synchronous", action="store_true")
    given = parser.parse_args()
    v1.disable_eager_execution()
    cluster = tf.train.ClusterSpec({"ps": [given.ps], "worker": given.workers.split(",")})
    config = v1.ConfigProto(intra_op_parallelism_threads=1)
    server = v1.train.Server(cluster, given.job, given.rank, config=config)
    if given.job == "ps":
        server.join()
    worker = f"/job:worker/task:{given.rank}"
    with v1.device(v1.train.replica_device_setter(worker_device=worker, cluster=cluster)):
        train(given, server.target, config)


def train(given: argparse.Namespace, target: str, config: Any) -> None:
    inputs = v1.placeholder(tf.float32, [None, 784])
    targets = v1.placeholder(tf.int64, [None])
    step = v1.Variable(0, name="global_step", trainable=False)
    loss = cross_entropy(inputs, targets)
    optimizer = v1.train.AdamOptimizer(NETWORKS[given.network].learning_rate)
    if given.synchronous:
        workers = len(given.workers.split(","))
        optimizer = v1.train.SyncReplicasOptimizer(
            optimizer, replicas_to_aggregate=workers, total_num_replicas=workers
        )
    train_op = optimizer.minimize(loss, global_step=step)
    chief = given.rank == 0
    supervisor_options: dict[str, Any] = {}
    if given.synchronous:
        supervisor_options = {
            "local_init_op": optimizer.chief_init_op if chief else optimizer.local_step_init_op,
            "ready_for_local_init_op": optimizer.ready_for_local_init_op,
        }
        runner, tokens = optimizer.get_chief_queue_runner(), optimizer.get_init_tokens_op()
    supervisor = v1.train.Supervisor(
        is_chief=chief,
        logdir=tempfile.mkdtemp(dir=given.lanes),
        init_op=v1.global_variables_initializer(),
        summary_op=None,
        save_model_secs=0,
        recovery_wait_secs=1,
        global_step=step,
        **supervisor_options,
    )
    session = supervisor.prepare_or_wait_for_session(target, config=config)
    if given.synchronous and chief:
        session.run(tokens)
        supervisor.start_queue_runners(session, [runner])
    lane = Lane(given.lanes, f"worker-{given.rank}")
    lane.wait()
    for count, (images, labels) in enumerate(batches(given)):
        feed = {inputs: images, targets: labels}
        if count % 100 == 0:
            value = session.run(loss, feed)
            lane.tell(loss=float(value), global_step=int(session.run(step)))
        session.run([train_op, step], feed)
        lane.step()


def cross_entropy(inputs: Any, targets: Any) -> Any:
    """The network of the MNIST replica program."""
    hidden = v1.Variable(v1.truncated_normal([784, 100], stddev=1 / 28))
    hidden_bias = v1.Variable(tf.zeros([100]))
    output = v1.Variable(v1.truncated_normal([100, 10], stddev=0.1))
    output_bias = v1.Variable(tf.zeros([10]))
    activated = tf.nn.relu(v1.nn.xw_plus_b(inputs, hidden, hidden_bias))
    logits = v1.nn.xw_plus_b(activated, output, output_bias)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=targets, logits=logits)
    return tf.reduce_mean(losses)


def batches(given: argparse.Namespace) -> Iterator[tuple[Any, Any]]:
    """Yields shuffled batches, epoch after epoch."""
    inputs, targets = (
        np.load(Path(given.data) / f"{name}.npy", mmap_mode="r") for name in ("inputs", "targets")
    )
    size = NETWORKS[given.network].batch
    random = np.random.default_rng(given.rank)
    while True:
        order = random.permutation(len(inputs))
        for start in range(0, len(order) - size + 1, size):
            chosen = order[start : start + size]
            yield inputs[chosen], targets[chosen]


if __name__ == "__main__":
    main()
