"""One replica: computes the gradient of a batch into the model's flat buffers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from trireme.data.batch import Batch
from trireme.errors import ConfigurationError, NonFiniteError
from trireme.parallel.reducer import Reducer
from trireme.parallel.tensors import map_tensors, to_local
from trireme.ps.module_names import named_parameters
from trireme.session.options import Options
from trireme.session.replica.batch import (
    arguments,
    examples_of,
    inputs_and_targets,
    move,
    pieces,
)
from trireme.session.replica.metric_value import MetricValue
from trireme.session.result import Metric, StepResult

if TYPE_CHECKING:
    from trireme.parallel.model_part import ModelPart
    from trireme.parallel.operation_log import OperationLog
    from trireme.ps.flat import FlatModel
    from trireme.session.table_rows import TableRows

Loss = Callable[[Any, Any], Any]
"""(outputs, targets) -> the mean over the batch, as a scalar or as the entry `loss` of a dict."""

_OPERATOR = getattr(getattr(torch.ops.aten, "_backward", None), "default", None)
"""The operator that TorchScript compiles `backward()` to; None if this torch has none."""


Transform = Callable[[Any], Any]
"""batch -> batch."""

Trained: TypeAlias = "FlatModel | ModelPart"
"""The trained parameters that a process computes with: of the whole model, or of a part of it."""


def named_groups(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, frozen: bool = False
) -> list[list[tuple[str, nn.Parameter]]]:
    """Returns the optimizer's parameters, group by group, with the model's names for them.

    Args:
        model: the model.
        optimizer: an optimizer over its parameters.
        frozen: whether to return parameters that require no gradient too.

    Raises:
        ConfigurationError: a parameter of the optimizer is not in the model.
    """
    names = {id(parameter): name for name, parameter in named_parameters(model)}
    groups: list[list[tuple[str, nn.Parameter]]] = []
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ConfigurationError(
                    f"group {index} of the optimizer has a parameter of shape "
                    f"{tuple(parameter.shape)} that is not one of the model's: build the optimizer "
                    "from the parameters of the model that the session trains"
                )
        groups.append([(names[id(p)], p) for p in group["params"] if p.requires_grad or frozen])
    return groups


def clip(trained: Trained, limit: float, tables: TableRows | None = None) -> None:
    """Scales the gradients of parameters, and of rows, down to an L2 norm of at most `limit`."""
    norm = trained.gradient_norm()
    if tables is not None:
        norm = (norm**2 + tables.square()).sqrt()
    factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
    trained.scale_gradients(factor)
    if tables is not None:
        tables.scale(float(factor))


def scalar(loss: Any) -> torch.Tensor:
    """Returns the loss that a loss function has returned, as one number.

    Raises:
        ConfigurationError: it is not a scalar tensor, nor a dict whose `loss` is one.
    """
    if isinstance(loss, dict):
        loss = loss.get("loss")
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        found = type(loss).__name__
        if isinstance(loss, torch.Tensor):
            found = f"a tensor of shape {tuple(loss.shape)}"
        raise ConfigurationError(
            f"the loss is {found}: it must be one number as a tensor, such as the mean over the "
            'batch (reduction="mean"), or a dict whose "loss" is that'
        )
    return loss


def model_loss(outputs: Any, targets: Any) -> torch.Tensor:
    """Returns the loss that the model itself has computed from the batch.

    `Session(model, trireme.model_loss, ...)` gives the model the whole batch, `labels` included,
    as Hugging Face's models take it, and trains by the `loss` that is in the outputs.

    Args:
        outputs: the model's outputs: a mapping or an object with a `loss`, a tuple whose first item
            is the loss, or the loss itself.
        targets: ignored.

    Raises:
        ConfigurationError: the outputs have no loss; describes them.
    """
    if isinstance(outputs, Mapping):
        loss, there = outputs.get("loss"), f"the keys {', '.join(map(str, outputs))}"
    elif isinstance(outputs, (tuple, list)):
        loss, there = (outputs[0] if outputs else None), f"a tuple of {len(outputs)}"
    elif isinstance(outputs, torch.Tensor):
        loss, there = outputs, f"a tensor of shape {tuple(outputs.shape)}"
    else:
        loss, there = getattr(outputs, "loss", None), f"a {type(outputs).__name__}"
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss
    raise ConfigurationError(
        f"model_loss: the model's outputs have no loss of one number: they are {there}. Models of "
        "transformers compute one where the batch has labels; else give the session a loss "
        "function of (outputs, targets)"
    )


class Replica:
    """Computes losses and gradients, and processes gradients before they are exchanged.

    Args:
        model: the model, on its device.
        loss: see `Loss`.
        flat: the model's trained parameters.
        options: the session's options.
        metrics: the metrics by name.
        reducer: averages the gradients of replicas that step together; None for one replica.

    Attributes:
        pipeline: runs this process's pipeline stages, or its operations of a dataflow graph; None
            where there are neither.
    """

    pipeline: OperationLog | None = None

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
        self._reducer = reducer
        self._moves = flat.device.type != "cpu"
        self._ignores = options.nan == "ignore"
        self._autocast = options.precision == "bfloat16"
        self._penalised = (
            [p for p in flat.parameters.values() if p.dim() >= 2 and p.requires_grad]
            if options.l2
            else []
        )
        # A forward pass that is left out must leave no trace in running statistics either.
        self._kept = list(model.buffers()) if options.nan == "skip" else []
        self._stands_in = False  # whether the batch only takes part in a step of others

    def backward(self, batch: Any, begin: Callable[[float], None] | None = None) -> StepResult:
        """Computes the gradient of a batch's mean loss into the flat buffers.

        Args:
            batch: inputs and targets.
            begin: called before backward with the number of examples that the gradient is the mean
                of, if the gradient will be the whole update: not if the loss is checked and not
                finite, nor if gradients are accumulated or changed afterwards.

        Returns:
            The loss and metrics; the fields of the update are not set yet. `examples` is 0 where
            the update is to be skipped.

        Raises:
            NonFiniteError: the loss is NaN or infinite and the policy is to raise.
            ConfigurationError: the loss is not a scalar tensor.
        """
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
        if self._moves:
            pair = move(pair[0], self.flat.device), move(pair[1], self.flat.device)
        if self._options.accumulate > 1:
            result = self._accumulate(pair)
        else:
            result = self._compute(pair, begin)
        if self._reducer is not None:
            self._reducer.finish()
        if self._penalised:
            self._penalise()
        assert isinstance(result._loss, torch.Tensor)
        if not self._good(result._loss):
            if self._options.nan != "skip":
                raise NonFiniteError(
                    f"the loss is {result.loss}: lower the learning rate, clip the gradient "
                    '(clip_norm=1.0), or leave such updates out (nan="skip"); the last checkpoint '
                    "is from before this update"
                )
            self.flat.zero_gradients()
            result.examples = 0
            with torch.no_grad():
                for buffer, value in zip(self._kept, before, strict=True):
                    buffer.copy_(value)
        if self._stands_in:
            result.examples = 0
        return result

    def _counted(self, examples: int) -> int:
        """Returns how many of the batch's examples count."""
        return 0 if self._stands_in else examples

    def _compute(self, batch: tuple[Any, Any], begin: Callable[[float], None] | None) -> StepResult:
        """Computes the gradients of a batch's mean loss."""
        inputs, targets = batch
        plain = type(inputs) is torch.Tensor and inputs.dim()
        examples = inputs.shape[0] if plain else examples_of(inputs, targets)
        if self._reducer is None:
            loss, outputs = self.forward(inputs, targets)
            scaled = loss
        else:
            factor = self._reducer.scale_factor(self._counted(examples))
            loss, outputs = self.forward(inputs, targets)
            share = factor()
            scaled = loss if share == 1.0 else loss * share
            self._reducer.begin()
        if begin is not None and not self._penalised and self._good(loss):
            begin(float(examples))
        _backward(scaled)
        return StepResult(loss.detach(), [(outputs, targets)], self._metrics, examples)

    def forward(self, inputs: Any, targets: Any) -> tuple[torch.Tensor, Any]:
        """Returns the loss and the detached outputs."""
        if self._autocast:
            with torch.autocast(self.flat.device.type, torch.bfloat16):
                outputs = _call(self.model, inputs)
                loss = self._loss(outputs, targets)
        else:
            plain = type(inputs) is torch.Tensor
            outputs = self.model(inputs) if plain else _call(self.model, inputs)
            loss = self._loss(outputs, targets)
        loss, plain = scalar(loss), type(outputs) is torch.Tensor
        return loss, outputs.detach() if plain else map_tensors(outputs, torch.Tensor.detach)

    def evaluate(
        self, batches: Iterable[Any], *, transform: Transform | None = None
    ) -> dict[str, float]:
        """Returns the mean of the loss and the value of each metric over the examples of batches.

        The model is in evaluation mode meanwhile; its mode is restored afterwards.

        Args:
            batches: the batches.
            transform: applied to each batch before it is computed.

        Raises:
            ConfigurationError: there are no examples.
        """
        totals: dict[str, float] = {"examples": 0.0, "loss": 0.0}
        values = {name: MetricValue(name, metric) for name, metric in self._metrics.items()}
        training = self.model.training
        self.model.eval()
        try:
            with torch.inference_mode():
                for batch in batches:
                    inputs, targets = inputs_and_targets(
                        transform(batch) if transform else batch,
                        keep_targets=self._loss is model_loss,
                    )
                    inputs, targets = (move(each, self.flat.device) for each in (inputs, targets))
                    found = self._evaluated(inputs, targets)
                    if found is None:
                        continue
                    (loss, outputs), size = found, examples_of(inputs, targets)
                    totals["examples"] += size
                    totals["loss"] += float(loss) * size
                    for value in values.values():
                        value.add(outputs, targets, size)
                for name, value in values.items():
                    totals[name] = value.value() * totals["examples"]
        finally:
            self.model.train(training)
        totals = self._united(totals)
        count = totals.pop("examples")
        if not count:
            raise ConfigurationError(
                "session.evaluate: the data set has no examples, so there is no mean to compute"
            )
        return {name: total / count for name, total in totals.items()}

    def _evaluated(self, inputs: Any, targets: Any) -> tuple[torch.Tensor, Any] | None:
        """Returns the loss and the outputs of a batch; None if another process has them."""
        return self.forward(inputs, targets)

    def _united(self, totals: dict[str, float]) -> dict[str, float]:
        """Returns the sums over the processes that evaluate together."""
        return totals

    @contextmanager
    def another_loss(self, loss: Loss) -> Iterator[None]:
        """Replaces the loss during the block."""
        own, self._loss = self._loss, loss
        try:
            yield
        finally:
            self._loss = own

    def _accumulate(self, batch: tuple[Any, Any]) -> StepResult:
        total = examples_of(*batch)
        outputs: list[tuple[object, object]] = []
        mean = torch.zeros((), device=self.flat.device)
        share = 1.0 if self._reducer is None else self._reducer.scale_factor(self._counted(total))()
        left = total
        for (inputs, targets), size in pieces(batch, self._options.accumulate, total):
            loss, out = self.forward(inputs, targets)
            left -= size
            if not left and self._reducer is not None:
                self._reducer.begin()
            _backward(loss * (share * size / total))
            mean += loss.detach() * (size / total)
            outputs.append((out, targets))
        return StepResult(mean, outputs, self._metrics, total)

    def _penalise(self) -> None:
        # The program may have frozen some since.
        penalised = [p for p in self._penalised if p.requires_grad]
        for parameter in penalised:
            if parameter.grad is None:  # unused by this batch: it decays nevertheless
                parameter.grad = torch.zeros_like(parameter)
        gradients = [to_local(p.grad) for p in penalised if p.grad is not None]
        if gradients:
            values = [to_local(p.detach()) for p in penalised]
            torch._foreach_add_(gradients, values, alpha=self._options.l2)

    def _good(self, loss: torch.Tensor) -> bool:
        """Returns whether an update may be made from a loss."""
        return self._ignores or math.isfinite(loss.item())


def _backward(loss: torch.Tensor) -> None:
    """Computes the gradients, as `torch.autograd.backward`.

    The argument checks of that function take as long as Trireme's own part of a short step; the
    operator that TorchScript calls does the same without them. It gains 13 of 253 microseconds of a
    small model's backward (decision 0021). Only the function turns warnings of the engine into
    Python warnings: it is called where warnings are enabled.

    Raises:
        ConfigurationError: the loss depends on no parameter that is trained.
    """
    if not loss.requires_grad:
        raise ConfigurationError(
            "the loss depends on no parameter that is trained: compute it from the model's outputs "
            "directly, without detach(), no_grad() or numpy"
        )
    if (
        _OPERATOR is None
        or type(loss) is not torch.Tensor
        or torch.is_anomaly_enabled()
        or torch.is_deterministic_algorithms_warn_only_enabled()
    ):
        torch.autograd.backward(loss)
    else:
        _OPERATOR(loss, [])


def _call(model: nn.Module, inputs: Any) -> Any:
    args, kwargs = arguments(inputs)
    return model(*args, **kwargs)
