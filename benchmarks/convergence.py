"""Does training converge as well with packed gradients? LeNet-5 on MNIST with every codec.

    python -m benchmarks.convergence [--steps 1500] [--data DIR] [--results DIR]

Two workers and a server, synchronous, the same seed and the same examples in the same order for
all; what differs is only what a push carries. It needs the real images.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.context import real_data
from benchmarks.machine import ROOT, describe
from benchmarks.processes import environment

CODECS = ("none", "fp16", "bf16", "int8", "topk:0.1", "topk:0.01")
PROGRAM = ROOT / "benchmarks" / "programs" / "convergence.py"


@dataclass(frozen=True)
class Trained:
    """What one codec came to.

    Attributes:
        codec: as `--compress` takes it.
        pushed: bytes of one push.
        loss, accuracy: on the test images.
        curve: (global step, mean training loss of the last 25 steps).
    """

    codec: str
    pushed: int
    loss: float
    accuracy: float
    curve: list[tuple[int, float]]


def train(codec: str, data: Path, steps: int) -> Trained:
    """Trains once, as a user would."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out.json"
        run = [sys.executable, "-m", "trireme", "run", "--ps", "1", "--workers", "2"]
        run += ["--strategy", "sync", "--compress", codec, "--run-dir", f"{scratch}/run"]
        run += [str(PROGRAM), "--data", str(data), "--steps", str(steps), "--out", str(out)]
        done = subprocess.run(
            run, env=environment(), cwd=scratch, capture_output=True, text=True, timeout=600
        )
        if done.returncode:
            raise RuntimeError(f"{codec}: {done.stderr[-2000:]}")
        found = json.loads(out.read_text())
    return Trained(codec, pushed_bytes(codec), found["loss"], found["accuracy"], found["curve"])


def pushed_bytes(codec: str) -> int:
    """Returns how many bytes a push of LeNet-5's gradients carries."""
    from images.networks import LeNet5

    from trireme.compression.codec import make_codec
    from trireme.compression.packing import Packer
    from trireme.ps.flat import FlatModel

    flat = FlatModel([list(LeNet5().named_parameters())], servers=1)
    made = make_codec(codec)
    part = flat.part_gradients(0)
    views = part.views if made is None else Packer(made, part).views
    return sum(view.nbytes for view in views)


def write(trained: list[Trained], steps: int, directory: Path) -> None:
    """Writes JSON, a table and a plot."""
    directory.mkdir(parents=True, exist_ok=True)
    everything: dict[str, Any] = {"machine": describe(), "steps": steps}
    everything["trained"] = [asdict(one) for one in trained]
    (directory / "convergence.json").write_text(json.dumps(everything, indent=1) + "\n")
    lines = [
        "# LeNet-5 on MNIST with packed gradients",
        "",
        f"{steps:,} synchronous steps of two workers, batches of 50 each, Adam at 0.001; the same "
        "seed and examples for all.",
        "",
        "![training loss](convergence.png)",
        "",
        "| `--compress` | bytes a push | of float32 | test loss | test accuracy |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    whole = trained[0].pushed
    lines += [
        f"| {one.codec} | {one.pushed:,} | {one.pushed / whole:.3f} | {one.loss:.4f} "
        f"| {one.accuracy:.4f} |"
        for one in trained
    ]
    (directory / "convergence.md").write_text("\n".join(lines) + "\n")
    _plot(trained, directory / "convergence.png")


def _plot(trained: list[Trained], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=120)
    for one in trained:
        steps, losses = zip(*one.curve, strict=True)
        axes.plot(steps, losses, label=f"{one.codec} ({one.accuracy:.2%})", linewidth=1.2)
    axes.set(xlabel="global step", ylabel="training loss", yscale="log")
    axes.legend(title="codec (test accuracy)", frameon=False)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def main() -> None:
    """Trains with every codec, one after the other."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.convergence", description=__doc__)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--data", type=Path, default=real_data())
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    given = parser.parse_args()
    if given.data is None or not (given.data / "mnist").is_dir():
        parser.error("it needs MNIST: name the directory that holds `mnist/` by --data")
    trained = []
    for codec in CODECS:
        trained.append(train(codec, given.data / "mnist", given.steps))
        last = trained[-1]
        print(f"{codec:10s} {last.pushed:9,d} bytes a push, test accuracy {last.accuracy:.4f}")
    write(trained, given.steps, given.results)


if __name__ == "__main__":
    main()
