"""Records the numbers of each step of a run that is compared; an observer of its workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from trireme.data.batch import Batch
from trireme.launch.config.task_config import Trial
from trireme.ps.messages import Span
from trireme.ps.optimizers import members
from trireme.session.model.module_names import called_modules, named_buffers
from trireme.session.model.training_setup import TrainingSetup
from trireme.session.observers.liveness import line_of_program
from trireme.session.result import StepResult
from trireme.session.worker.observer import Observer
from trireme.tensors import is_dtensor, tensors_in
from trireme.verification.draws import states, turn_dropout_off
from trireme.verification.meeting import Meeting
from trireme.verification.record import Record, write_record
from trireme.verification.sketch import as_real, combined, marks_of, precision, sketch

INITIAL = "initial.safetensors"
_MOST_EXAMPLES = 4096  # of a call of the model that are recorded
_MIXED = 2_654_435_761  # spreads whole numbers, of which a bit more is another example
_NO_NUMBERS = ("params", "initial_lr", "foreach", "fused", "capturable", "differentiable")


def open_recorder(worker: Any) -> Observer:
    """Returns what records the steps of a worker; what does nothing where none is compared."""
    return Observer(worker) if worker.task.trial is None else Recorder(worker, worker.task.trial)


class Hook:
    """A hook that records; in a copy of the model it does nothing."""

    def __init__(self, call: Callable[..., object] = lambda *_: None) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        self._call(*args)

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        return Hook, ()


class Recorder(Observer):
    """Records the steps of a worker."""

    def __init__(self, worker: Any, trial: Trial) -> None:
        super().__init__(worker)
        self._trial = trial
        self._directory = Path(trial.record)
        self._record = Record(task=worker.task.name)
        several = trial.replicas > 1 and trial.joined == 1
        self._meeting = Meeting(self._directory, trial) if several else None
        self._notes: set[str] = set()
        self._dealt = 0  # how many examples the program was dealt last
        self._states = states()
        self._hooked: set[int] = set()
        self._own_hooks: list[str] = []  # the parameters with hooks of the program
        self._own_loop = True
        self._forward = False  # whether the model computes a loss that is recorded

    def on_start(self) -> None:
        torch.set_deterministic_debug_mode("warn")
        setup = self.worker.setup
        turn_dropout_off(setup.model, self._notes)
        found = self._held(state=False)
        if (given := self._trial.settings.get("initial")) is not None:
            self._begin_alike(load_file(str(given)))
            found = self._held(state=False)
        elif any(key.startswith("values/") for key in found):
            copies = {n: t.detach().cpu().contiguous().clone() for n, t in found.items()}
            save_file(copies, self._directory / INITIAL)
        begin = Record(task=self.worker.task.name, step=self.worker.global_step)
        begin.batches, begin.nature = setup.settings.batches_per_step, _nature(setup)
        begin.tensors = {key: sketch(each) for key, each in found.items()}
        write_record(self._directory, begin)
        self._hook(setup.model)
        self._watch_program()
        self._states = states()

    def _begin_alike(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Begins with values that another run has saved, or with such as are off by rounding."""
        held = {f"values/{n}": p for n, p in self.worker.setup.trained.parameters.items()}
        held |= {f"buffers/{n}": b for n, b in named_buffers(self.worker.setup.model)}
        scale = float(self._trial.settings.get("perturb", 0))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name in sorted(held.keys() & tensors.keys()):
                value = tensors[name]
                if scale and name.startswith("values/"):
                    signs = torch.randint(2, value.shape, generator=generator) * 2 - 1
                    value = value * (1 + signs * scale * precision(value.dtype))
                held[name].copy_(value)

    def _hook(self, model: nn.Module) -> None:
        if self.worker.setup.settings.placed:  # operations of a graph are computed, not modules
            return
        for module in called_modules(model):
            if self._is_new(module):
                module.register_forward_pre_hook(Hook(self._before_forward), with_kwargs=True)
                module.register_forward_hook(Hook(self._after_forward))
        for name, parameter in self.worker.setup.trained.parameters.items():
            if parameter.requires_grad and self._is_new(parameter):
                self._own_hooks += [name] if parameter._backward_hooks else []
                parameter.register_hook(Hook(partial(self._computed, name)))

    def _is_new(self, hooked: object) -> bool:
        before = len(self._hooked)
        self._hooked.add(id(hooked))
        return len(self._hooked) > before

    def _watch_program(self) -> None:
        """Records the loss of each `backward()` of a loop of the program's own, and autocast."""
        backward, enter, recorder = torch.Tensor.backward, torch.autocast.__enter__, self

        def recorded(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            if tensor.numel() == 1:
                recorder._record.losses.append(float(tensor.detach()))
            backward(tensor, *args, **kwargs)  # type: ignore[no-untyped-call]

        def entered(context: Any) -> Any:
            if context._enabled:
                recorder._record.eps = max(recorder._record.eps, precision(context.fast_dtype))
            return enter(context)  # type: ignore[no-untyped-call]

        torch.Tensor.backward = recorded  # type: ignore[assignment,method-assign]
        torch.autocast.__enter__ = entered  # type: ignore[method-assign]

    def on_batch(self, batch: Batch) -> None:
        self._dealt = sum(stop - start for start, stop in batch.spans)
        self._states = states()  # what loading has drawn is not the program's

    def before_gradient(self, computation: Any, batch: Any) -> None:
        self._own_loop = False
        self._hook(computation.model)

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled() or not module.training:
            return
        found = [each for each in tensors_in((args, kwargs)) if each.dim()]
        if not all(type(each) is torch.Tensor for each in found):
            return  # the model is captured as a graph
        self._note_draws("loop")
        examples = self._dealt or min(map(len, found[:1]), default=0)
        rows = [each for each in found if len(each) == examples <= _MOST_EXAMPLES]
        numbers = marks_of(torch.cat([_numbers(each) for each in rows], 1)) if rows else []
        self._record.calls.append((str([tuple(each.shape[1:]) for each in rows]), numbers))
        self._forward = True

    def _after_forward(self, module: nn.Module, args: Any, outputs: Any) -> None:
        if self._forward:
            self._forward = False
            self._note_draws("model")

    def _note_draws(self, where: str) -> None:
        now = states()
        if now != self._states and where not in self._record.drew:
            self._record.drew.append(where)
        self._states = now

    def _computed(self, name: str, gradient: torch.Tensor) -> None:
        if _is_plain(gradient):
            key, found, mine = f"gradient/{name}", self._record.tensors, sketch(gradient)
            found[key] = combined((1.0, found[key]), (1.0, mine)) if key in found else mine

    def before_update(self, weight: float, examples: Sequence[Span]) -> None:
        record, setup = self._record, self.worker.setup
        parameters = setup.trained.parameters
        record.weight = weight
        record.positions = [place for span in examples for place in range(span.start, span.stop)]
        record.dealt = self._dealt > 0
        record.weighed = not self._own_loop and setup.reducer is not None
        record.line = line_of_program()
        record.settings = dict(_settings(setup.optimizer.param_groups))
        record.layers = dict(layers_of(setup.model))
        record.hooks = [*self._own_hooks]
        record.unreached = [n for n, p in parameters.items() if p.grad is None and p.requires_grad]
        if self._meeting is not None:
            self._meeting.average(weight, parameters.values())
        for name, parameter in parameters.items():
            record.eps = max(record.eps, precision(parameter.dtype))
            if (gradient := parameter.grad) is not None and _is_plain(gradient):
                record.tensors[f"pushed/{name}"] = sketch(gradient)

    def after_update(self) -> None:
        held = self._held(state=True)
        self._record.tensors |= {key: sketch(each) for key, each in held.items()}

    def after_step(self, recorder: Any, result: StepResult, *, due: bool) -> None:
        record = self._record
        record.step = result.global_step
        if not self._own_loop and result.has_loss:
            record.losses = [result.loss]
        record.losses = [loss if math.isfinite(loss) else math.nan for loss in record.losses]
        record.notes = sorted(self._notes)
        write_record(self._directory, record)
        self._record = Record(task=record.task, eps=record.eps)
        self._hook(self.worker.setup.model)  # also parameters that were added
        self._states = states()

    def close(self) -> None:
        if self._meeting is not None:
            self._meeting.leave(self.worker.setup.trained.parameters.values())

    def _held(self, *, state: bool) -> dict[str, torch.Tensor]:
        """Returns the buffers, and on the chief the values and the optimizer's state of the job.

        Processes that hold a model together all take part.
        """
        worker, setup = self.worker, self.worker.setup
        found = {
            f"buffers/{name}": each
            for name, each in named_buffers(setup.model)
            if (each.is_floating_point() or each.is_complex()) and not each.is_meta
        }
        if worker.task.servers and worker.task.index:
            return found
        if setup.process_group is None and not worker.lifecycle.is_chief:
            return found
        held = worker.backend.snapshot(state=state)
        if worker.lifecycle.is_chief:
            # Servers may have what another worker's loop has written since.
            whole = worker.task.servers and setup.part is None
            values = setup.trained.parameters if whole else held.values
            found |= {f"values/{name}": each for name, each in values.items()}
            found |= {f"state/{name}": each for name, each in held.optimizer.items()}
        return found


def _nature(setup: TrainingSetup) -> str:
    """Returns why a job cannot equal one process number by number; "" where it can."""
    settings = setup.settings
    rule, workers, name = settings.rule, settings.task.workers, settings.strategy.name
    adaptive = {type(each).__name__ for each in members(setup.optimizer)} - {"SGD"}
    why = (
        (not settings.task.servers, ""),
        (rule.codec != "none", f"gradients are packed by {rule.codec}"),
        (settings.prefetches, f"{name} with prefetch computes each gradient from older values"),
        (workers == 1 and rule.period == 1, ""),
        (not rule.synchronous, f"under {name} others change the values of a gradient meanwhile"),
        (rule.period > 1, f"under {name} workers train {rule.period} steps between exchanges"),
        (
            rule.every is not None and adaptive,
            f"under {name} each worker's {min(adaptive, default='')} divides by its own gradients",
        ),
        (0 < rule.aggregate < workers, f"{name} leaves out the slowest of {workers} workers"),
    )
    return next((text for holds, text in why if holds), "")


def _is_plain(gradient: torch.Tensor) -> bool:
    return gradient.layout is torch.strided and not is_dtensor(gradient)


def _numbers(rows: torch.Tensor) -> torch.Tensor:
    """Returns the examples of a tensor as rows of numbers."""
    flat = as_real(rows).reshape(len(rows), -1)
    if not flat.is_floating_point():
        flat = (flat.long() * _MIXED % 2**32).double() / 2**31 - 1
    return flat.to("cpu", torch.float64)


def layers_of(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yields the layers that normalise by the whole batch of a process, with their kinds."""
    for name, layer in model.named_modules():
        own = isinstance(layer, _BatchNorm) and not isinstance(layer, nn.SyncBatchNorm)
        if own and (layer.training or layer.running_mean is None):
            yield name, type(layer).__name__.removeprefix("FSDP")


def _settings(groups: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, float]]:
    """Yields the numbers of parameter groups, such as learning rates."""
    for group, values in enumerate(groups):
        where = f" of group {group}" if len(groups) > 1 else ""
        for name, value in values.items():
            several = isinstance(value, (tuple, list))
            for place, each in enumerate(value if several else [value]):
                number = isinstance(each, (int, float)) or (
                    torch.is_tensor(each) and each.numel() == 1
                )
                if number and name not in _NO_NUMBERS and not name.startswith("_"):
                    yield (f"{name}[{place}]" if several else name) + where, float(each)
