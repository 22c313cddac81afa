"""Logistic regression on the bare parameter server: one worker, started by `trireme run`."""

from __future__ import annotations

import numpy as np

import trireme
from benchmarks.programs.lane import Lane
from benchmarks.programs.sparse_examples import RATE, batches, loss_and_slope
from benchmarks.programs.task import arguments
from trireme.tables.keys import unique
from trireme.tables.table_spec import SGD


def main() -> None:
    given = arguments().parse_args()
    with trireme.ps.connect() as ps:
        ps.create_table("weights", 1, optimizer=SGD(RATE))
        ps.pull("weights", [0])  # joins the job, before anything is measured
        lane = Lane(given.lanes, f"worker-{ps.index}")
        lane.wait()
        for step, (features, labels) in enumerate(batches(given.features, ps.index)):
            keys, places = unique(features.reshape(-1))
            weights = ps.pull("weights", keys)[:, 0]
            logits = weights[places].reshape(features.shape).sum(1)
            loss, slope = loss_and_slope(logits, labels)
            each = np.repeat(slope, features.shape[1])
            gradient = np.bincount(places, each, keys.size).astype(np.float32)
            ps.push("weights", keys, gradient[:, None])
            result = ps.clock()
            lane.step()
            if step % 20 == 0:
                lane.tell(loss=loss, global_step=result.step)


if __name__ == "__main__":
    main()
