"""Random bits change in small jobs that heal: `python -m tests.corruption.soak COUNT SEED`.

Each must be found within the steps between two checks, the task named must be the right one, and
the job must end with the values of the quiet run. It prints those of which that is not so.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.corruption.flips import Flip, Outcome, run

EVERY = (1, 2, 5)


def main(count: int, seed: int) -> int:
    """Changes so many bits; returns how many were not found, or healed, as they should be."""
    rng, began, bad = random.Random(seed), time.monotonic(), 0
    with TemporaryDirectory() as folder:
        quiet = run(None, run_dir=Path(folder) / "quiet", scheme="tcp").digests
        for number in range(count):
            flip, every = Flip.drawn(rng), rng.choice(EVERY)
            # Through memory that a worker lends no message goes that could change on its way.
            scheme = "tcp" if flip.place in ("push", "values") else rng.choice(("tcp", "shm"))
            run_dir = Path(folder) / str(number)
            outcome = run(flip, every=every, scheme=scheme, run_dir=run_dir)
            if wrong := problem(flip, every, outcome, quiet):
                bad += 1
                print(f"{flip}, every {every}, {scheme}: {wrong}", flush=True)
    print(f"{count} bits flipped in {time.monotonic() - began:.0f} s; bad: {bad}")
    return bad


def problem(flip: Flip, every: int, outcome: Outcome, quiet: set[str]) -> str:
    """Returns what is not as it should be; nothing where all is."""
    if outcome.failure or outcome.ran is None or outcome.ran.raised:
        return f"it failed: {outcome.failure or (outcome.ran and outcome.ran.raised)}"
    if not outcome.flipped:
        return "no bit changed"
    if not outcome.told:
        return "it was not found"
    late = outcome.told[0][0] - flip.step
    if late > every and flip.place != "checkpoint":
        return f"it was found {late} steps later"
    if flip.named not in outcome.told[0][1]:
        return f"another task is named: {outcome.told[0][1]}"
    if outcome.digests != quiet:
        return "it ended with other values"
    return ""


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])) > 0)
