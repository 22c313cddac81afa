"""A program of which one process may change a bit of its values, as bad memory would.

It writes a digest of its values to OUT/NAME.
"""

import argparse
import hashlib
from pathlib import Path

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
arguments = parser.parse_args()

torch.manual_seed(1)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
session = trireme.Session(
    model,
    nn.MSELoss(),
    torch.optim.Adam(model.parameters(), lr=0.01),
    max_steps=arguments.max_steps,
    checkpoint=None,
)
flipped = False
with session:
    index = session.task.group.rank if not session.task.servers else session.task.index
    while not session.should_stop():
        step = session.global_step
        if index == arguments.flip_in and step >= arguments.flip_after and not flipped:
            flipped = True
            values = to_local(session.parameters["2.weight"].detach())
            values.reshape(-1).view(torch.int32).numpy()[1] ^= 1 << arguments.bit
            if arguments.unseen:
                session.worker.observers["corruption"]._kept = None
                session.worker.remember()
        generator = torch.Generator().manual_seed(100 * step + index)
        session.step(
            (torch.randn(4, 6, generator=generator), torch.randn(4, 4, generator=generator))
        )
    found = hashlib.blake2b(digest_size=8)
    for parameter in session.parameters.values():
        found.update(to_local(parameter.detach()).numpy().tobytes())
    (arguments.out / f"{index}").write_text(found.hexdigest())
