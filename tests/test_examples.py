"""The examples run, learn, and end by saying what was reached and how fast."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.conftest import python_path
from trireme.session.checkpoint import load

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"

pytestmark = pytest.mark.processes


def run(directory: Path, *command: str | Path) -> str:
    """Runs a command with this interpreter and returns what it printed."""
    environ = {name: value for name, value in os.environ.items() if name != "TRIREME_TASK"}
    environ |= {"PYTHONPATH": python_path(command), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, *command],
        cwd=directory,
        env=environ,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def reached(output: str) -> float:
    """Returns the test accuracy; checks that the line about the speed comes after it."""
    ending = re.search(
        r"^(?:worker:0 \| )?test accuracy: (\d\.\d+)$.*"
        r"^(?:worker:0 \| )?\d+ global steps in \d+\.\d s, [\d,.]+ examples/s$",
        output,
        re.MULTILINE | re.DOTALL,
    )
    assert ending is not None, output
    assert output.count("test accuracy: ") == 1
    return float(ending[1])


@pytest.mark.slow  # the program of the front page is spread alike
def test_the_demo_on_a_server_and_two_workers(tmp_path: Path) -> None:
    launch = ("-m", "trireme", "run", "--ps", "1", "--workers", "2", "--run-dir", "run")
    output = run(tmp_path, *launch, EXAMPLES / "digits.py", "--max-steps", "500")
    assert reached(output) >= 0.95
    applied = [int(count) for count in re.findall(r"local steps: (\d+) applied", output)]
    assert len(applied) == 2
    assert sum(applied) == 500
    assert "curves: tensorboard --logdir run/tensorboard" in output


@pytest.mark.slow
@pytest.mark.thorough
def test_a_job_that_has_ended_says_that_nothing_was_left_to_do(tmp_path: Path) -> None:
    command = (EXAMPLES / "digits.py", "--max-steps", "30", "--run-dir", "run")
    first = reached(run(tmp_path, *command))
    again = run(tmp_path, *command)
    assert "restoring step 30\n" in again
    assert "nothing was left to do: step 30 is the last one" in again
    assert reached(again) == first


@pytest.mark.thorough
def test_the_replicated_program(tmp_path: Path, mnist_dir: Path) -> None:
    output = run(
        tmp_path, EXAMPLES / "mnist_replica.py", "--data_dir", mnist_dir, "--max_steps", "400"
    )
    assert reached(output) >= 0.93
    assert re.search(r"^validation cross entropy: 0\.\d+$", output, re.MULTILINE)
    assert not list(tmp_path.iterdir())


@pytest.mark.thorough
def test_the_supervised_program(tmp_path: Path, mnist_dir: Path) -> None:
    output = run(
        tmp_path, EXAMPLES / "mnist_supervised.py", "--data-dir", mnist_dir, "--max-steps", "200"
    )
    assert reached(output) >= 0.87
    assert len(re.findall(r"^step [12]00 \(global [12]00/200\) loss", output, re.MULTILINE)) == 2
    assert (tmp_path / "runs/mnist_supervised/checkpoints/step-000000200-writer-1").is_dir()


@pytest.mark.thorough
def test_the_program_with_summaries(tmp_path: Path, mnist_dir: Path) -> None:
    launch = ("-m", "trireme", "run", "--ps", "1", "--workers", "2", "--strategy", "sync")
    program = (EXAMPLES / "mnist_summaries.py", "--data", mnist_dir, "--max-steps", "100")
    output = run(tmp_path, *launch, "--run-dir", "run", *program)
    assert reached(output) >= 0.9
    train = EventAccumulator(str(tmp_path / "run/tensorboard/train")).Reload()
    histograms = ("layer1/weight", "layer1/pre_activation", "relu/activation")
    assert set(histograms) <= set(train.Tags()["histograms"])
    test = EventAccumulator(str(tmp_path / "run/tensorboard/test")).Reload()
    steps = [event.step for event in test.Scalars("accuracy")]
    assert steps[:10] == list(range(10, 101, 10))
    assert len(list(tmp_path.glob("run/tensorboard/train/00100/test%2fhidden/sprite.png"))) == 1


@pytest.mark.slow
@pytest.mark.thorough
def test_the_convolutional_program(tmp_path: Path, cifar_dir: Path) -> None:
    output = run(tmp_path, EXAMPLES / "cifar10.py", "--data-dir", cifar_dir, "--max-steps", "20")
    reached(output)
    line = r"^step [12]0, loss = \d\.\d\d \(\d+\.\d examples/sec; \d+\.\d{3} sec/batch\)$"
    assert len(re.findall(line, output, re.MULTILINE)) == 2
    assert (tmp_path / "runs/cifar10/checkpoints/step-000000020-writer-1").is_dir()


def apart(output: str) -> list[float]:
    """Returns by how much a program's loss and parameters differ from those of one process."""
    said = re.search(
        r"^(?:worker:0 \| )?compared with one process: the loss .* differs by (\S+), "
        r"parameters after \d+ steps by at most (\S+)$",
        output,
        re.MULTILINE,
    )
    assert said is not None, output
    return [float(number) for number in said.groups()]


