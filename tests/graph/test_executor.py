"""Graphs that several tasks compute together equal the model in one process."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graph.random_models import WIDTH, RandomModel, Step, models
from tests.graph.standing_group import StandingGroup, standing_group
from trireme.graph.capture import capture
from trireme.graph.cut import cut, together
from trireme.graph.executor import Executor, Microbatch

TASKS = 4


@pytest.fixture(scope="module")
def group() -> Iterator[StandingGroup]:
    with standing_group(TASKS) as made:
        yield made


def model_and_batches(
    steps: Sequence[Step], outputs: int, sizes: Sequence[int]
) -> tuple[RandomModel, list[tuple[torch.Tensor, torch.Tensor]]]:
    torch.manual_seed(3)
    model = RandomModel(steps, outputs)
    batches = [(torch.randn(size, WIDTH), torch.randn(size, WIDTH)) for size in sizes]
    return model, batches


def loss_of(outputs: Any) -> torch.Tensor:
    values = outputs.values() if isinstance(outputs, dict) else [outputs]
    return torch.stack([(value * (1 + place)).square().mean() for place, value in enumerate(values)]).sum()


def state_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    named = model.named_parameters()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def alone(steps: Sequence[Step], outputs: int, sizes: Sequence[int]) -> tuple[Any, ...]:
    """Returns outputs, gradients and state of one process that computes one batch after the other."""
    model, batches = model_and_batches(steps, outputs, sizes)
    found = []
    for batch in batches:
        value = model(*batch)
        loss = loss_of(value)
        if loss.requires_grad:
            loss.backward()
        found.append(value)
    return found, gradients_of(model), state_of(model)


def placed(
    rank: int, steps: Sequence[Step], outputs: int, sizes: Sequence[int], seed: int, tasks: int
) -> tuple[Any, ...] | None:
    """Computes the same by several tasks, with the graph placed at random, in one process of them."""
    if rank >= tasks:
        return None
    model, batches = model_and_batches(steps, outputs, sizes)
    graph = capture(model, batches[0], verify=False)
    rng = random.Random(seed)
    where = {
        node.name: rng.randrange(tasks)
        for node in graph.module.graph.nodes
        if node.op in ("call_function", "get_attr")
    }
    for names in together(graph.module):
        where.update(dict.fromkeys(names, where.get(names[0], 0)))
    parts = cut(graph.module, where, output_task=rng.randrange(tasks))
    microbatches = [Microbatch(batch, loss_of) for batch in batches]
    Executor(parts, rank, range(tasks)).run(microbatches)
    mine = {name for name, value in where.items() if value == rank}
    del mine
    outputs_here = [each.outputs for each in microbatches]
    return outputs_here, gradients_of(model), state_of(model)


@settings(max_examples=200, deadline=None)
@given(
    model=models(),
    sizes=st.lists(st.integers(2, 5), min_size=1, max_size=3),
    seed=st.integers(0, 1 << 30),
    tasks=st.integers(2, TASKS),
)
def test_any_graph_in_any_placement_equals_one_process(
    group: StandingGroup,
    model: tuple[tuple[Step, ...], int],
    sizes: list[int],
    seed: int,
    tasks: int,
) -> None:
    outputs, gradients, state = alone(*model, sizes)
    results = [each for each in group(placed, *model, sizes, seed, tasks) if each is not None]
    (found,) = [each[0] for each in results if each[0][0] is not None]
    torch.testing.assert_close(found, outputs, rtol=1e-6, atol=1e-6)
    for name, gradient in gradients.items():
        holders = [each[1][name] for each in results if name in each[1]]
        assert len(holders) <= 1, f"several tasks have a gradient of {name}"
        total = holders[0] if holders else torch.zeros_like(gradient)
        torch.testing.assert_close(total, gradient, rtol=1e-5, atol=1e-6, msg=name)
    torch.manual_seed(3)
    before = state_of(RandomModel(*model))
    for name, tensor in state.items():
        changed = [each[2][name] for each in results if not torch.equal(each[2][name], before[name])]
        assert len(changed) <= 1
        torch.testing.assert_close(changed[0] if changed else before[name], tensor)
