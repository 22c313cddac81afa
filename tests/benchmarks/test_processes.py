from __future__ import annotations

import random

from benchmarks.processes import free_ports


def test_processes_that_seed_random_alike_choose_different_ports() -> None:
    chosen = []
    for _ in range(2):
        random.seed(1)
        chosen.append(set(free_ports(3)))
    assert chosen[0] != chosen[1]
