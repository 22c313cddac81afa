"""Assembles what a worker trains, and what computes it, from a program's model and the launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from trireme.launch.environment import check_not_left
from trireme.ps.flat import FlatModel
from trireme.session.backends.together import together
from trireme.session.loss import Loss
from trireme.session.metric_value import Metric
from trireme.session.model.building import Optimizers, build_optimizer, device_of
from trireme.session.model.computation import Computation
from trireme.session.model.extension import extension_layers, extension_of
from trireme.session.model.trained import named_groups
from trireme.session.model.training_setup import TrainingSetup
from trireme.session.settings import Settings


def assemble(
    settings: Settings,
    make_model: Callable[[], nn.Module],
    make_optimizer: Optimizers,
    *,
    in_place: bool = False,
    device: torch.device | None = None,
    given: nn.Module | Callable[[], nn.Module] | None = None,
) -> TrainingSetup:
    """Assembles the model and the optimizer; joins the process group where there is one."""
    task = settings.task
    check_not_left(task)  # before other processes are waited for
    if task.threads is not None:
        torch.set_num_threads(task.threads)
    if not settings.backend or task.dry_run:
        model = make_model()
        for layer in extension_layers(model).values():
            layer.check_job(model, settings)
        optimizer = build_optimizer(make_optimizer, model)
        flat = FlatModel(
            named_groups(model, optimizer),
            servers=max(task.servers, 1),
            shared=task.servers > 0,
            staged=settings.prefetches,
        )
        extension = extension_of(model, optimizer)
        return TrainingSetup(settings, model, optimizer, flat, extension=extension)
    here = device or device_of(settings) or torch.device("cpu")
    return together(settings).assemble(
        settings, here, make_model, make_optimizer, in_place=in_place, given=given
    )


def computations_of(
    setup: TrainingSetup, loss: Loss, metrics: Mapping[str, Metric]
) -> tuple[Computation, Computation]:
    """Returns the replica that computes gradients, and one that computes with the whole model."""
    task, group = setup.settings.task, setup.process_group
    if not setup.settings.backend or (task.dry_run and task.draw is None):
        replica = Computation(setup.model, loss, setup.flat, setup.settings.options, metrics)
        return replica, replica
    try:
        return together(setup.settings).computations(setup, loss, metrics)
    except BaseException:
        if group is not None:
            group.close(together=False)
        raise
