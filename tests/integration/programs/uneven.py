"""Trains for some steps; one worker ends early, leaves one out, stands still, or computes long.

uneven.py session|loop --fault RANK:STEP:end|skip|sleep|stop|compute (stop: between two steps)
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import trireme
from trireme.launch.environment import detect


def hold_the_interpreter_lock(seconds: float) -> None:
    """Computes while no other thread of this process runs, as one long call of C does."""
    before, ends = sys.getswitchinterval(), time.perf_counter() + seconds
    sys.setswitchinterval(3600.0)
    while time.perf_counter() < ends:
        pass
    sys.setswitchinterval(before)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=["session", "loop"])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--fault", default="-1:-1:end")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds between two steps")
    options = parser.parse_args()
    rank, at, fault = options.fault.split(":")
    mine = detect().index == int(rank)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    entropy = nn.CrossEntropyLoss()
    inputs, targets = torch.randn(16, 8), torch.randint(0, 2, (16,))

    data = TensorDataset(torch.randn(4000, 8), torch.randint(0, 2, (4000,)))

    def leaves_out(step: int) -> bool:
        time.sleep(options.pace)
        if mine and step == int(at) and fault == "sleep":
            time.sleep(3600)
        if mine and step == int(at) and fault == "compute":
            hold_the_interpreter_lock(10.0)
        return mine and step == int(at) and fault == "skip"

    def stops(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        """Is a metric: a session computes it after the step, before processes average metrics."""
        due = mine and session.global_step == int(at) and fault == "stop"
        if due and not (marker := Path("stopped")).exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        return 0.0

    steps = int(at) if mine and fault == "end" else options.steps
    if options.way == "session":
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        metrics = {"stops": stops}
        with trireme.Session(model, entropy, sgd, log_every=1, metrics=metrics) as session:
            for step, batch in enumerate(session.loader(data, batch_size=8, epochs=None)):
                if step == steps:
                    break
                if not leaves_out(step):
                    session.step(batch)
            print(f"made {session.global_step} steps", flush=True)
        return
    optimizer = trireme.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(steps):
        if not leaves_out(step):
            optimizer.zero_grad()
            entropy(model(inputs), targets).backward()
            optimizer.step()
    print(f"made {optimizer.global_step} steps", flush=True)
    optimizer.close()


if __name__ == "__main__":
    main()
