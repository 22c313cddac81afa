"""Mistakes in programs and in copies of Trireme: is each found where it is, with its reason?"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

LOOP = """
import json, os, random, sys
import numpy as np, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
import trireme

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.more = nn.Linear(6, 1)
        self.last = nn.Linear(12, 1)
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x):
        hidden = self.first(x).tanh()
        return self.last(hidden)

class Data(Dataset):
    def __init__(self):
        self.x = torch.randn(160, 6)
        self.y = self.x.sum(1, keepdim=True).tanh()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]

torch.manual_seed(1)
data, model = Data(), Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
optimizer = trireme.distribute(model, optimizer)
step = 0
for _, (x, y) in optimizer.epochs(DataLoader(data, 8, shuffle=True), 4):
    optimizer.zero_grad()
    loss = ((model(x) - y) ** 2).mean()
    loss.backward()
    optimizer.step()
    step += 1
optimizer.close()
"""

SESSION = (
    LOOP.split("optimizer = torch.optim")[0]
    + """
make = lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
session = trireme.Session(
    model, nn.MSELoss(), make, max_steps=20,
    scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
)
with session:
    for batch in session.loader(data, 8):
        session.step(batch)
"""
)

SYNC = ("--ps", "1", "--workers", "2", "--strategy", "sync")
TWO = ("--ps", "2", "--workers", "2", "--strategy", "sync")
ALLREDUCE = ("--workers", "2", "--strategy", "allreduce")
FSDP = ("--workers", "2", "--strategy", "fsdp")


@dataclass(frozen=True)
class Plant:
    """A mistake: texts that are replaced in the program, or in files of a copy of Trireme."""

    name: str
    options: tuple[str, ...]
    step: int
    stage: str
    tensors: str
    reason: str
    program: str = LOOP
    edits: tuple[tuple[str, str], ...] = ()
    mutants: tuple[tuple[str, str, str], ...] = field(default=())


FORWARD = "return self.last(hidden)"
BACKWARD = "    loss.backward()\n"
BATCH = "    optimizer.zero_grad()\n"
ANY = "first.weight first.bias last.weight last.bias"
SUMS = "ps/shard/values/gradient_sums.py"

PLANTS = [
    Plant(
        *("clips each worker's own gradient", SYNC, 1, "values", ANY),
        "by its own norm",
        edits=((BACKWARD, BACKWARD + "    nn.utils.clip_grad_norm_(model.parameters(), 0.01)\n"),),
    ),
    Plant(
        *("scales the gradient by worker", ALLREDUCE, 1, "values", ANY),
        "differ when they reach the optimizer",
        edits=(
            (
                BACKWARD,
                BACKWARD + "    for p in model.parameters():\n"
                "        if p.grad is not None: p.grad *= 1 + optimizer.replica\n",
            ),
        ),
    ),
    Plant(
        *("means over what counts", SYNC, 1, "loss", ""),
        "is a mean over something else than its examples",
        edits=((".mean()\n", "[x[:, 0] > 0.5].mean()\n"),),
    ),
    Plant(
        *("BatchNorm", SYNC, 1, "loss", ""),
        "normalises each worker's batch",
        edits=(
            ("self.first = nn.Linear(6, 12)", "self.first = nn.Linear(6, 12); "
             "self.norm = nn.BatchNorm1d(12)"),
            ("self.first(x).tanh()", "self.norm(self.first(x)).tanh()"),
        ),
    ),
    Plant(
        *("noise that the loop draws", SYNC, 1, "examples", "contents"),
        "the loop draws random numbers",
        edits=(
            ("torch.manual_seed(1)\n", "torch.manual_seed(1)\nnp.random.seed(1)\n"),
            (BATCH, "    x = x + torch.tensor(np.random.randn(*x.shape)).float()\n" + BATCH),
        ),
    ),
    Plant(
        *("noise that the model draws", SYNC, 1, "loss", ""),
        "the model draws random numbers",
        edits=((FORWARD, "return self.last(hidden + 0.1 * torch.randn_like(hidden))"),),
    ),
    Plant(
        *("a rate by the number of processes", ALLREDUCE, 1, "settings", "lr"),
        "the number of processes",
        edits=(
            (
                "step = 0\n",
                "step = 0\nd = torch.distributed\n"
                "size = d.get_world_size() if d.is_initialized() else 1\n"
                "for g in optimizer.param_groups: g['lr'] *= size\n",
            ),
        ),
    ),
    Plant(
        *("a schedule that counts its own examples", SYNC, 2, "settings", "lr"),
        "steps that it counts itself",
        edits=(
            ("    step += 1\n",
             "    step += len(x)\n"
             "    for g in optimizer.param_groups: g['lr'] = 0.1 / (1 + step)\n"),
        ),
    ),
    Plant(
        *("a layer that one worker trains", SYNC, 1, "loss", ""),
        "has no gradient on worker:1",
        edits=(
            (
                BACKWARD,
                "    if optimizer.replica == 0: loss = loss + (model.more(x) ** 2).mean()\n"
                + BACKWARD,
            ),
        ),
    ),
    Plant(
        *("collectives weigh all batches alike", ALLREDUCE, 3, "values", ANY),
        "differ when they reach the optimizer",
        edits=(("torch.randn(160, 6)", "torch.randn(44, 6)"),),
        mutants=(("parallel/gradients.py", "        return factor\n\n\nclass ShardedMean",
                  "        total()\n        return lambda: 1.0\n\n\nclass ShardedMean"),),
    ),
    Plant(
        *("data without a seed", SYNC, 1, "examples", "contents"),
        "differs from its own repetition",
        edits=(
            ("return self.x[i], self.y[i]",
             "return self.x[i] + random.SystemRandom().random(), self.y[i]"),
        ),
    ),
    Plant(
        *("data of each process", SYNC, 1, "examples", "contents"),
        "makes data of its own",
        edits=(
            ("torch.manual_seed(1)\n",
             "task = json.loads(os.environ['TRIREME_TASK'])\n"
             "torch.manual_seed(task['index'] + 10 * task['workers'])\n"),
        ),
    ),
    Plant(
        *("a buffer that keeps the largest mean", SYNC, 1, "buffers", "largest"),
        "only buffers differ",
        edits=(
            (FORWARD, "self.largest.copy_(torch.maximum(self.largest, x.mean(0).max().detach())); "
             + FORWARD),
        ),
    ),
    Plant(
        *("a sum in place of a mean", SYNC, 1, "loss", ""),
        "such as the size of a batch",
        edits=((".mean()\n", ".sum() / 10\n"),),
    ),
    Plant(
        *("a schedule that a resume begins anew", (*SYNC, "--stop-at", "3"), 4, "settings", "lr"),
        "schedule begins anew",
        edits=(
            ("    step += 1\n",
             "    step += 1\n"
             "    for g in optimizer.param_groups: g['lr'] = 0.1 / (1 + step)\n"),
        ),
    ),
    Plant(
        *("servers add up and do not divide", SYNC, 1, "values", ANY),
        "what it makes of them does not",
        mutants=((SUMS, "float(len(weights)) if equal else sum(weights)", "1.0"),),
    ),
    Plant(
        *("one of two servers drops a worker", TWO, 1, "values", ANY),
        "what it makes of them does not",
        mutants=((SUMS, "torch.add(first, second, alpha=factors[1], out=target)",
                  "torch.add(first, first, alpha=factors[1], out=target)"),),
    ),
    Plant(
        *("servers do not hear of the rate", SYNC, 2, "values", ANY),
        "has other settings",
        program=SESSION,
        mutants=(
            ("ps/shard/execution.py", "            if hyper is not None:\n"
             "                state.values.optimizer.set_hyper(hyper)\n"
             "            update, extra = make()", "            update, extra = make()"),
        ),
    ),
    Plant(
        *("collectives add up", ALLREDUCE, 1, "values", ANY),
        "differ when they reach the optimizer",
        mutants=(("parallel/gradients.py", "vector.div_(self._process_group.mesh.replicas)",
                  "pass"),),
    ),
    Plant(
        *("an order by the number of workers", SYNC, 1, "examples", "contents"),
        "other contents",
        mutants=(("session/data/feed.py", "self._worker.setup.settings.options.seed)",
                  "self._worker.task.workers)"),),
    ),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_a_planted_mistake_is_found_with_its_reason(plant: Plant, tmp_path: Path) -> None:
    found = verified(plant, tmp_path)
    assert found["outcome"] == "differs", found
    first = found["comparison"]["first"]
    assert (first["step"], first["stage"]) == (plant.step, plant.stage), found["reason"]
    assert first["name"] in plant.tensors.split() or first["name"] == plant.tensors
    assert plant.reason in found["reason"]


@pytest.mark.slow
@pytest.mark.parametrize("options", [SYNC, TWO, ALLREDUCE, FSDP], ids=["sync", "two", "ar", "fsdp"])
@pytest.mark.parametrize("program", [LOOP, SESSION], ids=["loop", "session"])
def test_without_a_mistake_it_is_the_same(
    program: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    found = verified(Plant("none", options, 0, "", "", "", program), tmp_path)
    assert found["outcome"] == "same", found


def verified(plant: Plant, directory: Path) -> dict[str, Any]:
    program = plant.program
    for old, new in plant.edits:
        assert old in program
        program = program.replace(old, new)
    (directory / "program.py").write_text(program)
    code = ROOT
    if plant.mutants:
        code = directory / "code"
        shutil.copytree(ROOT / "trireme", code / "trireme")
        for file, old, new in plant.mutants:
            text = (code / "trireme" / file).read_text()
            assert old in text
            (code / "trireme" / file).write_text(text.replace(old, new))
    command = [sys.executable, "-m", "trireme", "verify", "--json", "-", "--steps", "4"]
    ended = subprocess.run(
        [*command, *plant.options, str(directory / "program.py")],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(code)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ended.returncode in (0, 1), ended.stderr
    verdict: dict[str, Any] = json.loads(ended.stdout)[0]
    return verdict
