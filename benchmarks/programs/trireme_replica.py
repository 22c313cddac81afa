"""One worker of a Trireme job, through the public session: started by `trireme run`."""

from __future__ import annotations

from pathlib import Path

from torch import nn

import trireme
from benchmarks.programs.lane import Lane
from benchmarks.programs.networks import make_dataset, make_network, make_optimizer
from benchmarks.programs.task import NETWORKS, arguments


def main() -> None:
    parser = arguments()
    parser.add_argument("--record", default="nothing", choices=["nothing", "metrics", "all"])
    given = parser.parse_args()
    train = make_dataset(given.data, given.device)
    session = trireme.Session(
        lambda: make_network(given.network),
        nn.CrossEntropyLoss(),
        lambda parameters: make_optimizer(given.network, parameters),
        metrics={"accuracy": trireme.accuracy},
        device=None if given.device == "cpu" else given.device,
        run_dir=None if given.record == "nothing" else Path(given.lanes).parent / "run",
        checkpoint=None,  # where there is a run directory: not what is measured
        hooks=[trireme.Summaries(every=10)] if given.record == "all" else [],
        log_every=100 if given.record == "nothing" else 10,
    )
    with session:
        lane = Lane(given.lanes, f"worker-{session.task.index}")
        lane.wait()
        loader = session.loader(train, NETWORKS[given.network].batch)
        for step, batch in enumerate(loader):
            result = session.step(batch)
            lane.step()
            if step % 100 == 0:
                lane.tell(loss=result.loss, global_step=result.global_step)


if __name__ == "__main__":
    main()
