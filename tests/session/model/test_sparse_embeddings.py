"""nn.Embedding(sparse=True): one process trains it as torch alone does; jobs refuse it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

import trireme
from tests.process_groups import ProcessGroup, run_process_group
from trireme.errors import ConfigurationError
from trireme.ps.flat import FlatModel

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.5),
    "SparseAdam": lambda parameters: torch.optim.SparseAdam(list(parameters), lr=0.1),
}
BATCHES = [torch.tensor([[0, 3, 3], [7, 1, 0]]), torch.tensor([[2, 2, 9], [3, 5, 0]])] * 3
TARGETS = torch.tensor([0, 1])


class Words(nn.Module):
    """Words that vote for one of two classes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.votes = nn.Embedding(10, 2, sparse=True)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        votes: torch.Tensor = self.votes(words).mean(1)
        return votes


def with_torch(make: Make, clip_norm: float | None) -> torch.Tensor:
    model = Words()
    optimizer = make(model.parameters())
    for batch in BATCHES:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch), TARGETS).backward()
        gradient = model.votes.weight.grad
        assert gradient is not None and gradient.is_sparse
        if clip_norm is not None:
            norm = torch.linalg.vector_norm(gradient.to_dense())
            gradient.mul_(float(torch.clamp(clip_norm / (norm + 1e-6), max=1.0)))
        optimizer.step()
    return model.votes.weight.detach()


@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_process_trains_it_as_torch_does(name: str, clip_norm: float | None) -> None:
    make, model = OPTIMIZERS[name], Words()
    options: dict[str, Any] = {"clip_norm": clip_norm, "max_steps": len(BATCHES)}
    with trireme.Session(model, nn.CrossEntropyLoss(), make, run_dir=None, **options) as session:
        for batch in BATCHES:
            session.step((batch, TARGETS))
    expected = with_torch(make, clip_norm)
    exactly = (
        {"rtol": 0.0, "atol": 0.0} if clip_norm is None else {"rtol": 1e-6, "atol": 1e-7}
    )  # a norm sums in an order
    torch.testing.assert_close(model.votes.weight.detach(), expected, **exactly)


def test_a_loop_of_ones_own_in_one_process_trains_it_too() -> None:
    model = Words()
    optimizer = trireme.distribute(model, OPTIMIZERS["SparseAdam"](model.parameters()))
    for batch in BATCHES:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch), TARGETS).backward()
        optimizer.step()
    optimizer.close()
    assert torch.equal(model.votes.weight, with_torch(OPTIMIZERS["SparseAdam"], None))


def test_what_processes_cannot_exchange_is_refused_by_name_with_what_to_use() -> None:
    model = Words()
    flat = FlatModel([list(model.named_parameters())], servers=1)
    model.votes.weight.grad = None
    model(BATCHES[0]).sum().backward()
    with pytest.raises(ConfigurationError, match=r"'votes\.weight' is sparse.*use sparse=False"):
        flat.collect_gradients()


def together() -> None:
    model = Words()
    trireme.distribute(model, OPTIMIZERS["SparseAdam"](model.parameters()))


def test_an_optimizer_of_sparse_gradients_is_refused_by_processes_that_train_together() -> None:
    raised = run_process_group(ProcessGroup(workers=2), together).raised
    assert len(raised) == 2
    assert all("SparseAdam takes sparse gradients alone" in said for said in raised.values())
