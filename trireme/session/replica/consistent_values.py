"""The values of one consistent step in the whole model: for evaluation, and after training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trireme.ps.module_names import named_buffers
from trireme.session.replica.assembly import Assembly
from trireme.session.worker import Worker

__all__ = ["adopt_final_values", "consistent_values"]


@contextmanager
def consistent_values(assembly: Assembly, worker: Worker) -> Iterator[None]:
    """Puts the values of one step, or their moving average, into the model during the block.

    The mean of the workers' buffers goes into the model too. Without servers, a process that holds
    the whole model has the values of one step already.

    Args:
        assembly: the model.
        worker: provides the values.
    """
    alone = worker.task.servers == 0 and assembly.part is None
    if alone and worker.setup.options.ema is None:
        yield
        return
    flat, model = assembly.flat, assembly.model
    state = worker.backend.snapshot(state=False)
    chosen = state.average or state.values
    means = worker.buffers.average()
    own_values = [value.clone() for value in flat.values]
    own_buffers = {name: b.clone() for name, b in named_buffers(model) if name in means}
    with torch.no_grad():
        for name, parameter in flat.parameters.items():
            parameter.copy_(chosen[name])
        for name, buffer in named_buffers(model):
            if name in means:
                buffer.copy_(means[name])
    try:
        yield
    finally:
        with torch.no_grad():
            for value, before in zip(flat.values, own_values, strict=True):
                value.copy_(before)
            for name, buffer in named_buffers(model):
                if name in own_buffers:
                    buffer.copy_(own_buffers[name])


@torch.no_grad()
def adopt_final_values(assembly: Assembly, worker: Worker) -> None:
    """Copies the final values into the whole model, where processes have trained parts of it."""
    values = worker.backend.snapshot(state=False).values
    for name, parameter in assembly.flat.parameters.items():
        parameter.copy_(values[name])
    means = worker.buffers.average()
    for name, buffer in named_buffers(assembly.model):
        if name in means:
            buffer.copy_(means[name])
