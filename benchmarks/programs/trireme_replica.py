"""One worker of a Trireme job, through the public session: started by `trireme run`."""

from __future__ import annotations

from torch import nn

import trireme
from benchmarks.programs.lane import Lane
from benchmarks.programs.networks import make_dataset, make_network, make_optimizer
from benchmarks.programs.task import NETWORKS, arguments


def main() -> None:
    given = arguments().parse_args()
    train = make_dataset(given.data, given.device)
    session = trireme.Session(
        lambda: make_network(given.network),
        nn.CrossEntropyLoss(),
        lambda parameters: make_optimizer(given.network, parameters),
        metrics={"accuracy": trireme.accuracy},
        device=None if given.device == "cpu" else given.device,
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
