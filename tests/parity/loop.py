"""A training loop as anybody writes it, with the two lines of `trireme.distribute`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, TensorDataset

import trireme
from tests.parity.plain import Values
from tests.parity.spread import BATCH, OPTIMIZERS, STEPS, data_of, loss_of, model_of
from trireme.errors import ConfigurationError
from trireme.launch.environment import current_task

DECAY = 0.95
UNEQUAL = {2: (13, 3), 4: (7, 1, 6, 2)}
"""Into what a batch is split, by the number of replicas."""


def train_plain_loop(case: str, optimizer: str = "sgd", clip_norm: float | None = None) -> Any:
    """Trains one plain PyTorch process."""
    model = model_of(case)
    made = OPTIMIZERS[optimizer](model.parameters())
    scheduler = ExponentialLR(made, DECAY)
    for inputs, targets in zip(*(t.split(BATCH) for t in data_of(case).tensors), strict=True):
        made.zero_grad()
        loss_of(model(inputs), targets).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        made.step()
        scheduler.step()
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def train_loop(
    case: str,
    optimizer: str = "sgd",
    passes: int = 1,
    steps: int = STEPS,
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Trains as the launch says, from the chief's first values, to global step `steps`.

    Returns:
        The values that the loop's own module ends with, and `begin`: the step that it began at.
    """
    model = model_of(case)
    task = current_task()
    if task.group.rank or task.index:  # as if nobody had seeded it
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
    made = trireme.distribute(
        model, OPTIMIZERS[optimizer](model.parameters()), max_steps=STEPS, **(options or {})
    )
    begin = made.global_step
    scheduler = ExponentialLR(made, DECAY)
    batches = list(zip(*(t.split(BATCH) for t in data_of(case).tensors), strict=True))
    for _ in range(begin):
        scheduler.step()
    for inputs, targets in batches[begin:steps]:
        assert not made.should_stop()
        made.zero_grad()
        own = slice(made.replica, None, made.replicas)
        for x, y in zip(inputs[own].chunk(passes), targets[own].chunk(passes), strict=True):
            (loss_of(model(x), y) / passes).backward()
        made.step()
        scheduler.step()
    values = {n: _full(p.detach()).clone().numpy() for n, p in model.named_parameters()}
    made.close()
    return values | {"begin": begin}


def _full(tensor: torch.Tensor) -> torch.Tensor:
    joined = getattr(tensor, "full_tensor", None)
    return tensor if joined is None else joined()


def train_unequal(case: str) -> dict[str, Any]:
    """As `train_loop`, where the replicas' parts of a batch are of different sizes."""
    model = model_of(case)
    made = trireme.distribute(model, OPTIMIZERS["sgd"](model.parameters()))
    scheduler = ExponentialLR(made, DECAY)
    for inputs, targets in zip(*(t.split(BATCH) for t in data_of(case).tensors), strict=True):
        sizes = UNEQUAL[made.replicas]
        own_inputs, own_targets = (t.split(sizes)[made.replica] for t in (inputs, targets))
        made.zero_grad()
        loss_of(model(own_inputs), own_targets).backward()
        made.step(examples=len(own_inputs))
        scheduler.step()
    made.close()
    return {n: p.detach().clone().numpy() for n, p in model.named_parameters()}


def train_too_long(case: str) -> tuple[int, str, dict[str, Any]]:
    """Each process makes as many steps as it likes: the second more than the first."""
    model = model_of(case)
    made = trireme.distribute(model, OPTIMIZERS["adam"](model.parameters()))
    inputs, targets = data_of(case).tensors
    said = ""
    try:
        for step in range(4 + 3 * made.replica):
            made.zero_grad()
            loss_of(model(inputs[step : step + 9]), targets[step : step + 9]).backward()
            made.step()
    except ConfigurationError as error:
        said = str(error)
    made.close()
    values = {n: p.detach().clone().numpy() for n, p in model.named_parameters()}
    return made.global_step, said, values


def feed_another_batch(case: str) -> str:
    """Every process computes a batch of its own; returns what it is told."""
    model = model_of(case)
    made = trireme.distribute(model, OPTIMIZERS["sgd"](model.parameters()))
    rank = current_task().group.rank
    try:
        for _ in range(2):
            model(data_of(case).tensors[0][rank : rank + 5]).sum().backward()
            made.step()
    except ConfigurationError as error:
        return str(error)
    return ""


CHANGES: dict[str, Any] = {
    "norm": lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.1),
    "value": lambda parameters: nn.utils.clip_grad_value_(parameters, 0.01),
}
"""What a loop does to gradients between backward and step."""


