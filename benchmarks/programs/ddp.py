"""One rank of PyTorch's DistributedDataParallel over gloo."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.programs.lane import Lane
from benchmarks.programs.networks import batches, make_dataset, make_network, make_optimizer
from benchmarks.programs.task import NETWORKS, arguments


def main() -> None:
    parser = arguments()
    parser.add_argument("--meet", required=True, help="where the ranks find each other")
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=given.meet, rank=given.rank, world_size=given.world)
    model = DistributedDataParallel(make_network(given.network))
    optimizer = make_optimizer(given.network, model.parameters())
    criterion = nn.CrossEntropyLoss()
    size = NETWORKS[given.network].batch
    lane = Lane(given.lanes, f"worker-{given.rank}")
    lane.wait()
    data = batches(make_dataset(given.data), size, given.rank)
    for step, (inputs, targets) in enumerate(data):
        loss = criterion(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        lane.step()
        if step % 100 == 0:
            lane.tell(loss=loss.item(), global_step=step + 1)


if __name__ == "__main__":
    main()
