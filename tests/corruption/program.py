"""A program of which one process may change a bit of its values, as bad memory would.

It writes a digest of its values to OUT/NAME.
"""

import argparse
import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

import trireme
from trireme.tensors import to_local

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--max-steps", type=int, default=12)
parser.add_argument("--flip-in", type=int, default=-1, help="the index of the worker")
parser.add_argument("--flip-after", type=int, default=4, help="the global step")
parser.add_argument("--bit", type=int, default=22)
parser.add_argument("--unseen", action="store_true", help="as if it had changed within the step")
parser.add_argument("--loop", action="store_true", help="as the program's own")
arguments = parser.parse_args()

torch.manual_seed(1)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
options = {"max_steps": arguments.max_steps, "checkpoint": None}
flipped = False


def spoil(joined: Any) -> None:
    """Changes a bit, once, where and when the options say."""
    global flipped
    task, step = joined.job.worker.task, joined.global_step
    index = task.index if task.servers else task.group.rank
    if index == arguments.flip_in and step >= arguments.flip_after and not flipped:
        flipped = True
        values = to_local(joined.worker.setup.trained.parameters["2.weight"].detach())
        values.reshape(-1).view(torch.int32).numpy()[1] ^= 1 << arguments.bit
        if arguments.unseen:
            joined.worker.observers["corruption"]._kept = None
            joined.worker.remember()


def batch(joined: Any) -> tuple[torch.Tensor, torch.Tensor]:
    task = joined.job.worker.task
    index = task.index if task.servers else task.group.rank
    generator = torch.Generator().manual_seed(100 * joined.global_step + index)
    return torch.randn(4, 6, generator=generator), torch.randn(4, 4, generator=generator)


def write(joined: Any) -> None:
    task, found = joined.job.worker.task, hashlib.blake2b(digest_size=8)
    for parameter in joined.worker.setup.trained.parameters.values():
        found.update(to_local(parameter.detach()).numpy().tobytes())
    index = task.index if task.servers else task.group.rank
    (arguments.out / f"{index}").write_text(found.hexdigest())


if arguments.loop:
    optimizer = trireme.distribute(model, optimizer, **options)
    while not optimizer.should_stop():
        spoil(optimizer)
        inputs, targets = batch(optimizer)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    write(optimizer)
    optimizer.close()
else:
    with trireme.Session(model, nn.MSELoss(), optimizer, **options) as session:
        while not session.should_stop():
            spoil(session)
            session.step(batch(session))
        write(session)
