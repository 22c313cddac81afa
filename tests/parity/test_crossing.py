"""A checkpoint of any way to spread a model is one for any other: same values, same state."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.parity.plain import difference
from tests.parity.spread import (
    BATCH,
    OPTIMIZERS,
    STEPS,
    data_of,
    inputs_of,
    loss_of,
    model_of,
    train_plain,
)
from tests.process_groups import ProcessGroup, run_process_group
from trireme.graph.config import GraphConfig
from trireme.session.checkpoint import CheckpointData, latest, load
from trireme.session.options import Checkpoint
from trireme.session.session import Session

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

CASE, HALF = "transformer", STEPS // 2
WAYS = {
    "ps async, 2 servers": ProcessGroup(1, servers=2, strategy="async"),
    "ps sync over pp=2": ProcessGroup(2, servers=1, strategy="sync", mesh="pp=2", inside=2),
    "one process": ProcessGroup(),
    "allreduce": ProcessGroup(2, strategy="allreduce"),
    "fsdp": ProcessGroup(2, strategy="fsdp"),
    "tensor": ProcessGroup(2, strategy="tensor"),
    "pipeline": ProcessGroup(2, strategy="pipeline"),
    "fsdp=2,tp=2": ProcessGroup(mesh="fsdp=2,tp=2", inside=4),
    "ps sync over graph=2": ProcessGroup(2, servers=1, strategy="sync", mesh="graph=2", inside=2),
    "graph without the whole": ProcessGroup(2, strategy="graph"),
}
LEAN = "graph without the whole"
"""No process holds the whole model, so that checkpoints are streamed."""
REPLICAS = {
    "ps sync over pp=2": 2,
    "ps sync over graph=2": 2,
    "allreduce": 2,
    "fsdp": 2,
    "fsdp=2,tp=2": 2,
}
Arrays = dict[str, np.ndarray]


def train(replicas: int, steps: int, lean: bool = False) -> tuple[Arrays, Arrays, Arrays]:
    """Trains up to a step; returns values, optimizer's state and average as they were at first.

    Args:
        replicas: how many batches make a step.
        steps: the last one.
        lean: whether to give an example of a graph, and not a model but what builds it.
    """
    torch.use_deterministic_algorithms(True)
    example = inputs_of(CASE)[: BATCH // replicas] if lean else None
    session = Session(
        partial(model_of, CASE) if lean else model_of(CASE),
        loss_of,
        OPTIMIZERS["adam"],
        max_steps=steps,
        ema=0.9,
        checkpoint=Checkpoint(every_seconds=None),
        # Every other operation is elsewhere, so that both processes have parameters.
        graph=GraphConfig(algorithm="round-robin", example=example),
    )
    with session:
        assert session._setup.lean == lean
        state = session.worker.backend.snapshot(state=True)
        for batch in session.loader(data_of(CASE), BATCH // replicas, shuffle=False):
            session.step(batch)
    return _arrays(state.values), _arrays(state.optimizer), _arrays(state.average)


def _arrays(tensors: Mapping[str, torch.Tensor]) -> Arrays:
    return {name: tensor.numpy() for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the run directory of a way, trained half the way; trains when first asked for it."""

    @cache
    def written_by(way: str) -> Path:
        folder = tmp_path_factory.mktemp("written") / "run"
        process_group = replace(WAYS[way], run_dir=folder)
        _ = run_process_group(process_group, train, REPLICAS.get(way, 1), HALF, way == LEAN).values
        return folder

    return written_by


def crossings() -> list[Any]:
    """From one process into some ways, and back from two of them; slow, into all and back.

    What one process reads to the bit and what one process has written is the same whoever is on
    the other side: a checkpoint says nothing of who wrote it, as each case compares.
    """
    ways = list(WAYS)
    found = [("one process", way) for way in ("ps async, 2 servers", "fsdp=2,tp=2", LEAN)]
    found += [("ps sync over pp=2", "one process"), (LEAN, "one process")]
    more = [("one process", way) for way in ways] + [(way, "one process") for way in ways]
    more += [(way, way) for way in ways] + list(zip(ways, [*ways[1:], ways[0]], strict=True))
    slow = [pair for pair in dict.fromkeys(more) if pair not in found]
    return [*found, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in slow)]


@pytest.mark.slow(one_in=2)
@pytest.mark.thorough
@pytest.mark.parametrize(("writer", "reader"), crossings())
def test_resumed_under_another_way_everything_is_there_to_the_bit(
    writer: str, reader: str, written: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(written(writer), folder)
    saved = latest(folder, _fail)
    assert saved is not None and saved.step == HALF

    process_group = replace(WAYS[reader], run_dir=folder)
    values, state, average = run_process_group(
        process_group, train, REPLICAS.get(reader, 1), STEPS, reader == LEAN
    ).values[0]

    assert values.keys() == dict(model_of(CASE).named_parameters()).keys()
    assert _same(values, {name: saved.model[name] for name in values})
    assert _same(average, saved.average)
    if state:  # a worker's process that is not its leader does not see it
        assert _same(state, saved.optimizer)

    ended = latest(folder, _fail)
    assert ended is not None and ended.step == STEPS
    found = {name: ended.model[name] for name in values}
    assert difference(found, train_plain(CASE, "adam")) <= 1e-2
    # It has the form of what the writer saved, and so does not say who wrote it.
    assert _form(ended) == _form(saved)
    assert load(_newest(folder)).step == STEPS


def _fail(path: Path, error: Exception) -> Any:
    raise AssertionError(f"{path}: {error}")


def _same(arrays: Arrays, tensors: Mapping[str, torch.Tensor]) -> bool:
    assert arrays.keys() == tensors.keys()
    return all(np.array_equal(arrays[name], tensors[name].numpy()) for name in arrays)


def _newest(folder: Path) -> Path:
    return max((folder / "checkpoints").iterdir())


def _form(saved: CheckpointData) -> dict[str, dict[str, tuple[torch.Size, torch.dtype]]]:
    """Returns the names, the shapes and the types of a checkpoint's tensors."""
    parts = {"model": saved.model, "average": saved.average, "optimizer": saved.optimizer}
    return {
        part: {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        for part, tensors in parts.items()
    }


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_that_follows_none_does_not_say_who_wrote_it(
    way: str, written: Callable[[str], Path]
) -> None:
    """Its tensors have the names, the shapes and the types that one process gives them.

    The test above compares those that each way writes after it has read one.
    """
    saved = load(_newest(written(way)))
    assert saved.step == HALF
    assert _form(saved) == _form(load(_newest(written("one process"))))
