"""How long it takes to place graphs on four devices: `python -m benchmarks.placement_time`.

Three graphs of as many operations as the argument says (5,000 by default): a chain with skips,
repeated branches, and operations that read two random earlier ones. Prints a line for each.
"""

from __future__ import annotations

import argparse
import random
import time

from trireme.graph.place.costs import CostGraph, Device, Hardware, Link, Operation
from trireme.graph.place.placement import place

HARDWARE = Hardware(
    tuple(Device(f"device{number}", memory_bytes=10**11) for number in range(4)), Link(2e-5, 1e10)
)


def _graph(inputs: list[list[int]]) -> CostGraph:
    numbers = random.Random(0)
    return CostGraph(
        tuple(
            Operation(
                f"o{place}",
                tuple(f"o{each}" for each in read),
                forward_seconds=numbers.choice((1e-6, 1e-5, 1e-3)),
                backward_seconds=numbers.choice((1e-6, 2e-5, 2e-3)),
                resident_bytes=numbers.choice((0, 0, 10**6)),
                activation_bytes=10**5,
                output_bytes=10**5,
            )
            for place, read in enumerate(inputs)
        )
    )


def skips(count: int) -> CostGraph:
    """A chain; every tenth operation reads also the one ten before it, as in residual networks."""
    return _graph(
        [
            [each - 1] * (each > 0) + [each - 10] * (each > 9 and each % 10 == 0)
            for each in range(count)
        ]
    )


def branches(count: int) -> CostGraph:
    """Blocks of four chains of six operations between two operations."""
    inputs: list[list[int]] = [[]]
    while len(inputs) < count:
        fork, ends = len(inputs) - 1, list[int]()
        for _ in range(4):
            last = fork
            for _ in range(6):
                inputs.append([last])
                last = len(inputs) - 1
            ends.append(last)
        inputs.append(ends)
    return _graph(inputs[:count])


def tangle(count: int) -> CostGraph:
    """Every operation reads two of the fifty before it."""
    numbers = random.Random(1)
    return _graph(
        [
            sorted({numbers.randrange(max(0, each - 50), each) for _ in range(2)}) if each else []
            for each in range(count)
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("operations", nargs="?", type=int, default=5000)
    parser.add_argument("--micro-batches", type=int, default=1)
    options = parser.parse_args()
    for make in (skips, branches, tangle):
        graph = make(options.operations)
        alone = sum(each.forward_seconds + each.backward_seconds for each in graph.operations)
        began = time.process_time()
        placement = place(graph, HARDWARE, micro_batches=options.micro_batches)
        seconds = time.process_time() - began
        share = placement.prediction.step_seconds / (alone * options.micro_batches)
        print(
            f"{make.__name__}: {len(graph.operations)} operations in {seconds:.2f} s of processor "
            f"time; a step takes {share:.2f} of one device's ({placement.algorithm})"
        )


if __name__ == "__main__":
    main()
