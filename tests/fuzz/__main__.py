"""Feeds damaged frames, handshakes and checkpoints to what reads them.

    python -m tests.fuzz                                     make fuzz does this
    python -m tests.fuzz --seed 7 --frames 1000000 --handshakes 0 --checkpoints 0

Nothing may crash, hang, grow, or be accepted that should not be. What each fuzzer checks stands
at the top of its module. The seed is printed; the same seed and counts give the same cases, but
for the random numbers that handshakes draw themselves.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.fuzz import frames, handshakes
from tests.fuzz.checkpoints import MEMORY, CheckpointFuzzer
from tests.fuzz.run import Broken, run_cases

say = partial(print, flush=True)


def main() -> int:
    """Returns 0 if all went well, 1 if a case did what it may not do."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--handshakes", type=int, default=100_000)
    parser.add_argument("--checkpoints", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = random.randrange(1 << 31) if options.seed is None else options.seed
    say(f"seed {seed}")
    memory = MEMORY if MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="trireme-fuzz-", dir=memory) as directory:
        fuzzers: dict[str, tuple[Callable[[random.Random], str], int]] = {
            "frames": (frames.run_case, options.frames),
            "handshakes": (handshakes.run_case, options.handshakes),
            "checkpoints": (CheckpointFuzzer(Path(directory)).run_case, options.checkpoints),
        }
        try:
            for name, (case, count) in fuzzers.items():
                if count:
                    say("\n".join(run_cases(name, case, count, seed, say).lines()))
        except Broken as broken:
            say(f"BROKEN: {broken}\nseed {seed}")
            raise
    say(f"no crash, no hang, no memory growth, nothing accepted that should not be (seed {seed})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
