"""How often should workers average? Loss against bytes, for periods of 1 to 256 steps.

    python -m benchmarks.averaging [--steps 1500] [--seeds 3] [--data DIR] [--results DIR]

An MLP and LeNet-5 on MNIST; two workers and a server, the same examples for all. Bytes are what the
runs themselves say that a worker has pushed and pulled. It needs the real images.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.context import real_data
from benchmarks.machine import ROOT, describe
from benchmarks.processes import environment

PERIODS = (1, 4, 16, 64, 256)
MODELS = {"mlp": "MLP, 784-100-10", "lenet": "LeNet-5"}
PROGRAM = ROOT / "benchmarks" / "programs" / "averaging.py"

WAYS: dict[str, list[str]] = {
    "sync": ["--strategy", "sync"],
    **{f"averaging {h}": ["--strategy", "averaging", "--every", str(h)] for h in PERIODS},
    "diloco 100": ["--strategy", "diloco"],
    "diloco 100, int8": ["--strategy", "diloco", "--compress", "int8"],
}
"""What is compared, and how it is launched."""


@dataclass(frozen=True)
class Trained:
    """What one run came to.

    Attributes:
        model, way, seed: which run.
        pushed, pulled: bytes of worker 0, in all.
        loss, accuracy: on the test images.
        curve: (global step, the chief's mean training loss of the last 50 steps).
    """

    model: str
    way: str
    seed: int
    pushed: int
    pulled: int
    loss: float
    accuracy: float
    curve: list[tuple[int, float]]


def train(model: str, way: str, seed: int, data: Path, steps: int) -> Trained:
    """Trains once, as a user would.

    Raises:
        RuntimeError: the run failed; with the last lines that it printed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out.json"
        run = [sys.executable, "-m", "trireme", "run", "--ps", "1", "--workers", "2", *WAYS[way]]
        run += ["--run-dir", f"{scratch}/run", str(PROGRAM), "--data", str(data), "--model", model]
        run += ["--steps", str(steps), "--seed", str(seed), "--out", str(out)]
        done = subprocess.run(
            run, env=environment(), cwd=scratch, capture_output=True, text=True, timeout=600
        )
        if done.returncode:
            raise RuntimeError(f"{model}, {way}: {done.stderr[-2000:]}")
        found = json.loads(out.read_text())
    told = re.search(r"^worker:0 \| bytes: ([\d,]+) pushed, ([\d,]+) pulled", done.stdout, re.M)
    if told is None:
        raise RuntimeError(f"{model}, {way}: the run says nothing of its bytes")
    pushed, pulled = (int(number.replace(",", "")) for number in told.groups())
    return Trained(
        model, way, seed, pushed, pulled, found["loss"], found["accuracy"], found["curve"]
    )


def table(trained: list[Trained], steps: int) -> list[str]:
    """Returns a table a model: means over the seeds, and how far these are apart."""
    lines: list[str] = []
    for model, title in MODELS.items():
        lines += ["", f"## {title}", ""]
        lines += [
            "| | bytes pushed a step | of sync | bytes pulled a step | test loss "
            "| test accuracy (lowest to highest) | to sync, points |",
            "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        ]
        runs = {way: [t for t in trained if (t.model, t.way) == (model, way)] for way in WAYS}
        whole = runs["sync"]
        for way, mine in runs.items():
            accuracies = [run.accuracy for run in mine]
            behind = statistics.mean(accuracies) - statistics.mean(t.accuracy for t in whole)
            lines.append(
                f"| {way} | {mine[0].pushed / steps:,.0f} "
                f"| 1/{whole[0].pushed / mine[0].pushed:,.0f} | {mine[0].pulled / steps:,.0f} "
                f"| {statistics.mean(run.loss for run in mine):.4f} "
                f"| {statistics.mean(accuracies):.4f} ({min(accuracies):.4f} to "
                f"{max(accuracies):.4f}) | {100 * behind:+.2f} |"
            )
    return lines


def write(trained: list[Trained], steps: int, seeds: int, directory: Path) -> None:
    """Writes JSON, tables and a plot."""
    directory.mkdir(parents=True, exist_ok=True)
    everything: dict[str, Any] = {"machine": describe(), "steps": steps, "seeds": seeds}
    everything["trained"] = [asdict(one) for one in trained]
    (directory / "averaging.json").write_text(json.dumps(everything, indent=1) + "\n")
    lines = [
        "# Averaging parameters every so many steps",
        "",
        f"{steps:,} steps of each of two workers, batches of 50, Adam at 0.001 on each (on the "
        f"server in `sync`); the same {steps * 100:,} examples for all; {seeds} seeds. Bytes are "
        "one worker's, as its run counts them; the first pull, which brings the first values, is "
        "among them.",
        "",
        "![loss against bytes](averaging.png)",
        *table(trained, steps),
    ]
    (directory / "averaging.md").write_text("\n".join(lines) + "\n")
    _plot(trained, steps, directory / "averaging.png")


def _plot(trained: list[Trained], steps: int, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, rows = pyplot.subplots(2, len(MODELS), figsize=(10, 7), dpi=110)
    for column, (model, title) in enumerate(MODELS.items()):
        curves, final = rows[0][column], rows[1][column]
        for way in WAYS:
            mine = [t for t in trained if (t.model, t.way) == (model, way)]
            a_step = (mine[0].pushed + mine[0].pulled) / steps
            points = [[loss for _, loss in run.curve] for run in mine]
            means = [statistics.mean(losses) for losses in zip(*points, strict=True)]
            sizes = [step * a_step for step, _ in mine[0].curve]
            dashed = "-" if way.startswith("averaging") else "--"
            curves.plot(sizes, means, dashed, label=way, linewidth=1.2)
        curves.set(title=title, xlabel="bytes of a worker", ylabel="training loss")
        curves.set(xscale="log", yscale="log")
        curves.grid(alpha=0.3)
        for seed in sorted({t.seed for t in trained}):
            losses = {t.way: t.loss for t in trained if (t.model, t.seed) == (model, seed)}
            final.plot(PERIODS, [losses[f"averaging {h}"] for h in PERIODS], "o-", linewidth=0.8)
        sync = statistics.mean(t.loss for t in trained if (t.model, t.way) == (model, "sync"))
        final.axhline(sync, linestyle="--", color="black", linewidth=0.8, label="sync")
        final.axvspan(10, 20, alpha=0.1)
        final.set(xscale="log", xlabel="averaging every so many steps", ylabel="test loss")
        final.set_xticks(PERIODS, map(str, PERIODS))
        final.grid(alpha=0.3)
        final.legend(frameon=False)
    rows[0][0].legend(frameon=False, fontsize=7)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def main() -> None:
    """Trains every way with every seed, one after the other."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.averaging", description=__doc__)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data", type=Path, default=real_data())
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    given = parser.parse_args()
    if given.data is None or not (given.data / "mnist").is_dir():
        parser.error("it needs MNIST: name the directory that holds `mnist/` by --data")
    trained = []
    for seed in range(1, given.seeds + 1):
        for model in MODELS:
            for way in WAYS:
                trained.append(train(model, way, seed, given.data / "mnist", given.steps))
                last = trained[-1]
                print(
                    f"{model:6s} {way:18s} seed {seed}: test loss {last.loss:.4f}, accuracy "
                    f"{last.accuracy:.4f}",
                    flush=True,
                )
        write(trained, given.steps, seed, given.results)


if __name__ == "__main__":
    main()
