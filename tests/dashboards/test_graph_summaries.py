"""TensorBoard's graph of a model that is placed on tasks has their devices."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.conftest import python_path

pytestmark = pytest.mark.processes

PROGRAM = """
import sys, torch, trireme
from torch import nn
from torch.utils.data import TensorDataset

class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        with trireme.device("worker:0"):
            self.left = nn.Sequential(nn.Linear(8, 6), nn.ReLU())
        with trireme.device("worker:1"):
            self.right = nn.Sequential(nn.Linear(8, 6), nn.Tanh())

    def forward(self, values):
        left, right = self.left(values), self.right(values)
        with trireme.device("worker:1"):
            return left + right

random = torch.Generator().manual_seed(0)
data = TensorDataset(
    torch.rand(80, 8, generator=random), torch.randint(0, 3, (80,), generator=random)
)
session = trireme.Session(
    Towers,
    nn.CrossEntropyLoss(),
    lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    max_steps=4,
    checkpoint=None,
    graph=trireme.GraphConfig(example=torch.rand(10, 8) if "--lean" in sys.argv else None),
    hooks=[trireme.Summaries(every=2)],
)
with session:
    for batch in session.loader(data, 10):
        session.step(batch)
    session.summary.graph(torch.rand(3, 8), run="example")
"""


def devices(run_dir: Path, run: str) -> dict[str, str]:
    """Returns the device of each node of the graph of a run."""
    events = EventAccumulator(str(run_dir / "tensorboard" / run)).Reload()
    return {node.name: node.device for node in events.Graph().node}


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--lean",)], ids=["at once", "lean"])
def test_the_graph_of_a_placed_model_has_the_devices_of_the_tasks(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    launch = ("run", "--strategy", "graph", "--workers", "2", "--run-dir", tmp_path / "run")
    environ = {name: value for name, value in os.environ.items() if name != "TRIREME_TASK"}
    ended = subprocess.run(
        [sys.executable, "-m", "trireme", *launch, program, *options],
        env={**environ, "PYTHONPATH": python_path(launch), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "nothing of the forward pass but the graph" in ended.stdout + ended.stderr
    assert ended.stdout.count("; predicted ") == 1  # also where it is placed before the start
    first, second = (f"/job:worker/task:{task}/device:CPU:0" for task in range(2))
    found = devices(tmp_path / "run", "train")
    wanted = {
        "left/0/weight": first,
        "left/0/addmm": first,
        "left/1/relu": first,
        "right/0/weight": second,
        "right/0/addmm": second,
        "right/1/tanh": second,
    }
    assert wanted.items() <= found.items()
    assert {"left/0/bias", "right/0/bias"} <= found.keys()
    example = devices(tmp_path / "run", "example")
    assert {device for name, device in example.items() if name.startswith("left/")} == {first}
    assert {device for name, device in example.items() if name.startswith("right/")} == {second}
