"""The programs of recipes/, and the ways in which each runs."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.shell import PYTHON, ROOT, TRIREME, Ended, Shell

SECONDS = 500.0
RECIPES = ROOT / "recipes"
WAYS = {
    "plain": (PYTHON, ()),
    "python": (PYTHON, ()),
    "sync": (TRIREME, ("run", "--ps", 1, "--workers", 2, "--strategy", "sync")),
    "async": (TRIREME, ("run", "--ps", 1, "--workers", 2)),
    "allreduce": (TRIREME, ("run", "--workers", 2)),
    "one worker": (TRIREME, ("run", "--ps", 1, "--workers", 1, "--strategy", "sync")),
}

OWN = ("plain", "sync", "allreduce")
"""The ways with the loss of one process where the program deals its data itself, in order."""


@dataclass(frozen=True)
class Recipe:
    """A program, and what is known of it.

    Attributes:
        package: which it needs; empty for none.
        steps: how many updates one process makes.
        loops: whether its loop is its own, in which each worker makes as many, whatever the others.
        parity: the ways that must end with the loss of one process.
    """

    package: str
    steps: int
    loops: bool = False
    parity: tuple[str, ...] = ("sync", "allreduce")


ALL = {
    "transformers_trainer": Recipe("transformers", 48, loops=True, parity=OWN),
    "transformers_loop": Recipe("transformers", 48),
    "lightning_trainer": Recipe("lightning", 180, loops=True, parity=OWN),
    "fabric_loop": Recipe("lightning", 180, loops=True, parity=OWN),
    # Batch normalisation and mixup are of the batch that a worker has.
    "resnet": Recipe("", 89, parity=("one worker",)),
    "torch_compile": Recipe("", 178),
    "torchmetrics_f1": Recipe("torchmetrics", 178),
    "mlflow_hook": Recipe("mlflow", 89),
    "wandb_hook": Recipe("wandb", 89),
}


def skip_without(name: str) -> None:
    """Skips a test, and says what is missing, where a recipe cannot run here."""
    package = ALL[name].package
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"NOT TESTED: recipes/{name}.py needs {package}: make test-recipes")
    if name == "torch_compile" and shutil.which("c++") is None:
        pytest.skip("NOT TESTED: torch.compile needs a C++ compiler: apt-get install g++")


def run(shell: Shell, name: str, way: str) -> Ended:
    """Runs a recipe to its end; two workers have half of the batch each."""
    command, words = WAYS[way]
    if command is TRIREME:
        words = (*words, "--run-dir", "run")
    size = 16 if way in ("plain", "python", "one worker") else 8
    # The hook of the tests that delays the import of torch's compiler is not for foreign packages.
    environ = {"PYTHONPATH": str(ROOT), "WANDB_SILENT": "true"}
    return shell.start(
        *words,
        RECIPES / f"{name}{'_plain' * (way == 'plain')}.py",
        size,
        command=command,
        environ=environ,
    ).ended(SECONDS)


def losses(ended: Ended) -> list[float]:
    """Returns the losses (of TorchMetrics the measures) that each process printed at the end."""
    pattern = r"(?m)^(?:worker:\d \| )?(?:loss|f1|auroc) ([\d.e+-]+)$"
    return [float(found) for found in re.findall(pattern, ended.text)]


def changed_lines(before: Path, after: Path) -> int:
    """Returns how many lines differ; a line that replaces another counts once."""
    matcher = difflib.SequenceMatcher(
        None, before.read_text().splitlines(), after.read_text().splitlines(), autojunk=False
    )
    return sum(
        max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in matcher.get_opcodes() if tag != "equal"
    )


def code_lines(path: Path) -> int:
    """Returns how many lines of code a program has: no imports, docstrings, and empty lines."""
    text = path.read_text()
    left_out = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    return sum(
        bool(line.strip()) and number not in left_out
        for number, line in enumerate(text.splitlines(), 1)
    )
