"""The values of one consistent step in the whole model: for evaluation, and after training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from trireme.ps.module_names import named_buffers
from trireme.session.training_setup import TrainingSetup
from trireme.session.worker import Worker

__all__ = ["adopt_final_values", "consistent_values"]


@contextmanager
def consistent_values(worker: Worker) -> Iterator[None]:
    """Puts the values of one step, or their moving average, into the model during the block.

    The mean of the workers' buffers goes into the model too. Without servers, a process that holds
    the whole model has the values of one step already.

    Args:
        worker: provides the model and the values.
    """
    setup = worker.setup
    alone = setup.settings.task.servers == 0 and setup.part is None
    if alone and setup.settings.options.ema is None:
        yield
        return
    state = worker.backend.snapshot(state=False)
    means = worker.buffers.average()
    own_values = {name: p.detach().clone() for name, p in setup.flat.parameters.items()}
    own_buffers = {name: b.clone() for name, b in named_buffers(setup.model) if name in means}
    _put(setup, state.average or state.values, means)
    try:
        yield
    finally:
        _put(setup, own_values, own_buffers)


def adopt_final_values(worker: Worker) -> None:
    """Copies the final values into the whole model, where processes have trained parts of it."""
    values = worker.backend.snapshot(state=False).values
    _put(worker.setup, values, worker.buffers.average())


@torch.no_grad()
def _put(
    setup: TrainingSetup, values: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]
) -> None:
    """Copies values into the parameters, and the given buffers into those of the model."""
    for name, parameter in setup.flat.parameters.items():
        parameter.copy_(values[name])
    for name, buffer in named_buffers(setup.model):
        if name in buffers:
            buffer.copy_(buffers[name])
