"""No false alarm: examples and recipes are the same as one process under every strategy, twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import PACKAGES, ROOT

pytestmark = [pytest.mark.processes, pytest.mark.slow]

EXAMPLES: dict[str, tuple[str, ...]] = {
    "between_graph_replication": (),
    "cifar10": ("--data-dir", "CIFAR", "--batch-size", "16"),
    "cifar10_towers": ("--data-dir", "CIFAR", "--batch-size", "16"),
    "click_prediction": ("--rows", "20000", "--batch-size", "100", "--admit-after", "1"),
    "digits": (),
    "factorisation": ("--ratings", "20000", "--batch-size", "200", "--epochs", "1"),
    "in_graph_replication": (),
    "language_model": ("--max-steps", "20", "--batch-size", "4", "--width", "32"),
    "logistic_regression": ("--rows", "20000", "--batch-size", "100"),
    "mnist_replica": ("--data-dir", "MNIST"),
    "mnist_summaries": ("--data-dir", "MNIST"),
    "mnist_supervised": ("--data-dir", "MNIST"),
    "placed_towers": (),
}
RECIPES = {
    "fabric_loop": "lightning",
    "lightning_trainer": "lightning",
    "torchmetrics_f1": "torchmetrics",
    "transformers_loop": "transformers",
    "transformers_trainer": "transformers",
}


@pytest.mark.parametrize("again", [1, 2])
@pytest.mark.parametrize("example", EXAMPLES)
@pytest.mark.timeout(3000)
def test_no_example_differs(
    example: str, again: int, tmp_path: Path, mnist_dir: Path, cifar_dir: Path
) -> None:
    given = {"MNIST": str(mnist_dir), "CIFAR": str(cifar_dir)}
    arguments = [given.get(each, each) for each in EXAMPLES[example]]
    found = verified(tmp_path, ROOT / "examples" / f"{example}.py", *arguments)
    assert [each for each in found if each["outcome"] in ("differs", "failed")] == []
    assert [each for each in found if each["outcome"] == "same"]


@pytest.mark.recipes
@pytest.mark.parametrize("again", [1, 2])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.timeout(3000)
def test_no_recipe_differs(recipe: str, again: int, tmp_path: Path) -> None:
    if find_spec(RECIPES[recipe]) is None:
        pytest.skip(f"{RECIPES[recipe]} is not installed: `make test-recipes` runs this test")
    found = verified(tmp_path, ROOT / "recipes" / f"{recipe}.py")
    assert [each for each in found if each["outcome"] in ("differs", "failed")] == []
    assert [each for each in found if each["outcome"] == "same"]


def verified(directory: Path, program: Path, *arguments: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "trireme", "verify", "--json", "-", "--steps", "3"]
    ended = subprocess.run(
        [*command, "--strategies", "all", "--workers", "2", str(program), *arguments],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": PACKAGES},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode in (0, 1), ended.stderr
    found: list[dict[str, Any]] = json.loads(ended.stdout)
    return found
