"""Prints how far every way to spread a model ends from one plain process.

The largest difference between two parameters after twenty steps of SGD with momentum on the same
batches, in float32. Says so, with status 1, where one is too far. A way that a model cannot be
spread in, and that says so, is `refused`, with the reason below the table.
"""

from __future__ import annotations

import sys
import time

import torch

from tests.parity.plain import difference
from tests.parity.spread import (
    ABSENT,
    BATCH,
    CASES,
    HAS_TRANSFORMERS,
    TIED,
    TRANSFORMERS,
    train_plain,
    train_spread,
)
from tests.parity.ways import REPLICAS, WAYS
from tests.process_groups import ProcessGroupRan, run_process_group

LIMIT = 1e-4
STEPS = 20


def main() -> int:
    began = time.monotonic()
    torch.set_num_threads(1)
    cases = [*CASES, *TIED, *ABSENT, *(TRANSFORMERS if HAS_TRANSFORMERS else ())]
    if not HAS_TRANSFORMERS:
        print(f"NOT COMPARED: {', '.join(TRANSFORMERS)}: pip install 'transformers>=5'")
    wanted = {case: train_plain(case, steps=STEPS) for case in cases}
    width = max(map(len, WAYS))
    print(f"largest parameter difference from one plain process after {STEPS} steps of {BATCH}")
    print(" ".join(f"{title:>{width}}" for title in ("", *cases)), flush=True)
    found: list[float] = []
    refusals: dict[str, list[str]] = {}
    options = {"max_steps": STEPS}
    for way, process_group in WAYS.items():
        replicas = REPLICAS.get(way, 1)
        print(f"{way:>{width}}", end="", flush=True)
        for case, values in wanted.items():
            ran = run_process_group(process_group, train_spread, case, replicas, "", options)
            if (reason := refusal(ran)) is not None:
                refusals.setdefault(reason, []).append(f"{case} by {way}")
                print(f" {'refused':>{width}}", end="", flush=True)
                continue
            far = max(
                difference({n: torch.from_numpy(v) for n, v in one.items()}, values)
                for one in ran.values
            )
            found.append(far)
            print(f" {far:>{width}.1e}", end="", flush=True)
        print(flush=True)
    for reason, cells in refusals.items():
        print(f"refused: {', '.join(cells)}: {reason}")
    close = sum(far <= 1e-6 for far in found)
    seconds = time.monotonic() - began
    print(
        f"{len(found)} cells in {seconds:.0f} s: the farthest {max(found):.1e} "
        f"(at most {LIMIT:.0e}), {close} at most 1e-06; "
        f"{sum(map(len, refusals.values()))} refused by name"
    )
    return 0 if max(found) <= LIMIT else 1


def refusal(ran: ProcessGroupRan) -> str | None:
    """Returns in what words the processes refused to begin; None where one of them trained."""
    if ran.returned or not ran.raised:
        return None
    last = [text.strip().splitlines()[-1] for text in ran.raised.values()]
    name = "trireme.errors.ConfigurationError: "
    said = [line.removeprefix(name) for line in last if line.startswith(name)]
    return said[0] if said else None


if __name__ == "__main__":
    sys.exit(main())
