"""A model as a dataflow graph, spread over tasks, trains to what one plain process trains to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parity.plain import Values, difference
from tests.parity.spread import (
    ABSENT,
    CASES,
    CIFAR,
    HAS_TRANSFORMERS,
    TIED,
    train_plain,
    train_spread,
)
from tests.process_groups import ProcessGroup, run_process_group
from trireme.graph.config import GraphConfig

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

CLOSE = 1e-5

SCATTERED = GraphConfig(algorithm="round-robin")
"""Neighbours are on different tasks: nearly every value is sent."""


def trained(process_group: ProcessGroup, case: str, replicas: int, **options: Any) -> list[Values]:
    """What each process ends with."""
    ran = run_process_group(process_group, train_spread, case, replicas, "", options)
    return [{n: torch.from_numpy(v) for n, v in values.items()} for values in ran.values]


@pytest.mark.slow(but=("MLP", "unused", "tied weights"))
@pytest.mark.thorough(but=("MLP", "unused"))
@pytest.mark.parametrize("case", [*CASES, *CIFAR, *TIED, *ABSENT, "batch normalization"])
def test_a_scattered_graph_equals_one_process(case: str) -> None:
    wanted = train_plain(case)
    pieces = 1 if case == "batch normalization" else 3
    spread = ProcessGroup(3, strategy="graph", microbatches=pieces)
    for values in trained(spread, case, 1, graph=SCATTERED):
        assert difference(values, wanted) <= CLOSE


@pytest.mark.thorough
def test_the_cifar_network_placed_automatically_equals_one_process() -> None:
    wanted = train_plain("CIFAR network")
    for values in trained(ProcessGroup(2, strategy="graph"), "CIFAR network", 1):
        assert difference(values, wanted) <= CLOSE


@pytest.mark.thorough
def test_two_replicas_of_two_tasks_each_equal_one_process() -> None:
    wanted = train_plain("MLP")
    spread = ProcessGroup(mesh="dp=2,graph=2", inside=4)
    for values in trained(spread, "MLP", 2, graph=SCATTERED):
        assert difference(values, wanted) <= CLOSE


@pytest.mark.skipif(not HAS_TRANSFORMERS, reason="pip install 'transformers>=5'")
@pytest.mark.parametrize("case", ["BERT", "GPT-2"])
def test_models_of_transformers(case: str) -> None:
    wanted = train_plain(case)
    spread = ProcessGroup(2, strategy="graph")
    for values in trained(spread, case, 1, graph=SCATTERED):
        assert difference(values, wanted) <= CLOSE
