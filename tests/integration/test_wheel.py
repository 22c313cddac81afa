"""The wheel, in an environment that has nothing else: `make wheel-test`.

It downloads all that Trireme depends on, PyTorch included, so `make test` leaves it out.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(1200)]

PROGRAM = """
import torch, trireme
from torch import nn
from torch.utils.data import TensorDataset

inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
session = trireme.Session(
    nn.Linear(4, 1), nn.MSELoss(), lambda params: torch.optim.SGD(params, lr=0.1),
    run_dir="run", max_steps=40, seed=3,
)
with session:
    for batch in session.loader(data, batch_size=16):
        session.step(batch)
    loss = session.evaluate(data)["loss"]
    print("loss", "small" if loss < 0.01 else loss, trireme.__file__)
"""


def run(directory: Path, *words: object, seconds: float = 900) -> str:
    """Runs a command as in a shell that knows nothing of this clone; returns what it printed."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TRIREME_", "PYTHON"))}
    ended = subprocess.run(
        [str(word) for word in words],
        cwd=directory,
        env=kept,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
    )
    assert ended.returncode == 0, f"{words}: {ended.stdout}"
    return ended.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment with the newest wheel of `dist/` and what that asks for."""
    wheels = sorted((ROOT / "dist").glob("trireme_train-*.whl"))
    assert wheels, "no wheel in dist/: make wheel-test builds it"
    directory = tmp_path_factory.mktemp("empty")
    run(directory, sys.executable, "-m", "venv", directory / "venv")
    commands = directory / "venv" / "bin"
    pip = (commands / "python", "-m", "pip")
    run(directory, *pip, "install", "--quiet", "-c", ROOT / "constraints.txt", wheels[-1])
    return commands


def test_the_installed_wheel_trains(environment: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    trireme = environment / "trireme"
    alone = run(tmp_path, environment / "python", "program.py", seconds=60)
    assert f"loss small {environment.parent}" in alone
    job = ("run", "--ps", 1, "--workers", 2, "--strategy", "sync", "--run-dir", "job")
    assert f"loss small {environment.parent}" in run(tmp_path, trireme, *job, "program.py")
    assert "finished" in run(tmp_path, trireme, "status", "job", seconds=60)


def test_it_is_called_trireme_train_and_imported_as_trireme(
    environment: Path, tmp_path: Path
) -> None:
    listed = run(tmp_path, environment / "python", "-m", "pip", "list", seconds=60)
    names = [line.split()[0] for line in listed.splitlines() if line.strip()]
    assert "trireme-train" in names and "trireme" not in names
    assert run(tmp_path, environment / "trireme", "--version", seconds=60).startswith("trireme ")
    files = run(tmp_path, environment / "python", "-m", "pip", "show", "-f", "trireme-train")
    assert "trireme/py.typed" in files
    assert "tests/" not in files