@pytest.mark.slow(but=("one process",))
@pytest.mark.thorough
@pytest.mark.parametrize(
    "launch",
    [
        (),
        ("-m", "trireme", "run", "--workers", "2", "--strategy", "graph"),
        ("-m", "trireme", "run", "--ps", "1", "--workers", "1", "--mesh", "graph=2"),
    ],
    ids=["one process", "two tasks", "a server"],
)
def test_in_graph_replication_is_training_of_the_whole_batch(
    tmp_path: Path, launch: tuple[str, ...]
) -> None:
    program = (EXAMPLES / "in_graph_replication.py", "--check", "--max-steps", "80")
    output = run(tmp_path, *launch, *program)
    assert reached(output) >= 0.85
    assert max(apart(output)) <= 1e-6
    assert "cannot be on" not in output


@pytest.mark.slow
def test_between_graph_replication_over_whole_and_over_divided_workers(tmp_path: Path) -> None:
    launch = ("-m", "trireme", "run", "--ps", "1", "--workers", "2")
    output = run(tmp_path, *launch, EXAMPLES / "between_graph_replication.py")
    assert reached(output) >= 0.9
    applied = [int(count) for count in re.findall(r"local steps: (\d+) applied", output)]
    assert len(applied) == 2
    assert sum(applied) == 400
    program = (EXAMPLES / "between_graph_replication.py", "--max-steps", "20", "--run-dir")
    synchronous = (*launch, "--strategy", "sync")
    run(tmp_path, *program, "one", "--batch-size", "128")
    run(tmp_path, *synchronous, *program, "whole")
    run(tmp_path, *synchronous, "--mesh", "graph=2", *program, "divided")
    one, whole, divided = (
        load(tmp_path / name / "checkpoints/step-000000020-writer-1").model
        for name in ("one", "whole", "divided")
    )
    for name, values in one.items():
        torch.testing.assert_close(whole[name], values, rtol=0, atol=1e-6)
        torch.testing.assert_close(divided[name], values, rtol=0, atol=1e-6)


def perplexities(output: str) -> list[dict[str, float]]:
    """Returns what the chief says at the end of each epoch."""
    lines = re.findall(
        r"^(?:worker:0 \| )?epoch \d+: perplexity (train .*, validation .*, test .*)$",
        output,
        re.MULTILINE,
    )
    parts = [[part.split() for part in line.split(", ")] for line in lines]
    return [{name: float(value) for name, value in part} for part in parts]


@pytest.mark.slow
@pytest.mark.thorough
def test_the_recurrent_language_model_on_two_workers(tmp_path: Path) -> None:
    launch = ("-m", "trireme", "run", "--ps", "1", "--workers", "2", "--strategy", "sync")
    program = (EXAMPLES / "language_model.py", "--epochs", "2", "--width", "64")
    output = run(tmp_path, *launch, "--run-dir", "run", *program)
    first, second = perplexities(output)
    for part in ("train", "validation", "test"):
        assert 50 < second[part] < 0.95 * first[part] < 1500
    assert len(re.findall(r"local steps: (\d+) applied", output)) == 2


@pytest.mark.slow
@pytest.mark.thorough
def test_the_transformer_on_a_corpus_of_ones_own(tmp_path: Path) -> None:
    lines = "the cat sat on the mat\n" * 400 + "a dog did not\n" * 400
    for name in ("train.txt", "valid.txt", "test.txt"):
        (tmp_path / name).write_text(lines)
    program = (EXAMPLES / "language_model.py", "--model", "transformer", "--data_dir", tmp_path)
    sizes = ("--max_steps", "50", "--width", "32", "--learning_rate", "0.01")
    output = run(tmp_path, *program, *sizes, "--run-dir", "run")
    found = perplexities(output)
    assert len(found) >= 2
    assert all(value < 1.5 for value in found[-1].values())
    assert (tmp_path / "run/checkpoints/step-000000050-writer-1").is_dir()


@pytest.mark.slow
@pytest.mark.thorough
def test_the_towers_on_two_tasks_equal_one_process(tmp_path: Path) -> None:
    launch = ("-m", "trireme", "run", "--workers", "2", "--strategy", "graph", "--log-placement")
    program = (EXAMPLES / "placed_towers.py", "--max-steps", "20", "--check")
    output = run(tmp_path, *launch, "--run-dir", "run", *program)
    loss, parameters = apart(output)
    assert loss <= 1e-6 and parameters <= 1e-5
    for tower, task in (("left", 0), ("right", 1)):
        assert re.search(rf"{tower}\S* .*worker:{task}/cpu", output), output


