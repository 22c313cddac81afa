"""Programs as other people write them: verdict and reason, and the same with the mistake mended."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

PROGRAMS = Path(__file__).parent / "programs"
SYNC = ("--ps", "1", "--strategy", "sync")
RESUMED = (*SYNC, "--stop-at", "3")

MISTAKES = {
    "clipping": (SYNC, "values", "by its own norm"),
    "token_means": (SYNC, "loss", "is a mean over something else than its examples"),
    "batch_norm": (SYNC, "loss", "BatchNorm2d 1 normalises each worker's batch"),
    "dropout": (SYNC, "examples", "the loop draws random numbers"),
    "one_cycle": (RESUMED, "settings", "the program's schedule begins anew"),
    "gan": (SYNC, "examples", "the loop draws random numbers"),
    "lora": (SYNC, "examples", "have other contents"),
    "tables": (SYNC, "examples", "differs from its own repetition"),
    "gpt2": (SYNC, "loss", "is a mean over something else than its examples"),
    "lightning_module": (SYNC, "loss", "BatchNorm1d"),
}
MENDED = {"clipping": ("--strategy", "allreduce")}
NEEDS = {"gpt2": "transformers", "lightning_module": "lightning"}


@pytest.mark.processes
@pytest.mark.slow(but=("clipping",))
@pytest.mark.parametrize("program", MISTAKES)
def test_the_mistake_is_found_with_its_reason(program: str, tmp_path: Path) -> None:
    options, stage, reason = MISTAKES[program]
    found = verified(tmp_path, *options, program)
    assert found["outcome"] == "differs", found
    assert found["comparison"]["first"]["stage"] == stage
    assert reason in found["reason"]


@pytest.mark.processes
@pytest.mark.slow(but=("dropout",))
@pytest.mark.parametrize("program", MISTAKES)
def test_with_the_mistake_mended_it_is_the_same(program: str, tmp_path: Path) -> None:
    found = verified(tmp_path, *MENDED.get(program, MISTAKES[program][0]), program, "fixed")
    assert found["outcome"] == "same", found


@pytest.mark.processes
def test_a_loop_that_divides_the_data_itself_runs_once_for_each_worker(tmp_path: Path) -> None:
    found = verified(tmp_path, *SYNC, "own_shares")
    assert found["outcome"] == "same", found
    assert found["against"] == "one process for each of 2 loops, with their gradients joined"


@pytest.mark.processes
@pytest.mark.thorough
def test_a_pipeline_averages_micro_batches(tmp_path: Path) -> None:
    digits = str(ROOT / "examples" / "digits")
    found = verified(tmp_path, "--strategy", "pipeline", "--microbatches", "5", digits)
    assert found["outcome"] == "same", found


def verified(directory: Path, *arguments: str) -> dict[str, Any]:
    *options, program = [each for each in arguments if each != "fixed"]
    if find_spec(NEEDS.get(program, "torch")) is None:
        pytest.skip(f"{NEEDS[program]} is not installed: `make test-recipes` runs this test")
    command = [sys.executable, "-m", "trireme", "verify", "--json", "-", "--steps", "6"]
    command += ["--workers", "2", *options, str(PROGRAMS / f"{program}.py")]
    ended = subprocess.run(
        [*command, *(each for each in arguments if each == "fixed")],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ended.returncode in (0, 1), f"{ended.stderr}\n{ended.stdout}"
    found: dict[str, Any] = json.loads(ended.stdout)[0]
    return found


def test_every_program_is_tested() -> None:
    assert {path.stem for path in PROGRAMS.glob("*.py")} == {*MISTAKES, "own_shares"}
