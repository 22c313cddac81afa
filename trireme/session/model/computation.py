"""Computes the gradient of a batch into the model's flat buffers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from trireme.data.batch import Batch
from trireme.errors import ConfigurationError, NonFiniteError
from trireme.session.loss import Loss, model_loss, scalar
from trireme.session.metric_value import Metric, MetricValue
from trireme.session.model.batch import (
    arguments,
    counted_labels,
    examples_of,
    inputs_and_targets,
    move,
    pieces,
    weight_of,
)
from trireme.session.model.reducer import Reducer
from trireme.session.model.trained import Trained
from trireme.session.options import Options
from trireme.session.result import StepResult
from trireme.tensors import map_tensors, tensors_in, to_local

_OPERATOR = getattr(getattr(torch.ops.aten, "_backward", None), "default", None)
"""The operator that TorchScript compiles `backward()` to; None if this torch has none."""

Transform = Callable[[Any], Any]  # batch -> batch


class Computation:
    """Computes losses and gradients, and processes gradients before they are exchanged."""

    pipeline: Any = None  # the log of stages, or of operations of a dataflow graph, if any

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        flat: Trained,
        options: Options,
        metrics: Mapping[str, Metric],
        reducer: Reducer | None = None,
    ) -> None:
        self.model = model
        self.flat = flat
        self._loss = loss
        self._options = options
        self._metrics = metrics
        self._reducer = reducer or Reducer()
        self._moves = flat.device.type != "cpu"
        self._autocast = options.precision == "bfloat16"
        # A forward pass that is left out must leave no trace in running statistics either.
        self._kept = list(model.buffers()) if options.nan == "skip" else []
        self._stands_in = False  # whether the batch only takes part in a step of others
        self._data: Any = None  # the batch, as `weight=` takes it

    def backward(self, batch: Any) -> StepResult:
        """Computes the gradient of a batch's mean loss into the flat buffers."""
        options = self._options
        self.flat.zero_gradients()
        before = [buffer.clone() for buffer in self._kept] if self._kept else []
        data, self._stands_in = batch, False
        if type(batch) is Batch:
            data, self._stands_in = batch.data, not batch.spans
        # Nearly all batches are pairs: the fast path.
        if type(data) is tuple and len(data) == 2 and self._loss is not model_loss:
            pair = data
        else:
            pair = inputs_and_targets(data, keep_targets=self._loss is model_loss)
        self._data = data
        if self._moves:
            pair = move(pair[0], self.flat.device), move(pair[1], self.flat.device)
            self._data = None if options.weight is None else move(data, self.flat.device)
        result = self._compute(pair)
        self._reducer.finish()
        if options.l2:
            self._penalise()
        assert isinstance(result._loss, torch.Tensor)
        if options.nan != "ignore" and not math.isfinite(result._loss.item()):
            if options.nan != "skip":
                raise NonFiniteError(
                    f"the loss is {result.loss}: lower the learning rate, clip the gradient "
                    '(clip_norm=1.0), or leave such updates out (nan="skip"); the last checkpoint '
                    "is from before this update"
                )
            self.flat.zero_gradients()
            result.examples, result.weight = 0, 0.0
            with torch.no_grad():
                for buffer, value in zip(self._kept, before, strict=True):
                    buffer.copy_(value)
        if self._stands_in:
            result.examples, result.weight = 0, 0.0
        return result

    @property
    def weighs_examples(self) -> bool:
        """Whether the weight of a batch is the number of its examples."""
        return self._options.weight is None and self._loss is not model_loss

    def _counted(self, weight: float) -> float:
        return 0.0 if self._stands_in else weight

    def _weight(self, batch: Any, outputs: Any, targets: Any, examples: int) -> float:
        if self._options.weight is not None:
            return weight_of(self._options.weight, batch, outputs)
        labels = counted_labels(self.model, targets) if self._loss is model_loss else None
        return examples if labels is None else labels

    def _compute(self, batch: tuple[Any, Any]) -> StepResult:
        inputs, targets = batch
        plain = type(inputs) is torch.Tensor and inputs.dim()
        examples = inputs.shape[0] if plain else examples_of(inputs, targets)
        count, scale_factor = self._options.accumulate, self._reducer.scale_factor
        cut = [(batch, examples)] if count == 1 else list(pieces(batch, count, examples))
        own = self._options.weight is not None
        weights: list[float] = []
        if not own or count > 1:  # the numbers are exchanged while forward runs
            data = [piece for piece, _ in pieces(self._data, count, examples)] if own else []
            for (piece, size), mine in zip_longest(cut, data):
                weights.append(self._weight(mine, None, piece[1], size))
            factor = scale_factor(self._counted(sum(weights)))
        loss, outputs = torch.zeros(()), list[tuple[object, object]]()
        for number, ((inputs, targets), _) in enumerate(cut):
            part_loss, out = self._forward(inputs, targets)
            if not weights:
                weights.append(self._weight(self._data, _detached(out), targets, examples))
                factor = scale_factor(self._counted(weights[0]))
            if number == 0:
                share = factor()
            if number + 1 == len(cut):
                self._reducer.begin()
            if not weights[number]:
                _backward(self._nothing(out))
            else:
                part = weights[number] / sum(weights)
                scale = share * part
                _backward(part_loss if scale == 1.0 else part_loss * scale)
                mean = part_loss.detach()
                loss = mean if part == 1.0 else loss.to(mean) + mean * part
            outputs.append((_detached(out), targets))
        return StepResult(loss, outputs, self._metrics, examples, weight=sum(weights))

    def _nothing(self, outputs: Any) -> torch.Tensor:
        """Returns a loss of 0 with gradients of 0: the mean over nothing is not a number."""
        live = [each for each in tensors_in(outputs) if each.requires_grad and each.dim()]
        live = live or [each for each in self.flat.parameters.values() if each.requires_grad]
        return torch.stack([each.sum() * 0.0 for each in live]).sum()

    def forward(self, inputs: Any, targets: Any) -> tuple[torch.Tensor, Any]:
        loss, outputs = self._forward(inputs, targets)
        return loss, _detached(outputs)

    def _forward(self, inputs: Any, targets: Any) -> tuple[torch.Tensor, Any]:
        if self._autocast:
            with torch.autocast(self.flat.device.type, torch.bfloat16):
                outputs = _call(self.model, inputs)
                loss = self._loss(outputs, targets)
        else:
            plain = type(inputs) is torch.Tensor
            outputs = self.model(inputs) if plain else _call(self.model, inputs)
            loss = self._loss(outputs, targets)
        return scalar(loss), outputs

    def evaluate(
        self, batches: Iterable[Any], *, transform: Transform | None = None
    ) -> dict[str, float]:
        """Returns the mean of the loss and the value of each metric over the examples of batches.

        The model is in evaluation mode meanwhile.
        """
        totals: dict[str, float] = {"weight": 0.0, "loss": 0.0}
        values = {name: MetricValue(name, metric) for name, metric in self._metrics.items()}
        training = self.model.training
        self.model.eval()
        try:
            with torch.inference_mode():
                for batch in batches:
                    data = transform(batch) if transform else batch
                    data = data.data if isinstance(data, Batch) else data
                    pair = inputs_and_targets(data, keep_targets=self._loss is model_loss)
                    inputs, targets = (move(each, self.flat.device) for each in pair)
                    found = self._evaluated(inputs, targets)
                    if found is None:
                        continue
                    (loss, outputs), size = found, examples_of(inputs, targets)
                    if self._options.weight is not None:
                        data = move(data, self.flat.device)
                    weight = self._weight(data, outputs, targets, size)
                    if not weight:  # the mean over nothing is not a number
                        continue
                    totals["weight"] += weight
                    totals["loss"] += float(loss) * weight
                    for value in values.values():
                        value.add(outputs, targets, weight)
                for name, value in values.items():
                    totals[name] = value.value() * totals["weight"]
        finally:
            self.model.train(training)
        totals = self._united(totals)
        count = totals.pop("weight")
        if not count:
            raise ConfigurationError(
                "session.evaluate: the data set has no examples, or none that weighs anything, so "
                "there is no mean to compute"
            )
        return {name: total / count for name, total in totals.items()}

    def _evaluated(self, inputs: Any, targets: Any) -> tuple[torch.Tensor, Any] | None:
        return self.forward(inputs, targets)

    def _united(self, totals: dict[str, float]) -> dict[str, float]:
        return totals

    @contextmanager
    def another_loss(self, loss: Loss) -> Iterator[None]:
        own, self._loss = self._loss, loss
        try:
            yield
        finally:
            self._loss = own

    def _penalise(self) -> None:
        # The program may have frozen some since, or added others.
        every = self.flat.parameters.values()
        penalised = [p for p in every if p.dim() >= 2 and p.requires_grad]
        for parameter in penalised:
            if parameter.grad is None:  # unused by this batch: it decays nevertheless
                parameter.grad = torch.zeros_like(parameter)
        gradients = [to_local(p.grad) for p in penalised if p.grad is not None]
        if gradients:
            values = [to_local(p.detach()) for p in penalised]
            torch._foreach_add_(gradients, values, alpha=self._options.l2)


def _backward(loss: torch.Tensor) -> None:
    if not loss.requires_grad:
        raise ConfigurationError(
            "the loss depends on no parameter that is trained: compute it from the model's outputs "
            "directly, without detach(), no_grad() or numpy"
        )
    # The operator spares the checks of torch.autograd.backward's arguments, 30 of 120 microseconds
    # of a small model's backward, but makes no Python warnings of the engine's.
    warns = torch.is_anomaly_enabled() or torch.is_deterministic_algorithms_warn_only_enabled()
    if _OPERATOR is None or warns or type(loss) is not torch.Tensor:
        torch.autograd.backward(loss)
    else:
        _OPERATOR(loss, [])


def _detached(outputs: Any) -> Any:
    plain = type(outputs) is torch.Tensor
    return outputs.detach() if plain else map_tensors(outputs, torch.Tensor.detach)


def _call(model: nn.Module, inputs: Any) -> Any:
    args, kwargs = arguments(inputs)
    return model(*args, **kwargs)
