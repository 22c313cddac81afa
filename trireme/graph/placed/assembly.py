"""The assembly and the replica of a model that is placed as a dataflow graph."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from trireme.errors import ConfigurationError
from trireme.graph.config import graph_config
from trireme.graph.placed.decision import Decider, Example
from trireme.graph.placed.drawing_computation import DrawingComputation
from trireme.graph.placed.graph_execution import GraphExecution, Piece
from trireme.graph.placed.graph_part import GraphPart
from trireme.parallel.assembly import Parallel, ProcessGroupComputation
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

    def lean_model(
        self, settings: Settings, given: nn.Module | Callable[[], nn.Module]
    ) -> nn.Module | None:
        """Returns a session's model on the CPU, if it is placed, and divided, before it trains.

        That is the case with an example, without parameter servers, if the program gives a function
        that builds the model.
        """
        if graph_config(settings).example is None or settings.task.servers:
            return None
        if isinstance(given, nn.Module):
            _log.warning(
                "every process keeps the whole model, also the parts of others: give the session a "
                "function that builds it, not the model"
            )
            return None
        seed_model(settings)
        return given().train()

    def part(
        self,
        settings: Settings,
        process_group: TorchProcessGroup,
        whole: nn.Module,
        optimizer: torch.optim.Optimizer,
        cut: nn.Module | None,
    ) -> MeshPart:
        graph = graph_config(settings)
        decider = Decider.of(graph, optimizer, settings.task.servers)
        return GraphPart(process_group, whole, graph, decider, cut)

    def ready(self, settings: Settings, part: MeshPart) -> None:
        assert isinstance(part, GraphPart)
        if part.lean:
            inputs = graph_config(settings).example
            piece, _ = next(pieces(inputs, min(part.microbatches, examples_in(inputs))))
            part.graph(Example(*arguments(piece)), nullcontext(), early=True)

    def sees_whole_batches(self, settings: Settings) -> bool:
        return False

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
        self.pipeline: GraphExecution = GraphExecution(
            part.process_group, part, lambda outputs, targets: scalar(self._loss(outputs, targets))
        )

    def _compute(self, batch: tuple[Any, Any]) -> StepResult:
        examples = examples_of(*batch)
        if not examples:
            raise ConfigurationError(
                f"rank {self._part.process_group.rank} was given a batch without examples: leave "
                "such batches out, or make batches large enough for all replicas"
            )
        split: list[Piece] = [
            (arguments(inputs), targets, size)
            for (inputs, targets), size in pieces(
                batch, min(self._part.microbatches, examples), examples
            )
        ]
        graph = self.pipeline.prepare(split, self._loss)
        weight = self._weight(self._data, None, batch[1], examples)
        share = self._reducer.scale_factor(self._counted(weight))()
        loss, outputs = self.pipeline.step(graph, split, share)
        return StepResult(loss, list(outputs), self._metrics, examples, weight=weight)

    def _evaluated(self, inputs: Any, targets: Any) -> tuple[torch.Tensor, Any] | None:
        piece: Piece = (arguments(inputs), targets, examples_of(inputs, targets))
        with torch.inference_mode(False), torch.no_grad():  # the graph may have to be captured
            outputs = self.pipeline.outputs(self.pipeline.prepare([piece], self._loss), piece)
            if outputs is None:
                return None
            return scalar(self._loss(outputs[0], targets)), outputs[0]

    def _united(self, totals: dict[str, float]) -> dict[str, float]:
        return dict(zip(totals, self.pipeline.total(list(totals.values())), strict=True))