def train_changing(case: str, change: str, together: bool = True) -> dict[str, Any]:
    """As `train_loop`, of a loop that clips by itself; or of one plain process, launched alone."""
    model = model_of(case)
    made = trireme.distribute(model, OPTIMIZERS["sgd"](model.parameters()))
    said: list[str] = []
    made.worker.progress.warn = said.append  # type: ignore[method-assign]
    for inputs, targets in zip(*(t.split(BATCH) for t in data_of(case).tensors), strict=True):
        own = slice(made.replica, None, made.replicas)
        made.zero_grad()
        loss_of(model(inputs[own]), targets[own]).backward()
        if together:
            made.synchronize()
        CHANGES[change](list(model.parameters()))
        made.step()
    values = {n: _full(p.detach()).clone().numpy() for n, p in model.named_parameters()}
    made.close()
    return values | {"said": said}


def train_hooked(case: str, changes: bool) -> list[str]:
    """Trains with a hook of each parameter, which clips its gradient or only looks at it."""
    model = model_of(case)
    for parameter in model.parameters():
        parameter.register_hook(lambda g: g.clamp(-0.01, 0.01) if changes else None)
    made = trireme.distribute(model, OPTIMIZERS["sgd"](model.parameters()))
    said: list[str] = []
    made.worker.progress.warn = said.append  # type: ignore[method-assign]
    for inputs, targets in zip(*(t.split(BATCH) for t in data_of(case).tensors), strict=True):
        own = slice(made.replica, None, made.replicas)
        made.zero_grad()
        loss_of(model(inputs[own]), targets[own]).backward()
        made.synchronize()
        made.step()
    made.close()
    return said


def train_scaled(case: str, overflow: bool = True, together: bool = True) -> dict[str, Any]:
    """As `train_changing`, with a `GradScaler` and an overflow in the last replica's third batch.

    In one process the overflow is in the third batch of all.
    """
    model = model_of(case)
    made = trireme.distribute(model, OPTIMIZERS["sgd"](model.parameters()))
    said: list[str] = []
    made.worker.progress.warn = said.append  # type: ignore[method-assign]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=4)
    batches = zip(*(t.split(BATCH) for t in data_of(case).tensors), strict=True)
    for number, (inputs, targets) in enumerate(batches):
        own = slice(made.replica, None, made.replicas)
        made.zero_grad()
        loss = loss_of(model(inputs[own]), targets[own])
        if overflow and number == 2 and made.replica == made.replicas - 1:
            loss = loss * 1e38 * 1e38
        scaler.scale(loss).backward()
        if together:
            made.synchronize()
        scaler.step(made)
        scaler.update()
    made.close()
    values = {n: p.detach().clone().numpy() for n, p in model.named_parameters()}
    return values | {"steps": made.global_step, "scale": scaler.get_scale(), "said": said}


def asking_ahead(batches: Iterable[Any]) -> Iterable[Any]:
    """Asks for each batch before the one before it is computed, as Accelerate's loaders do."""
    there = iter(batches)
    for batch in there:
        for ahead in there:
            yield batch
            batch = ahead
        yield batch


