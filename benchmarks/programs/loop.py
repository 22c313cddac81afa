"""A plain PyTorch loop that talks to nobody: the limit."""

from __future__ import annotations

import os

import torch
from torch import nn

from benchmarks.programs.lane import Lane
from benchmarks.programs.networks import batches, make_dataset, make_network, make_optimizer
from benchmarks.programs.task import NETWORKS, arguments
from trireme.launch.process_setup.resources import keep_freed_memory


def main() -> None:
    parser = arguments()
    parser.add_argument("--fused", action="store_true", help="PyTorch's fused optimizer")
    parser.add_argument("--keep-memory", action="store_true", help="as Trireme's tasks do")
    given = parser.parse_args()
    if given.keep_memory:
        keep_freed_memory(os.environ)
    torch.set_num_threads(1)
    torch.manual_seed(given.rank)
    model = make_network(given.network).to(given.device)
    optimizer = make_optimizer(given.network, model.parameters(), fused=given.fused)
    criterion = nn.CrossEntropyLoss()
    dataset = make_dataset(given.data, given.device)
    size = NETWORKS[given.network].batch
    lane = Lane(given.lanes, f"worker-{given.rank}")
    lane.wait()
    for step, (inputs, targets) in enumerate(batches(dataset, size, given.rank)):
        loss = criterion(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if given.device != "cpu":
            torch.cuda.synchronize()
        lane.step()
        if step % 100 == 0:
            lane.tell(loss=loss.item(), global_step=step + 1)


if __name__ == "__main__":
    main()