@pytest.mark.slow
@pytest.mark.thorough
def test_the_towers_in_one_process_are_plain_training(tmp_path: Path) -> None:
    """The scopes have no effect."""
    output = run(tmp_path, EXAMPLES / "placed_towers.py", "--max-steps", "50", "--check")
    assert reached(output) >= 0.85
    assert max(apart(output)) <= 1e-6


@pytest.mark.thorough
def test_the_topics(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    corpus = tmp_path / "corpus.txt"
    kinds = [[f"{kind}{thing}" for thing in ("one", "two", "six")] for kind in "abcdef"]
    corpus.write_text("".join(f"{' '.join(kind)} {' '.join(kind)}\n" for kind in kinds * 20))
    program = (EXAMPLES / "topics.py", "--file", corpus, "--topics", "8", "--sweeps", "40")
    output = run(tmp_path, *program, "--block-tokens", "200", "--initial-sweeps", "0")
    perplexities = [float(n) for n in re.findall(r"held-out perplexity (\d+\.\d)", output)]
    assert len(perplexities) == 40
    assert perplexities[-1] < 5 < perplexities[0] < 18, "three words of a kind, of eighteen"
    shown = [set(line.split("%")[1].split()[:3]) for line in re.findall(r"^.*\d%.*$", output, re.M)]
    assert len(shown) == 8
    assert sum(kind in shown for kind in map(set, kinds)) >= 5


SPARSE = ("-m", "trireme", "run", "--ps", "2", "--workers", "2")


def auc(output: str) -> tuple[float, float]:
    """Returns the AUC that was reached, and the best one."""
    said = re.findall(
        r"^(?:worker:0 \| )?test AUC (0\.\d+), log loss 0\.\d+; the best AUC is (0\.\d+)$",
        output,
        re.MULTILINE,
    )
    assert len(said) == 1, output
    assert re.search(r"global steps in .* examples/s$", output, re.MULTILINE), output
    return float(said[0][0]), float(said[0][1])


@pytest.mark.slow
@pytest.mark.thorough
def test_the_logistic_regression(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    pytest.importorskip("pyarrow")
    program = (EXAMPLES / "logistic_regression.py", "--rows", "100000", "--batch-size", "500")
    found, best = auc(run(tmp_path, *SPARSE, *program, "--l1", "1"))
    assert best - 0.035 < found < best + 0.003


@pytest.mark.slow
@pytest.mark.thorough
def test_the_logistic_regression_of_files(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    pytest.importorskip("pyarrow")
    rows = "".join(f"{n % 2},{'ab'[n % 2]},{n % 7}\n" for n in range(4000))
    (tmp_path / "rows.csv").write_text("clicked,site,age\n" + rows)
    (tmp_path / "rows.libsvm").write_text(
        "".join(f"{n % 2} {n % 2}:1 7:0.5\n" for n in range(4000))
    )
    program = (EXAMPLES / "logistic_regression.py", "--batch-size", "100", "--l1", "0")
    csv = ("--format", "csv", "--label", "clicked", "--categories", "site", "--numbers", "age")
    for name, columns in (("rows.csv", csv), ("rows.libsvm", ())):
        files = ("--data", tmp_path / name, "--test", tmp_path / name, "--run-dir", name[5:])
        output = run(tmp_path, *program, *files, *columns)
        assert "test AUC 1.0000, log loss 0." in output


@pytest.mark.slow
@pytest.mark.thorough
def test_the_click_prediction(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    pytest.importorskip("pyarrow")
    program = (EXAMPLES / "click_prediction.py", "--rows", "100000", "--batch-size", "250")
    found, best = auc(run(tmp_path, *SPARSE, *program, "--admit-after", "20"))
    assert best - 0.07 < found < best + 0.005


@pytest.mark.slow
@pytest.mark.thorough
def test_click_prediction_sends_rows_instead_of_tables(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    launch = ("-m", "trireme", "run", "--ps", "1", "--workers", "1")
    program = (EXAMPLES / "click_prediction.py", "--rows", "20000", "--bits", "16")
    pushed = []
    for kind in ((), ("--dense",)):
        output = run(tmp_path, *launch, *program, *kind, "--run-dir", f"run{len(pushed)}")
        auc(output)
        told = re.search(r"bytes: .*; a step ([\d,]+) and ([\d,]+)$", output, re.MULTILINE)
        assert told is not None, output
        pushed.append([int(number.replace(",", "")) for number in told.groups()])
    (sparse, rows), (dense, whole) = pushed
    assert dense > 2**16 * 9 * 4 < whole
    assert sparse < dense / 2 and rows < whole / 2
