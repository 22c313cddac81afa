"""The wheel, in an environment that has nothing else: `make wheel-test`.

It downloads all that Trireme depends on, PyTorch included, so `make test` leaves it out.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
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


def only(pattern: str) -> Path:
    found = sorted((ROOT / "dist").glob(pattern))
    assert len(found) == 1, f"dist/ has {found}: make wheel-test builds it"
    return found[0]


def install(directory: Path, python: str) -> Path:
    """Installs the wheel of `dist/` and what that asks for; returns the environment's `bin`."""
    run(directory, python, "-m", "venv", directory / "venv")
    commands = directory / "venv" / "bin"
    pip = (commands / "python", "-m", "pip")
    wheel = only("trireme_train-*.whl")
    run(directory, *pip, "install", "--quiet", "-c", ROOT / "constraints.txt", wheel)
    return commands


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment with the newest wheel of `dist/` and what that asks for."""
    return install(tmp_path_factory.mktemp("empty"), sys.executable)


def test_the_installed_wheel_trains(environment: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    trireme = environment / "trireme"
    alone = run(tmp_path, environment / "python", "program.py", seconds=240)
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
    version = run(tmp_path, environment / "trireme", "--version", seconds=60)
    assert version.startswith("trireme ") and ", torch 2." in version and ", Python 3." in version
    files = run(tmp_path, environment / "python", "-m", "pip", "show", "-f", "trireme-train")
    assert "trireme/py.typed" in files
    assert "tests/" not in files


def test_wheel_and_sdist_say_what_they_are() -> None:
    with zipfile.ZipFile(only("trireme_train-*.whl")) as wheel:
        names = wheel.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        text = wheel.read(metadata).decode()
        (scripts,) = (name for name in names if name.endswith("entry_points.txt"))
        assert "trireme = trireme.cli:main" in wheel.read(scripts).decode()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"trireme"}
    for line in (
        "Name: trireme-train",
        "License-Expression: Apache-2.0",
        "Requires-Python: >=3.11",
    ):
        assert f"{line}\n" in text
    for extra in ("examples", "ray", "graph", "notebook"):
        assert f"Provides-Extra: {extra}\n" in text
    with tarfile.open(only("trireme_train-*.tar.gz")) as sdist:
        inside = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"LICENSE", "CHANGELOG.md", "trireme/py.typed", "tests/conftest.py"} <= inside


def test_a_tag_has_the_version_of_the_wheel() -> None:
    git = ("git", "-C", str(ROOT), "tag", "--points-at", "HEAD", "v*")
    listed = subprocess.run(git, capture_output=True, text=True, timeout=60)
    version = only("trireme_train-*.whl").name.split("-")[1]
    assert listed.stdout.split() in ([], [f"v{version}"])


@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_newer_pythons_train_or_find_all_dependencies(version: str, tmp_path: Path) -> None:
    """Where there is no such Python, pip resolves the dependencies as for one."""
    python = shutil.which(f"python{version}")
    words = [python or "", "-c", "import sys; print(*sys.version_info[:2], sep='.')"]
    ended = subprocess.run(words, capture_output=True, text=True) if python else None
    if python is not None and ended is not None and ended.stdout.strip() == version:
        (tmp_path / "program.py").write_text(PROGRAM)
        job = ("run", "--ps", 1, "--workers", 2, "--run-dir", "job", "program.py")
        assert "loss small" in run(tmp_path, install(tmp_path, python) / "trireme", *job)
        return
    options = ("--dry-run", "--ignore-installed", "--only-binary=:all:", "--target", "there")
    pip = (sys.executable, "-m", "pip", "install", *options, "--python-version", version)
    wheel = only("trireme_train-*.whl")
    printed = run(tmp_path, *pip, "-c", ROOT / "constraints.txt", wheel)
    assert "Would install" in printed and "torch-" in printed and "trireme-train-" in printed
