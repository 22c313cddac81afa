"""Small programs, each with one thing that once was taken for a difference, or was not seen."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.slow(but=("copies and writes",))]

PROGRAM = """
import math, torch, trireme
from torch import nn
from torch.nn.functional import dropout
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 12), nn.Linear(12, 1)
        self.norm = nn.Identity()

    def forward(self, x):
        return self.last(self.norm(self.first(x)).tanh())

torch.manual_seed(1)
x = torch.randn(320, 6)
data, model = TensorDataset(x, x.sum(1, keepdim=True).tanh()), Net()
optimizer = trireme.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
for _, (x, y) in optimizer.epochs(DataLoader(data, 16, shuffle=True), 4):
    optimizer.zero_grad()
    loss = ((model(x) - y) ** 2).mean()
    loss.backward()
    optimizer.step()
optimizer.close()
"""
BACKWARD = "    loss.backward()\n"
CLOSE = "    optimizer.step()\n"
OWN = (
    "for _, (x, y) in optimizer.epochs(DataLoader(data, 16, shuffle=True), 4):",
    "for x, y in list(DataLoader(data, 16))[optimizer.replica::optimizer.replicas]:",
)
SCALED = (
    BACKWARD,
    BACKWARD + "    for p in model.parameters(): p.grad *= 1 - 0.5 * optimizer.replica\n",
)
CLIPPED = "    nn.utils.clip_grad_norm_(model.parameters(), 0.05)\n"
TEACHER = (
    "optimizer = trireme",
    "model.teacher = nn.Parameter(torch.zeros(12, 6), requires_grad=False)\noptimizer = trireme",
)
FOLLOWS = "    model.teacher.mul_(0.9).add_(0.1 * {}.detach())\n"
BFLOAT16 = (
    ("tanh()), Net()", "tanh()), Net().bfloat16()"),
    ("    optimizer.zero_grad", "    x, y = x.bfloat16(), y.bfloat16()\n    optimizer.zero_grad"),
)

CASES: dict[str, tuple[tuple[tuple[str, str], ...], str, str]] = {
    "copies and writes": (
        (
            (
                "optimizer = trireme",
                "mask = torch.full((3, 3), -math.inf).triu(1)\n"
                "model.register_buffer('mask', mask)\noptimizer = trireme",
            ),
            ("for _, (x, y)", "averaged = AveragedModel(model)\nfor _, (x, y)"),
            (
                CLOSE,
                CLOSE + "    averaged.update_parameters(model)\n"
                "    with torch.no_grad(): model.last.weight.clamp_(-0.2, 0.2)\n",
            ),
        ),
        "same",
        "",
    ),
    "autocast": (
        (
            (
                "    loss = ((model(x) - y) ** 2).mean()",
                "    with torch.autocast('cpu', torch.bfloat16):\n"
                "        loss = ((model(x) - y) ** 2).mean()",
            ),
        ),
        "same",
        "",
    ),
    "a batch in pieces": (
        (
            (
                "    loss = ((model(x) - y) ** 2).mean()\n" + BACKWARD,
                "    for part in range(0, len(x), 4):\n"
                "        error = model(x[part : part + 4]) - y[part : part + 4]\n"
                "        ((error**2).sum() / len(x)).backward()\n",
            ),
        ),
        "same",
        "",
    ),
    "a moving average": (
        (
            (
                "optimizer = trireme.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1, "
                "momentum=0.9))",
                "optimizer = trireme.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1, "
                "momentum=0.9), ema=0.9)",
            ),
        ),
        "same",
        "",
    ),
    "bfloat16": (BFLOAT16, "same", ""),
    "bfloat16, scaled": ((*BFLOAT16, SCALED), "differs", ""),
    "dropout that was imported": (
        (
            (
                "self.norm(self.first(x)).tanh()",
                "dropout(torch.cat([self.first(x)] * 2)).tanh()[: len(x)]",
            ),
        ),
        "same",
        "dropout is off",
    ),
    "inputs that have no rows": (
        (
            ("def forward(self, x):", "def forward(self, x, *others):"),
            ("model(x) - y", "model(x, torch.zeros(0, 6), x.to_sparse(), nested([x, x[:2]])) - y"),
            ("class Net", "nested = torch.nested.as_nested_tensor\n\nclass Net"),
        ),
        "same",
        "",
    ),
    "no examples": (
        (
            ("def forward(self, x):", "def forward(self, empty, x):"),
            ("model(x) - y", "model(torch.zeros(0, 6), x) - y"),
        ),
        "same",
        "",
    ),
    "draws without a seed": (
        (
            ("((model(x) - y) ** 2)", "((model(x) - y * random.SystemRandom().random()) ** 2)"),
            ("import math,", "import math, random,"),
        ),
        "differs",
        "differs from its own repetition",
    ),
    "the same batches": (
        (OWN, ("[optimizer.replica::optimizer.replicas]", "")),
        "same",
        "were given the same batches",
    ),
    "clipping by each worker's own norm, of shares of its own": (
        (OWN, (BACKWARD, BACKWARD + CLIPPED)),
        "differs",
        "by its own norm",
    ),
    "clipping by the norm of the mean, of shares of its own": (
        (OWN, ("momentum=0.9))", "momentum=0.9), clip_norm=0.05)")),
        "same",
        "",
    ),
    "another number of steps": (
        (
            OWN,
            (
                "[optimizer.replica::optimizer.replicas]",
                "[: 2 if optimizer.worker.task.servers else 3]",
            ),
        ),
        "differs",
        "the job ends after 2 steps and one process after 3",
    ),
    "a draw beside BatchNorm": (
        (("nn.Identity()", "nn.BatchNorm1d(12)"), (CLOSE, CLOSE + "    torch.rand(1)\n")),
        "differs",
        "BatchNorm1d norm normalises",
    ),
    "a whole number that each worker counts": (
        (
            (
                "optimizer = trireme",
                "model.register_buffer('seen', torch.zeros(2).long())\noptimizer = trireme",
            ),
            (CLOSE, CLOSE + "    model.seen[1] += len(x)\n"),
        ),
        "differs",
        "only buffers differ (seen)",
    ),
    "a buffer that the first batch makes": (
        (
            (
                "self.norm = nn.Identity()",
                "self.norm = nn.Identity(); self.register_buffer('scale', None)",
            ),
            (
                "        return self.last(",
                "        self.scale = x.detach().abs().max(0)[0]\n        return self.last(",
            ),
        ),
        "differs",
        "only buffers differ (scale)",
    ),
    "a teacher that follows": (
        (TEACHER, (CLOSE, CLOSE + FOLLOWS.format("model.first.weight"))),
        "same",
        "",
    ),
    "a teacher that follows each worker's examples": (
        (TEACHER, (CLOSE, CLOSE + FOLLOWS.format("x.max()"))),
        "differs",
        "only buffers differ (teacher)",
    ),
    "a deterministic session whose loss depends on the size of a batch": (
        (
            (
                PROGRAM[PROGRAM.index("optimizer = ") :],
                "sum_of = lambda outputs, targets: ((outputs - targets) ** 2).sum()\n"
                "optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n"
                "options = {'deterministic': True, 'max_steps': 8}\n"
                "with trireme.Session(model, sum_of, optimizer, **options) as session:\n"
                "    for batch in session.loader(data, batch_size=16):\n"
                "        session.step(batch)\n",
            ),
        ),
        "differs",
        "such as the size of a batch",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_program_is_told_for_what_it_is(case: str, tmp_path: Path) -> None:
    edits, outcome, words = CASES[case]
    program = PROGRAM
    for old, new in edits:
        assert old in program
        program = program.replace(old, new)
    (tmp_path / "program.py").write_text(program)
    found = verified(tmp_path)
    assert found["outcome"] == outcome, found
    assert words in " ".join([found["reason"], *found["notes"]])


def verified(directory: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "trireme", "verify", "--json", "-", "--steps", "4"]
    ended = subprocess.run(
        [*command, "--ps", "1", "--workers", "2", "--strategy", "sync", "program.py"],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ended.returncode in (0, 1), ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)[0]
    return found
