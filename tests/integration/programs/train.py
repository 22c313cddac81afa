"""Trains a small network by whatever strategy it is launched with, and writes down how it went."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from images import mnist
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import TensorDataset

import trireme
from tests.faults import Fault, Faults
from trireme.ps.messages import Applied


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--max-steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--fault", type=Fault.parse, action="append", default=[])
    parser.add_argument("--optimizer", default="Adam")
    parser.add_argument("--odd-one-out", action="store_true", help="worker 1 has another model")
    parser.add_argument("--data-dir", help="where MNIST is; random data without it")
    parser.add_argument("--every-steps", type=int, help="save a checkpoint each so many")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds before each step")
    parser.add_argument("--pause-until", type=Path, help="no pauses once this file exists")
    return parser.parse_args()


def random_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(500, 20, generator=generator)
    return TensorDataset(inputs, inputs[:, :10].argmax(1))


def noisy(batch: tuple[torch.Tensor, ...], generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    inputs, targets = batch
    return inputs + 0.1 * torch.randn(inputs.shape, generator=generator), targets


def main() -> None:
    options = arguments()
    data = mnist.load(options.data_dir)[0] if options.data_dir else random_data()
    width = data.tensors[0].shape[1]
    # Dropout, and noise in the loader: what is random is part of what has to be repeated.
    session = trireme.Session(
        lambda: nn.Sequential(
            nn.Linear(width, 32), nn.LayerNorm(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10)
        ),
        nn.CrossEntropyLoss(),
        lambda parameters: getattr(torch.optim, options.optimizer)(parameters, lr=0.01),
        max_steps=options.max_steps,
        deterministic=True,
        ema=0.9,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99),
        checkpoint=trireme.Checkpoint(every_seconds=None, every_steps=options.every_steps),
        hooks=[Faults(options.fault, options.out)],
        log_every=10,
    )
    if options.odd_one_out and session.task.index == 1:
        session._make_model = lambda: nn.Sequential(nn.Linear(width, 33), nn.Linear(33, 10))
    verdicts = []
    with session:
        for batch in session.loader(data, options.batch_size, transform=noisy):
            if options.pause and not (options.pause_until and options.pause_until.exists()):
                time.sleep(options.pause)
            verdicts.append(session.step(batch).verdict)
        found = session.evaluate(data)
    applied = [verdict.step for verdict in verdicts if isinstance(verdict, Applied)]
    name = f"worker-{session.task.index}"
    save_file(dict(session.model.state_dict()), options.out / f"{name}.safetensors")
    report = {
        "attempted": len(verdicts),
        "applied": applied,
        "global_step": session.global_step,
        "restored_from": session.restored_from,
        "loss": found["loss"],
    }
    (options.out / f"{name}.json").write_text(json.dumps(report))


main()
