"""Packages that add to Trireme, each installed into a folder of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.conftest import PYTHONPATH

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
KINDS = sorted(path.parent.name for path in HERE.glob("*/pyproject.toml"))


def install(kind: str, directory: Path) -> None:
    """Builds and installs the package of a kind into a directory, as `pip` does, without network.

    That directory, first on `PYTHONPATH`, and what this process has installed are its environment.
    """
    source = directory.with_name(f"{directory.name}-source")  # builds leave files behind
    shutil.copytree(HERE / kind, source, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--target", str(directory)]
    subprocess.run([*pip, *options, str(source)], check=True, timeout=120)


def environ(directory: Path) -> dict[str, str]:
    """Returns the environment in which what was installed into a directory is found."""
    path = os.pathsep.join([str(directory), PYTHONPATH])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def trireme(
    directory: Path, *words: object, status: int = 0, timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    """Runs a `trireme` command in the directory that holds `directory`."""
    ended = subprocess.run(
        [sys.executable, "-m", "trireme", *map(str, words)],
        cwd=directory.parent,
        env=environ(directory),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert ended.returncode == status, ended.stdout + ended.stderr
    return ended
