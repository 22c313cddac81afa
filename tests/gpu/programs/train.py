"""Trains on a device, as a session or as a loop of its own, and writes down what came of it."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import TensorDataset

import trireme

BATCH = 24


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kind", choices=["session", "loop", "plain"], default="session")
    parser.add_argument("--precision", choices=["float32", "bf16", "fp16"], default="float32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--max-steps", type=int, default=20)
    parser.add_argument(
        "--kill", type=Path, help="worker 1 kills itself, once; a file that says so"
    )
    return parser.parse_args()


def data(device: str) -> TensorDataset:
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randn(40 * BATCH, 20, generator=generator)
    return TensorDataset(inputs.to(device), inputs[:, :10].argmax(1).to(device))


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 10))


def make_optimizer(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def session(given: argparse.Namespace) -> nn.Module:
    """Trains by `Session`; the loader's order is the batches' own."""
    made = trireme.Session(
        network,
        nn.CrossEntropyLoss(),
        make_optimizer,
        device=given.device,
        max_steps=given.max_steps,
    )
    examples = data("cpu").tensors
    with made:
        workers, index = made.task.workers, made.task.index
        while not made.should_stop():
            step = made.global_step % 40
            part = slice(step * BATCH + index, (step + 1) * BATCH, workers)
            made.step(tuple(t[part].to(given.device) for t in examples))
            kill(given, made.task.index, made.global_step)
        return made.model


def loop(given: argparse.Namespace, distributed: bool) -> nn.Module:
    """Trains by a loop of its own, with scaled gradients where the precision asks for it."""
    model = network().to(given.device)
    optimizer = make_optimizer(model.parameters())
    replica, replicas = 0, 1
    if distributed:
        optimizer = trireme.distribute(model, optimizer, max_steps=given.max_steps)
        replica, replicas = optimizer.replica, optimizer.replicas
    forward = torch.compile(model) if given.compile else model
    kind = torch.device(given.device).type
    scaler = torch.amp.GradScaler(kind, enabled=given.precision == "fp16", init_scale=64.0)
    lower = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(given.precision)
    examples = data(given.device).tensors
    for step in range(getattr(optimizer, "global_step", 0), given.max_steps):
        start = step % 40 * BATCH
        inputs, targets = (t[start + replica : start + BATCH : replicas] for t in examples)
        optimizer.zero_grad()
        with torch.autocast(kind, lower) if lower else contextlib.nullcontext():
            loss = nn.functional.cross_entropy(forward(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        kill(given, replica, step)
    return model


def kill(given: argparse.Namespace, worker: int, step: int) -> None:
    if given.kill is not None and worker == 1 and step >= 5 and not given.kill.exists():
        given.kill.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    given = arguments()
    model = session(given) if given.kind == "session" else loop(given, given.kind == "loop")
    values = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
    assert all(p.device.type == torch.device(given.device).type for p in model.parameters())
    from trireme.launch.environment import current_task

    save_file(values, given.out / f"{current_task().name}.safetensors")


main()
