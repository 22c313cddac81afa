"""Graphs that several tasks compute together equal the model in one process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.graph.random_models import WIDTH, RandomModel, Step, models
from tests.graph.shipping import packed, unpacked
from tests.graph.standing_group import StandingGroup, standing_group
from trireme.graph.capture.capture import capture
from trireme.graph.capture.effects import Memory
from trireme.graph.execute.cut import cut
from trireme.graph.execute.executor import Executor, Microbatch
from trireme.graph.execute.node_groups import changed
from trireme.graph.execute.transfers import TaskDevice
from trireme.graph.place.costs import merged

TASKS = 4
EXAMPLES = 8
MANY_EXAMPLES = 400
CPU = torch.device("cpu")
OTHER_CPU = torch.device("cpu", 0)
"""Counts as another device: values between it and `CPU` are copied."""


@pytest.fixture(scope="module")
def group() -> Iterator[StandingGroup]:
    with standing_group(TASKS) as made:
        yield made


@dataclass(frozen=True)
class Case:
    """A random model, its micro-batches, and where it is computed.

    Attributes:
        steps, outputs: the arguments of `RandomModel`.
        sizes: the batch size of each micro-batch.
        places: the places.
        seed: of the placement.
    """

    steps: tuple[Step, ...]
    outputs: int
    sizes: tuple[int, ...]
    places: tuple[TaskDevice, ...]
    seed: int

    def model(self) -> RandomModel:
        torch.manual_seed(3)
        return RandomModel(self.steps, self.outputs).double()

    def batches(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        torch.manual_seed(4)
        both = [(torch.randn(size, WIDTH), torch.randn(size, WIDTH)) for size in self.sizes]
        return [(one.double(), other.double()) for one, other in both]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    steps, outputs = draw(models())
    sizes = draw(st.lists(st.integers(2, 5), min_size=1, max_size=3))
    tasks = draw(st.integers(2, TASKS))
    # Each task has a place; some have more, of the same or of another device.
    further = st.builds(TaskDevice, st.integers(0, tasks - 1), st.sampled_from([CPU, OTHER_CPU]))
    places = [
        *(TaskDevice(rank, CPU) for rank in range(tasks)),
        *draw(st.lists(further, max_size=2)),
    ]
    return Case(steps, outputs, tuple(sizes), tuple(places), draw(st.integers(0, 1 << 30)))


def loss_of(outputs: Any) -> torch.Tensor:
    values = outputs.values() if isinstance(outputs, dict) else [outputs]
    # The first of three outputs is not used.
    used = list(enumerate(values))[len(values) > 2 :]
    weighted = [(value * (1 + place)).square().mean() for place, value in used]
    return torch.stack(weighted).sum()


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    named = model.named_parameters()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def buffers_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.named_buffers()}


def alone(case: Case) -> tuple[Any, ...]:
    """Returns what one process computes, one micro-batch after the other."""
    model, outputs, losses = case.model(), [], []
    for batch in case.batches():
        value = model(*batch)
        loss = loss_of(value)
        if loss.requires_grad:
            loss.backward()
        outputs.append(value)
        losses.append(loss.detach())
    return outputs, losses, gradients_of(model), buffers_of(model)


def by_several(rank: int, case: Case, graph: bytes) -> tuple[Any, ...]:
    """Computes the same in one of several processes, with the graph placed at random."""
    model = case.model()
    module = unpacked(graph, model)
    rng, count = random.Random(case.seed), len(case.places)
    nodes = [each for each in module.graph.nodes if each.op in ("call_function", "get_attr")]
    where = {node.name: rng.randrange(count) for node in nodes}
    groups = changed(module.graph, Memory(module.graph, module))
    for names in merged([[node.name for node in nodes] for nodes in groups]):
        where.update(dict.fromkeys(names, where[min(names & where.keys(), default="")]))
    parts = cut(module, where, output_place=rng.randrange(count))
    microbatches = [Microbatch(batch, loss_of) for batch in case.batches()]
    Executor(parts, rank, case.places).run(microbatches)
    if any(each.outputs is None for each in microbatches):
        assert all(each.outputs is None for each in microbatches)
        found = None
    else:
        found = [each.outputs for each in microbatches], [each.value for each in microbatches]
    mine = {
        str(node.target)
        for node in module.graph.find_nodes(op="get_attr")
        if case.places[where[node.name]].rank == rank
    }
    return found, gradients_of(model), buffers_of(model), mine


@pytest.mark.thorough
@settings(max_examples=EXAMPLES, deadline=None, phases=set(Phase) - {Phase.shrink})
@given(case=cases())
def test_any_graph_in_any_placement_equals_one_process(group: StandingGroup, case: Case) -> None:
    check_that_tasks_equal_one_process(group, case)


@pytest.mark.slow
@settings(max_examples=MANY_EXAMPLES, deadline=None, phases=set(Phase) - {Phase.shrink})
@given(case=cases())
def test_many_graphs_in_any_placement_equal_one_process(group: StandingGroup, case: Case) -> None:
    check_that_tasks_equal_one_process(group, case)


def check_that_tasks_equal_one_process(group: StandingGroup, case: Case) -> None:
    """Fails if several tasks compute something else than one process, or another task does."""
    outputs, losses, gradients, buffers = alone(case)
    graph = packed(capture(case.model(), case.batches()[0], verify=False).module)
    results = group(by_several, case, graph)
    (found,) = [each[0] for each in results if each[0] is not None]
    torch.testing.assert_close(found[0], outputs, rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(found[1], losses, rtol=1e-6, atol=1e-12)
    before = buffers_of(case.model())
    for rank, (_, its_gradients, its_buffers, mine) in enumerate(results):
        assert set(its_gradients) <= mine, f"rank {rank} has gradients of others' parameters"
        for name in mine & set(gradients):
            torch.testing.assert_close(
                its_gradients[name], gradients[name], rtol=1e-5, atol=1e-12, msg=name
            )
        # Others have no effect on the loss.
        assert set(its_gradients) == mine & set(gradients)
        for name in before:
            expected = buffers[name] if name in mine else before[name]
            torch.testing.assert_close(its_buffers[name], expected, rtol=1e-6, atol=1e-12, msg=name)
    assert set().union(*(each[3] for each in results)) >= set(gradients)
