"""Prints how far every way to spread a model ends from one plain process.

The largest difference between two parameters after twenty steps of SGD with momentum on the same
batches, in float32. Says so, with status 1, where one is too far.
"""

from __future__ import annotations

import sys
import time

import torch

from tests.gangs import run_gang
from tests.parity.plain import difference
from tests.parity.spread import BATCH, CASES, STEPS, train_plain, train_spread
from tests.parity.ways import REPLICAS, WAYS

LIMIT = 1e-4


def main() -> int:
    began = time.monotonic()
    torch.set_num_threads(1)
    wanted = {case: train_plain(case) for case in CASES}
    width = max(map(len, WAYS))
    print(f"largest parameter difference from one plain process after {STEPS} steps of {BATCH}")
    print(" ".join(f"{title:>{width}}" for title in ("", *CASES)), flush=True)
    found: list[float] = []
    for way, gang in WAYS.items():
        print(f"{way:>{width}}", end="", flush=True)
        for case, values in wanted.items():
            ran = run_gang(gang, train_spread, case, REPLICAS.get(way, 1))
            far = max(
                difference({n: torch.from_numpy(v) for n, v in one.items()}, values)
                for one in ran.values
            )
            found.append(far)
            print(f" {far:>{width}.1e}", end="", flush=True)
        print(flush=True)
    close = sum(far <= 1e-6 for far in found)
    seconds = time.monotonic() - began
    print(
        f"{len(found)} cells in {seconds:.0f} s: the farthest {max(found):.1e} "
        f"(at most {LIMIT:.0e}), {close} at most 1e-06"
    )
    return 0 if max(found) <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
