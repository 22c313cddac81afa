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
    parser.add_argument("--on-host", action="store_true", help="the optimizer, fused, on the host")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--keep-memory", action="store_true", help="as Trireme's tasks do")
    given = parser.parse_args()
    if given.keep_memory:
        keep_freed_memory(os.environ)
    torch.set_num_threads(given.threads)
    torch.manual_seed(given.rank)
    model = make_network(given.network).to(given.device)
    trained = list(model.parameters())
    kept = [torch.zeros_like(p, device="cpu").pin_memory() for p in trained if given.on_host]
    for host, parameter in zip(kept, trained, strict=False):
        host.copy_(parameter.detach())
        host.grad = torch.zeros_like(host).pin_memory()
    optimizer = make_optimizer(given.network, kept or trained, fused=given.fused or given.on_host)
    criterion = nn.CrossEntropyLoss()
    dataset = make_dataset(given.data, given.device)
    size = NETWORKS[given.network].batch
    lane = Lane(given.lanes, f"worker-{given.rank}")
    lane.wait()
    for step, (inputs, targets) in enumerate(batches(dataset, size, given.rank)):
        loss = criterion(model(inputs), targets)
        model.zero_grad()
        loss.backward()
        for host, parameter in zip(kept, trained, strict=False):
            host.grad.copy_(parameter.grad, non_blocking=True)
        if kept:
            torch.cuda.synchronize()
        optimizer.step()
        for host, parameter in zip(kept, trained, strict=False):
            parameter.data.copy_(host, non_blocking=True)
        if given.device != "cpu":
            torch.cuda.synchronize()
        lane.step()
        if step % 100 == 0:
            lane.tell(loss=loss.item(), global_step=step + 1)


if __name__ == "__main__":
    main()
