"""The assembly and the replica of a model that is placed as a dataflow graph."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch
from torch import nn

from trireme.errors import ConfigurationError
from trireme.graph.config import graph_config
from trireme.graph.placed.decision import Decider, Example
from trireme.graph.placed.drawing_computation import DrawingComputation
from trireme.graph.placed.graph_computation import GraphComputation
from trireme.graph.placed.graph_part import GraphPart
from trireme.parallel.assembly import Parallel
from trireme.parallel.deferred import Deferred
from trireme.parallel.model_part import MeshPart
from trireme.parallel.processes.process_group import TorchProcessGroup
from trireme.session.loss import Loss
from trireme.session.metric_value import Metric
from trireme.session.model.batch import arguments, examples_in, pieces
from trireme.session.model.building import seed_model
from trireme.session.model.computation import Computation
from trireme.session.model.training_setup import TrainingSetup
from trireme.session.settings import Settings

_log = logging.getLogger(__name__)


class Placed(Parallel):
    """Processes that hold one model as a dataflow graph, in one or several replicas."""

    def deferred(
        self, settings: Settings, given: nn.Module | Callable[[], nn.Module]
    ) -> Deferred | None:
        """Returns a session's model without memory for its parameters, if it can be placed so.

        That is the case with an example, without parameter servers, if the program gives a function
        that builds the model. Values follow from the seed, as where each process builds it.
        """
        if graph_config(settings).example is None or settings.task.servers:
            return None
        try:
            if isinstance(given, nn.Module):
                raise ConfigurationError(
                    "give the session a function that builds it, not the model"
                )
            found = Deferred(given, lambda: seed_model(settings))
        except ConfigurationError as error:
            _log.warning(
                "every process builds the whole model, also the parts of others: %s", error
            )
            return None
        found.model.train()
        return found

    def part(
        self,
        settings: Settings,
        process_group: TorchProcessGroup,
        whole: nn.Module,
        optimizer: torch.optim.Optimizer,
        deferred: Deferred | None,
        cut: nn.Module | None,
    ) -> MeshPart:
        graph = graph_config(settings)
        decider = Decider.of(graph, optimizer, settings.task.servers)
        return GraphPart(process_group, whole, graph, decider, deferred)

    def ready(self, settings: Settings, part: MeshPart) -> None:
        assert isinstance(part, GraphPart)
        if part.lean:
            inputs = graph_config(settings).example
            piece, _ = next(pieces(inputs, min(part.microbatches, examples_in(inputs))))
            part.graph(Example(*arguments(piece)), early=True)

    def computations(
        self, setup: TrainingSetup, loss: Loss, metrics: Mapping[str, Metric]
    ) -> tuple[Computation, Computation]:
        options, part = setup.settings.options, setup.part
        if setup.settings.task.draw is not None:
            drawing = DrawingComputation(setup, loss, metrics)
            return drawing, drawing
        assert isinstance(part, GraphPart) and setup.reducer is not None
        graph = GraphComputation(part, loss, options, metrics, setup.reducer)
        if part.lean:
            return graph, graph
        return graph, Computation(setup.model, loss, setup.flat, options, metrics)
