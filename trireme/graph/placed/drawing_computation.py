"""Draws the graph of a model in place of its first step, for `trireme graph`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trireme.graph.config import graph_config
from trireme.graph.drawing.text import text
from trireme.graph.place.costs import Device, Hardware, Link
from trireme.graph.placed.decision import Decider, Example, captured_graph, plain_inputs
from trireme.launch.config.task_config import DRAWN
from trireme.session.loss import Loss, model_loss
from trireme.session.metric_value import Metric
from trireme.session.model.batch import arguments, examples_in, inputs_and_targets, pieces
from trireme.session.model.computation import Computation
from trireme.session.model.training_setup import TrainingSetup
from trireme.session.result import StepResult

ASSUMED = Link(latency_seconds=100e-6, bytes_per_second=1e9)
"""The link between two tasks, of which only one is there to draw."""


class DrawingComputation(Computation):
    """Captures, places and cuts the model with the first batch, and ends the program."""

    def __init__(self, setup: TrainingSetup, loss: Loss, metrics: Mapping[str, Metric]) -> None:
        super().__init__(setup.model, loss, setup.flat, setup.settings.options, metrics)
        self._setup = setup

    def backward(self, batch: Any) -> StepResult:
        """Draws the graph."""
        setup, task = self._setup, self._setup.settings.task
        workers, config = task.draw, graph_config(setup.settings)
        assert workers is not None
        given = inputs_and_targets(batch, keep_targets=self._loss is model_loss)
        (inputs, targets), _ = next(pieces(given, min(config.pieces, examples_in(given))))
        args, kwargs = arguments(inputs)
        example = Example(args, kwargs, self._loss, targets)
        names = [f"worker:{number}/{setup.flat.device}" for number in range(workers)]
        hardware = Hardware(
            tuple(Device(name, memory_bytes=config.memory_bytes) for name in names), ASSUMED
        )
        decider = Decider.of(config, setup.optimizer, task.servers)
        captured = captured_graph(setup.model, *plain_inputs(args, kwargs))
        decision, picture = decider.decide(
            captured, setup.model, example, hardware=hardware, homes={}
        )
        print(text(picture))
        for line in decision.warnings:
            print(f"warning: {line}")
        if workers > 1:
            print(
                f"\nlinks between tasks are assumed: {1e6 * ASSUMED.latency_seconds:.0f} us, "
                f"{ASSUMED.bytes_per_second / 1e9:.0f} GB/s; a job measures them"
            )
        raise SystemExit(DRAWN)
