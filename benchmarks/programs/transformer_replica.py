"""One worker of a Trireme job that trains the transformer as a graph or as a pipeline."""

from __future__ import annotations

import torch
from torch.nn import functional as F

import trireme
from benchmarks.programs.lane import Lane
from benchmarks.programs.networks import make_dataset, make_network, make_optimizer
from benchmarks.programs.task import NETWORKS, arguments
from trireme.graph.config import GraphConfig
from trireme.parallel.config import PipelineConfig


def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    parser = arguments()
    parser.add_argument("--split", default="", help="the layer at which the second task begins")
    given = parser.parse_args()
    train = make_dataset(given.data, given.device)
    layers = [name for name, _ in make_network(given.network).named_children()]
    second = layers.index(given.split) if given.split else 0
    placement = {
        name: f"worker:{int(number >= second)}" for number, name in enumerate(layers) if second
    }
    session = trireme.Session(
        lambda: make_network(given.network),
        loss,
        lambda parameters: make_optimizer(given.network, parameters),
        checkpoint=None,
        log_every=100,
        graph=GraphConfig(placement=placement),
        pipeline=PipelineConfig(split=(given.split,) if given.split else None),
    )
    batch = NETWORKS[given.network].batch
    with session:
        lane = Lane(given.lanes, f"worker-{session.task.index}")
        batches = iter(session.loader(train, batch))
        session.step(next(batches))  # the graph is captured and placed by it
        lane.wait()
        for step, each in enumerate(batches):
            result = session.step(each)
            lane.step()
            if step % 100 == 0:
                lane.tell(loss=result.loss, global_step=result.global_step)


if __name__ == "__main__":
    main()
