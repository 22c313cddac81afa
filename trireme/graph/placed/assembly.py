"""The assembly and the replica of a model that is placed as a dataflow graph."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from trireme.errors import ConfigurationError
from trireme.graph.capture.rehearsal import restored_state
from trireme.graph.config import GraphConfig, graph_config
from trireme.graph.placed.division import divides
from trireme.graph.placed.drawing_computation import DrawingComputation
from trireme.graph.placed.graph_decision import Decider, Example
from trireme.graph.placed.graph_execution import GraphExecution, Piece
from trireme.graph.placed.graph_part import GraphPart
from trireme.parallel.assembly import Parallel, ProcessGroupComputation
from trireme.parallel.construction.deferred import Deferred, deferred
from trireme.parallel.model_part import MeshPart
from trireme.parallel.processes.process_group import TorchProcessGroup
from trireme.session.loss import Loss, scalar
from trireme.session.metric_value import Metric
from trireme.session.model.batch import arguments, examples_in, examples_of, pieces
from trireme.session.model.building import seed_model
from trireme.session.model.computation import Computation
from trireme.session.model.reducer import Reducer
from trireme.session.model.training_setup import TrainingSetup
from trireme.session.options import Options
from trireme.session.result import StepResult
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
        if isinstance(given, nn.Module):
            _log.warning(
                "every process holds the whole model, also the parts of others: give the session a "
                "function that builds it, and not the model"
            )
            return None
        seed_model(settings)
        try:
            found = deferred(given)
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

    def sees_whole_batches(self, settings: Settings) -> bool:
        return False

    def ready(self, settings: Settings, part: MeshPart, point_again: Callable[[], None]) -> None:
        assert isinstance(part, GraphPart)
        if not settings.task.servers:  # other processes hold parts of it after the first batch
            part.on_placed = point_again
        if part.lean:
            part.graph(partial(_example_of, graph_config(settings)), early=True)

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


def _example_of(graph: GraphConfig, count: int) -> Example:
    """Returns a micro-batch of the example of a graph's configuration."""
    size = examples_in(graph.example)
    piece, _ = next(pieces(graph.example, min(count, size)))
    return Example(*arguments(piece))


class GraphComputation(ProcessGroupComputation):
    """Computes this process's operations of a dataflow graph.

    All processes know the loss; the one that receives the model's outputs has them.
    """

    def __init__(
        self,
        part: GraphPart,
        loss: Loss,
        options: Options,
        metrics: Mapping[str, Metric],
        reducer: Reducer,
    ) -> None:
        if options.accumulate > 1:
            raise ConfigurationError(
                f"accumulate={options.accumulate} with a graph: micro-batches do that already; "
                f"use --microbatches {options.accumulate}"
            )
        if options.precision != "float32":
            raise ConfigurationError(
                f"precision={options.precision!r} with a graph: it computes in the precision of "
                "the model; convert the model, or take another strategy"
            )
        super().__init__(part.modules[0], loss, part, options, metrics, reducer)
        self._reducer: Reducer = reducer
        self._part = part
        part.rehearsing = lambda: restored_state(self._loss)
        self._whole = False
        self.pipeline: GraphExecution = GraphExecution(
            part.process_group, part, lambda outputs, targets: scalar(self._loss(outputs, targets))
        )

    def _compute(self, batch: tuple[Any, Any]) -> StepResult:
        def split(count: int) -> list[Piece]:
            return [
                (arguments(inputs), targets, size)
                for (inputs, targets), size in pieces(batch, min(count, examples), examples)
            ]

        examples = examples_of(*batch)
        if not examples:
            raise ConfigurationError(
                f"rank {self._part.process_group.rank} was given a batch without examples: leave "
                "such batches out, or make batches large enough for all replicas"
            )

        def divided(count: int) -> bool:
            # Without the whole model nothing can be compared.
            return not self._part.lean and divides(self.model, self._loss, batch, count)

        graph = self.pipeline.prepare(split, divided)
        weight = self._weight(self._data, None, batch[1], examples)
        share = self._reducer.scale_factor(self._counted(weight))()
        count = 1 if self._whole else graph.decision.pieces
        (whole,) = split(1)
        loss, outputs, same = self.pipeline.step(graph, split(count), whole[1], share)
        if not same:
            if self._part.process_group.is_chief:
                self._part.warn(
                    f"the loss of this batch is not the mean of its {count} micro-batches' losses, "
                    "as it was for the first batch (are there targets that it ignores?): this step "
                    "and all others are computed in one micro-batch; say --microbatches 1 from the "
                    "start"
                )
            self._whole = True
            self.flat.zero_gradients()
            loss, outputs, _ = self.pipeline.step(graph, [whole], whole[1], share)
        return StepResult(loss, list(outputs), self._metrics, examples, weight=weight)

    def _evaluated(self, inputs: Any, targets: Any) -> tuple[torch.Tensor, Any] | None:
        piece: Piece = (arguments(inputs), targets, examples_of(inputs, targets))
        with torch.inference_mode(False), torch.no_grad():  # the graph may have to be captured
            outputs = self.pipeline.outputs(
                self.pipeline.prepare(lambda count: [piece], lambda count: False), piece
            )
            return (
                None if outputs is None else (scalar(self._loss(outputs[0], targets)), outputs[0])
            )

    def _united(self, totals: dict[str, float]) -> dict[str, float]:
        return dict(zip(totals, self.pipeline.total(list(totals.values())), strict=True))