def train_epochs(
    case: str, rows: int, prepared: bool = False, ahead: bool = False
) -> dict[str, Any]:
    """Trains on what the job deals, in the order of the data; of one process, alone.

    Two epochs, in batches of so many rows for all processes together.
    """
    model = model_of(case)
    made = trireme.distribute(model, OPTIMIZERS["sgd"](model.parameters()))
    said: list[str] = []
    made.worker.progress.warn = said.append  # type: ignore[method-assign]
    loader: DataLoader[Any] = DataLoader(data_of(case), rows // made.replicas)
    batches: Iterable[tuple[int, Any]]
    if prepared:
        own = made.prepare(loader, epochs=2)
        asked = asking_ahead if ahead else iter
        batches = ((epoch, batch) for epoch in range(3) for batch in asked(own))
    else:
        batches = made.epochs(loader, 2)
    seen = 0
    for _, (inputs, targets) in batches:
        made.zero_grad()
        loss_of(model(inputs), targets).backward()
        made.step()
        seen += len(inputs)
    steps = made.global_step
    values = {n: _full(p.detach()).clone().numpy() for n, p in model.named_parameters()}
    made.close()
    return values | {"steps": steps, "seen": seen, "said": said}


def train_and_leave(case: str) -> bool:
    """Leaves the job with the last batch, which the second process has without examples."""
    model = model_of(case)
    made = trireme.distribute(model, OPTIMIZERS["sgd"](model.parameters()))
    data = TensorDataset(*data_of(case)[:6])
    for count, (_, (inputs, targets)) in enumerate(made.epochs(DataLoader(data, 2), 1)):
        made.zero_grad()
        loss_of(model(inputs), targets).backward()
        if count == 1:
            zeros = not any(p.grad.any() for p in model.parameters() if p.grad is not None)
            assert zeros == bool(made.replica)
            break
        made.step()
    made.close()
    model.zero_grad()
    loss_of(model(inputs), targets).backward()
    return all(p.grad is not None and bool(p.grad.any()) for p in model.parameters())


def train_accumulating(case: str, size: int, every: int, flushes: bool = False) -> dict[str, Any]:
    """Makes a step of so many batches that the job deals, in two epochs.

    One that `flushes` makes a step of the rest of an epoch when it has the next one's first batch.
    """
    model = model_of(case)
    made = trireme.distribute(model, OPTIMIZERS["sgd"](model.parameters()))
    said: list[str] = []
    made.worker.progress.warn = said.append  # type: ignore[method-assign]
    seen = last = count = 0
    made.zero_grad()
    for epoch, (inputs, targets) in made.epochs(DataLoader(data_of(case), size), 2):
        if flushes and epoch != last and count % every:
            made.step()
            made.zero_grad()
            count = 0
        last = epoch
        loss_of(model(inputs), targets).backward()
        seen += len(inputs)
        count += 1
        if not count % every:
            made.step()
            made.zero_grad()
    steps = made.global_step
    values = {n: p.detach().clone().numpy() for n, p in model.named_parameters()}
    made.close()
    return values | {"steps": steps, "seen": seen, "said": said}


def accumulate_plainly(
    case: str, size: int, every: int, workers: int, flushes: bool = False
) -> Values:
    """What the workers of `train_accumulating` make together, in one plain PyTorch process."""
    model = model_of(case)
    made = OPTIMIZERS["sgd"](model.parameters())
    inputs, targets = data_of(case).tensors
    rounds = [range(start, len(inputs), size) for start in range(0, len(inputs), size * workers)]
    epoch = [each[:workers] for each in rounds]
    rest = [range(0)] * (-len(epoch) % every if flushes else 0)
    rounds = epoch + rest + epoch
    for step in range(len(rounds) // every):
        mean = [torch.zeros_like(p) for p in model.parameters()]
        examples = 0
        for worker in range(workers):
            model.zero_grad()
            count = 0
            for starts in rounds[step * every : (step + 1) * every]:
                if worker < len(starts):
                    own = slice(starts[worker], starts[worker] + size)
                    loss_of(model(inputs[own]), targets[own]).backward()
                    count += len(inputs[own])
            for sum_, parameter in zip(mean, model.parameters(), strict=True):
                sum_ += count * parameter.grad  # type: ignore[operator]
            examples += count
        for sum_, parameter in zip(mean, model.parameters(), strict=True):
            parameter.grad = sum_ / examples
        made.step()
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def train_at_own_rates(case: str) -> str:
    """Gives each process another rate after the first step; returns how that is refused."""
    model = model_of(case)
    made = trireme.distribute(model, OPTIMIZERS["sgd"](model.parameters()))
    inputs, targets = data_of(case)[:BATCH]
    try:
        for _ in range(3):
            made.zero_grad()
            loss_of(model(inputs), targets).backward()
            made.step()
            made.param_groups[0]["lr"] = 0.1 + 0.01 * made.replica
    except ConfigurationError as error:
        return str(error)
    return ""


def train_on_the_same(case: str, same: bool) -> list[str]:
    """Trains every process on the same batches, or each on its own; returns the warnings."""
    model = model_of(case)
    made = trireme.distribute(model, OPTIMIZERS["sgd"](model.parameters()))
    said: list[str] = []
    made.worker.progress.warn = said.append  # type: ignore[method-assign]
    own = slice(None) if same else slice(made.replica, None, made.replicas)
    for inputs, targets in zip(*(t.split(BATCH) for t in data_of(case).tensors), strict=True):
        made.zero_grad()
        loss_of(model(inputs[own]), targets[own]).backward()
        made.step()
    made.close()
    return said


class Count:
    """A program's own count of its steps."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = state_dict["steps"]


def train_counting(case: str) -> int:
    """Makes five steps, and returns the count that this process began with."""
    model = model_of(case)
    made = trireme.distribute(model, OPTIMIZERS["sgd"](model.parameters()))
    count = Count()
    made.keep("count", count)
    began = count.steps
    inputs, targets = data_of(case).tensors
    for _ in range(5):
        made.zero_grad()
        count.steps += 1
        loss_of(model(inputs[:BATCH]), targets[:BATCH]).backward()
        made.step()
    made.close()
    return began
