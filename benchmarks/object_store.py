"""A large checkpoint uploaded to a server of S3, beside one plain upload of as many bytes.

    python -m benchmarks.object_store [--mebibytes 512] [--rounds 5] [--url s3://bucket/run]

Without `--url` it starts a server on this host that throws large objects away (`s3_sink.py`); it
shares the cores with what it measures. `raw` is s3fs's own upload of one file (`put`), in parts
over parallel connections. `checkpoint` is `save` of one tensor of the same size: it hashes every
byte, uploads, and publishes by the ledger. The two take turns; the ratio is the median over rounds.

It also trains a small model while such a checkpoint is uploaded, and prints how long the steps take
meanwhile, and the longest of them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import trireme
from trireme.location import RemotePath
from trireme.remote.object_store import ObjectStore
from trireme.session.checkpoint import CheckpointData, save

MIB = 1 << 20
EVERY = 1000
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mebibytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--url")
    given = parser.parse_args()
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = given.url
        if url is None:
            os.environ.update(CREDENTIALS)
            os.environ["AWS_ENDPOINT_URL"] = stack.enter_context(sink())
            url = "s3://bucket/run"
        upload(url, scratch, given.mebibytes, given.rounds)
        train(f"{url}-training", given.mebibytes)


@contextmanager
def sink() -> Iterator[str]:
    """Runs the server; yields its URL."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.s3_sink"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()


def upload(url: str, scratch: Path, mebibytes: int, rounds: int) -> None:
    store = ObjectStore(RemotePath(url))
    file = scratch / "raw"
    tensor = torch.randint(0, 256, (mebibytes * MIB,), dtype=torch.uint8)
    file.write_bytes(tensor.numpy().data)
    names = {
        "raw": lambda: store.file_system.put_file(str(file), store.path("raw")),
        "checkpoint": lambda: save(url, CheckpointData(1, {"w": tensor})),
    }
    ratios = []
    for number in range(rounds + 1):
        speeds = {name: mebibytes / seconds(action) for name, action in names.items()}
        if number:  # the first round opens connections
            ratios.append(speeds["checkpoint"] / speeds["raw"])
            print("  ".join(f"{name} {speed:.0f} MiB/s" for name, speed in speeds.items()))
    print(f"checkpoint / raw: median {statistics.median(ratios):.2f} of {rounds} rounds")
    store.delete(["raw"])


def seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def train(url: str, mebibytes: int) -> None:
    """Prints the duration of steps while nothing is saved, and while a checkpoint is uploaded."""
    side = int((mebibytes * MIB / 8) ** 0.5)  # two matrices of it, of float32
    model = nn.Sequential(nn.Linear(side, 1, bias=False), Wide(side))
    data = TensorDataset(torch.randn(256, side), torch.randint(0, 2, (256,)))
    durations: dict[str, list[float]] = {}
    session = trireme.Session(
        model,
        nn.CrossEntropyLoss(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        run_dir=url,
        max_steps=6 * EVERY,
        checkpoint=trireme.Checkpoint(every_steps=EVERY, every_seconds=None),
        log_every=10_000,
    )
    with session:
        for batch in session.loader(data, batch_size=4):
            began = time.perf_counter()
            session.step(batch)
            duration, step = time.perf_counter() - began, session.global_step
            uploads = any(thread.name == "trireme-saver" for thread in threading.enumerate())
            what = "while a checkpoint is uploaded" if uploads else "while nothing is"
            if step % EVERY == 0:
                what = "with the copy of the state"
            if step > 10:  # the first ones are slow
                durations.setdefault(what, []).append(duration)
    for name, found in durations.items():
        print(
            f"steps {name}: median {statistics.median(found) * 1e3:.2f} ms, longest "
            f"{max(found) * 1e3:.1f} ms ({len(found)} steps)"
        )


class Wide(nn.Module):
    """Two large matrices of which a step reads little, so that the checkpoint is large."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.first = nn.Linear(1, 2)
        self.large = nn.Parameter(torch.zeros(2, side, side), requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.first(inputs)


if __name__ == "__main__":
    main()
