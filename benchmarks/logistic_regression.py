"""Logistic regression on 2^26 features: examples/s of one pass from disk, and the AUC it reaches.

    python -m benchmarks.logistic_regression [--rows 1000000] [--rounds 3] [--results DIR]

`examples/logistic_regression.py` in one process, and by two workers with two servers;
scikit-learn's SGDClassifier, and Vowpal Wabbit where `make bench-peers` has installed it; all on
one file of planted rows, in turns.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from sparse_data import LibsvmReader
from sparse_data.planted_regression import PlantedRegression
from sparse_data.ranking import area_under_curve

from benchmarks import report
from benchmarks.machine import ROOT, describe, load
from benchmarks.pairs import Plan, Sample, interleave
from benchmarks.peers import DIRECTORY, Peers
from benchmarks.processes import environment
from benchmarks.results import Kind, Result

BITS, ALPHA, RATE = 26, 0.1, 0.03
ONE, TWO = "Trireme, one process", "Trireme, two workers and two servers"
LEARN, VW = "scikit-learn, SGDClassifier", "Vowpal Wabbit, FTRL"
KINDS: dict[str, Kind] = {ONE: "trireme", TWO: "trireme", LEARN: "peer", VW: "peer"}


@dataclass(frozen=True)
class Files:
    """The rows.

    Attributes:
        directory: where they are: `train` and `test`, and for Vowpal Wabbit `train.vw`, `test.vw`.
        rows: the number of rows to train on.
        best: the best AUC on the others.
        labels: of the others.
    """

    directory: Path
    rows: int
    best: float
    labels: np.ndarray

    @classmethod
    def written(cls, directory: Path, rows: int) -> Files:
        """Writes them."""
        planted = PlantedRegression(bits=BITS)
        held_out = planted.rows(200_000, part=1)
        for name, part in (("train", planted.rows(rows)), ("test", held_out)):
            planted.write(directory / name, part)
            with (directory / name).open() as source, (directory / f"{name}.vw").open("w") as out:
                for line in source:
                    label, _, pairs = line.partition(" ")
                    out.write(f"{'1' if label == '1' else '-1'} | {pairs}")
        labels = torch.cat([batch.labels for batch in LibsvmReader(directory / "test")])
        return cls(directory, rows, planted.best_auc(held_out), labels.numpy())


class Contender:
    """A program that makes one pass when it is measured.

    Args:
        name: the name that the results show.
        command: how it is started.
        files: the rows.
        predictions: where it writes the scores of the held-out rows; None for one that prints its
            AUC itself.
    """

    def __init__(
        self, name: str, command: Sequence[str], files: Files, predictions: Path | None = None
    ) -> None:
        self.name = name
        self.auc = float("nan")
        self._command, self._files, self._predictions = list(command), files, predictions

    def measure(self) -> Sample:
        """Makes a pass.

        Raises:
            RuntimeError: the program failed.
        """
        before = os.times()
        with tempfile.TemporaryDirectory(dir=self._files.directory) as scratch:
            done = subprocess.run(
                self._command, cwd=scratch, env=environment(), capture_output=True, text=True
            )
        if done.returncode:
            raise RuntimeError(done.stderr[-500:] or done.stdout[-500:])
        after = os.times()
        used = after.children_user + after.children_system
        used -= before.children_user + before.children_system
        return Sample(self._pace(done.stdout), self._files.rows / 1000, used)

    def _pace(self, output: str) -> float:
        """Returns the examples in a second; notes the AUC."""
        if self._predictions is not None:
            scores = np.loadtxt(self._predictions)
            self.auc = area_under_curve(self._files.labels, scores)
            return self._files.rows / float(output.split()[-1])
        said = re.search(r"test AUC (0\.\d+).*? global steps in ([\d.]+) s", output, re.DOTALL)
        if said is None:
            raise RuntimeError(f"the program printed no AUC: {output[-500:]}")
        self.auc = float(said[1])
        return self._files.rows / float(said[2])


def contenders(files: Files, l1: float, peers: Peers) -> list[Contender]:
    """Returns all that are installed."""
    at, python = files.directory, sys.executable
    program = [str(ROOT / "examples" / "logistic_regression.py"), f"--bits={BITS}", f"--l1={l1}"]
    program += [f"--alpha={ALPHA}", "--data", str(at / "train"), "--test", str(at / "test")]
    job = ["-m", "trireme", "run", "--ps", "2", "--workers", "2", "--run-dir", "run"]
    found = [
        Contender(ONE, [python, *program], files),
        Contender(TWO, [python, *job, *program], files),
    ]
    programs, scores = ROOT / "benchmarks" / "programs", at / "scores"
    rows = [str(at / "train"), str(at / "test"), str(scores), str(BITS), str(RATE)]
    command = [python, str(programs / "sgd_classifier.py"), *rows]
    found.append(Contender(LEARN, command, files, scores))
    if (python_of_peer := peers.python("vowpalwabbit")) is not None:
        rows = [str(at / "train.vw"), str(at / "test.vw"), str(scores), str(BITS)]
        command = [str(python_of_peer), str(programs / "vowpal_wabbit.py"), *rows]
        found.append(Contender(VW, [*command, str(ALPHA), str(l1)], files, scores))
    return found


def measured(rows: int, rounds: int, l1: float, peers: Peers) -> Result:
    """Measures all contenders in turns."""
    result = Result(
        name="logistic_regression",
        title=f"Logistic regression on 2^{BITS} features: one pass over {rows:,} rows from disk",
        unit="examples/s",
        higher_is_better=True,
        references=(LEARN, VW),
        work="1000 examples",
    )
    with tempfile.TemporaryDirectory() as directory:
        files = Files.written(Path(directory), rows)
        programs = contenders(files, l1, peers)
        plan = Plan(rounds, warmup=1, least=rounds)
        result.add(interleave(programs, plan, say=lambda line: print(line, flush=True)), KINDS)
    reached = "; ".join(f"{program.name} {program.auc:.4f}" for program in programs)
    result.notes += [
        f"AUC on 200,000 rows that are held out: the best {files.best:.4f}; {reached}.",
        f"FTRL-proximal: alpha {ALPHA}, beta 1, l1 {l1:g}. Trireme takes batches of 1000 rows, "
        f"Vowpal Wabbit row after row. SGDClassifier: a constant learning rate of {RATE}, the best "
        "of a few that were tried; Trireme's reader parses its rows.",
        "The time is that of the pass: reading, parsing, and learning. Starting, the test and the "
        "checkpoint are not in it; they are in the processor's time. Vowpal Wabbit parses in a "
        "thread of its own.",
    ]
    if VW not in {program.name for program in programs}:
        result.skipped.append(f"{VW}: `make bench-peers` builds its environment")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.logistic_regression", description=__doc__
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--l1", type=float, default=4.0)
    parser.add_argument("--peers", type=Path, default=DIRECTORY)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    given = parser.parse_args()
    before = load()
    result = measured(given.rows, given.rounds, given.l1, Peers(given.peers))
    print(report.summary(result))
    machine = {**describe(), "load": f"{before} before, {load()} after"}
    for path in report.write(result, machine, given.results):
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
