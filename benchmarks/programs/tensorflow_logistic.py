"""Logistic regression on TensorFlow's parameter servers: one task of a compat.v1 job.

The weights lie on the servers; a worker gathers those of its batch, and the gradient is sparse.
Runs in TensorFlow's own environment.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import tensorflow as tf

from benchmarks.programs.lane import Lane
from benchmarks.programs.sparse_examples import NONZEROS, RATE, batches
from benchmarks.programs.task import arguments

v1 = tf.compat.v1


def main() -> None:
    parser = arguments()
    parser.add_argument("--job", required=True, choices=("ps", "worker"))
    parser.add_argument("--ps", required=True, help="the servers' addresses")
    parser.add_argument("--workers", required=True, help="the workers' addresses")
    given = parser.parse_args()
    v1.disable_eager_execution()
    servers, workers = given.ps.split(","), given.workers.split(",")
    cluster = tf.train.ClusterSpec({"ps": servers, "worker": workers})
    config = v1.ConfigProto(intra_op_parallelism_threads=1)
    server = v1.train.Server(cluster, given.job, given.rank, config=config)
    if given.job == "ps":
        server.join()
    worker = f"/job:worker/task:{given.rank}"
    with v1.device(v1.train.replica_device_setter(worker_device=worker, cluster=cluster)):
        train(given, len(servers), len(workers), server.target, config)


def train(given: argparse.Namespace, servers: int, workers: int, target: str, config: Any) -> None:
    features = v1.placeholder(tf.int64, [None, NONZEROS])
    labels = v1.placeholder(tf.float32, [None])
    step = v1.Variable(0, name="global_step", trainable=False)
    weights = v1.get_variable(
        "weights",
        [given.features, 1],
        initializer=v1.zeros_initializer(),
        partitioner=v1.fixed_size_partitioner(servers),
    )
    found = v1.nn.embedding_lookup(weights, features, partition_strategy="div")
    logits = tf.reduce_sum(found, [1, 2])
    losses = tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits)
    loss = tf.reduce_mean(losses)
    optimizer = v1.train.SyncReplicasOptimizer(
        v1.train.GradientDescentOptimizer(RATE),
        replicas_to_aggregate=workers,
        total_num_replicas=workers,
    )
    train_op = optimizer.minimize(loss, global_step=step)
    chief = given.rank == 0
    runner, tokens = optimizer.get_chief_queue_runner(), optimizer.get_init_tokens_op()
    supervisor = v1.train.Supervisor(
        is_chief=chief,
        logdir=tempfile.mkdtemp(dir=given.lanes),
        init_op=v1.global_variables_initializer(),
        summary_op=None,
        save_model_secs=0,
        recovery_wait_secs=1,
        global_step=step,
        local_init_op=optimizer.chief_init_op if chief else optimizer.local_step_init_op,
        ready_for_local_init_op=optimizer.ready_for_local_init_op,
    )
    session = supervisor.prepare_or_wait_for_session(target, config=config)
    if chief:
        session.run(tokens)
        supervisor.start_queue_runners(session, [runner])
    lane = Lane(given.lanes, f"worker-{given.rank}")
    lane.wait()
    for chosen, targets in batches(given.features, given.rank):
        feed = {features: chosen, labels: targets}
        _, value, made = session.run([train_op, loss, step], feed)
        lane.step()
        lane.tell(loss=float(value), global_step=int(made))


if __name__ == "__main__":
    main()
