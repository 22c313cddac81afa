"""On a machine with one CUDA device: what a plain loop makes of a model there, jobs make of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.shell import PYTHON, Shell

DEVICE = "cuda"
PROGRAM = Path(__file__).parent / "programs" / "train.py"
CLOSE = 1e-5
"""What float32 leaves of rounding after twenty steps of Adam."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.processes,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="NO CUDA DEVICE HERE, or hidden: pytest tests/gpu"
    ),
]


def run(shell: Shell, launch: str, *program: str, status: int = 0) -> str:
    """Runs the program by `trireme run`; by plain python where `launch` is empty."""
    words = [PROGRAM, "--out", shell.directory / "out", "--device", DEVICE, *program]
    if launch:
        ended = shell.run("run", *launch.split(), *words)
    else:
        ended = shell.start(*words, command=PYTHON).ended()
    assert ended.status == status, ended.text[-4000:]
    return ended.text


def difference(shell: Shell, tasks: list[str], *plain: str) -> float:
    """The largest difference between a task's values and those of a plain loop."""
    found = {task: load_file(shell.directory / "out" / f"{task}.safetensors") for task in tasks}
    run(shell, "", "--kind", "plain", *plain)
    wanted = load_file(shell.directory / "out" / "worker:0.safetensors")
    return max(
        float((values[name] - wanted[name]).abs().max())
        for values in found.values()
        for name in wanted
    )


@pytest.mark.parametrize("kind", ["session", "loop"])
@pytest.mark.parametrize(
    ("launch", "workers"),
    [
        ("--ps 1 --workers 1 --strategy async", 1),
        ("--ps 2 --workers 2 --strategy sync", 2),
        ("--ps 2 --workers 2 --strategy sync --replicas 2 --transport tcp", 2),
        ("--ps 1 --workers 1 --strategy ssp --staleness 2", 1),
        ("--workers 1", 1),
    ],
    ids=lambda value: str(value).replace("--", "").replace(" ", "-"),
)
def test_equals_a_plain_loop(shell: Shell, kind: str, launch: str, workers: int) -> None:
    run(shell, launch, "--kind", kind)
    assert difference(shell, [f"worker:{i}" for i in range(workers)]) <= CLOSE


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_in_a_loop_of_its_own(shell: Shell, precision: str) -> None:
    run(shell, "--ps 1 --workers 1", "--kind", "loop", "--precision", precision)
    assert difference(shell, ["worker:0"], "--precision", precision) <= 100 * CLOSE


def test_a_compiled_model(shell: Shell) -> None:
    run(shell, "--ps 1 --workers 1", "--kind", "loop", "--compile")
    assert difference(shell, ["worker:0"]) <= CLOSE


def test_a_checkpoint_goes_from_the_gpu_to_the_processor_and_back(shell: Shell) -> None:
    run_dir = f"--ps 1 --workers 1 --run-dir {shell.directory / 'run'}"
    run(shell, run_dir, "--max-steps", "7")
    run(shell, run_dir, "--max-steps", "14", "--device", "cpu")
    run(shell, run_dir, "--max-steps", "20")
    assert difference(shell, ["worker:0"]) <= CLOSE


def test_a_killed_worker_takes_the_gpu_again(shell: Shell) -> None:
    killed = shell.directory / "killed"
    launch = "--ps 1 --workers 2 --strategy async --max-restarts 1"
    run(shell, launch, "--kill", str(killed), "--max-steps", "20000")
    assert killed.exists()
    for worker in range(2):
        values = load_file(shell.directory / "out" / f"worker:{worker}.safetensors")
        assert all(value.isfinite().all() for value in values.values())


def test_a_profile_has_the_kernels(shell: Shell) -> None:
    run(shell, f"--ps 1 --workers 1 --run-dir {shell.directory / 'run'} --profile 5:8")
    traces = list((shell.directory / "run").rglob("*.json*"))
    kernels = [t for t in traces if "kernel" in _text(t)]
    assert kernels, [str(t) for t in traces]


def _text(path: Path) -> str:
    if path.suffix == ".gz":
        import gzip

        return gzip.decompress(path.read_bytes()).decode()
    return path.read_text()


@pytest.mark.skipif(torch.cuda.device_count() != 1, reason="what one device cannot do")
def test_two_processes_that_reduce_over_one_gpu_are_refused_by_name(shell: Shell) -> None:
    text = run(shell, "--workers 2", status=2)
    assert "ranks 0, 1 have the same one. Start at most one process for each GPU" in text
