"""Row optimizers against torch's own, or against the paper's formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.tables.model import ModelTable
from trireme.tables.keys import sum_rows, unique
from trireme.tables.row_optimizers import power
from trireme.tables.table import Table
from trireme.tables.table_spec import (
    FTRL,
    SGD,
    Adagrad,
    Add,
    Optimizer,
    RowWiseAdagrad,
    SparseAdam,
    TableSpec,
    Uniform,
)

COUNT, WIDTH, STEPS = 60, 5, 40
Array = np.ndarray[Any, Any]
MakeTorch = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def batches(seed: int = 0) -> list[tuple[Array, Array]]:
    """Batches of keys, some of them more than once, and gradients."""
    numbers = np.random.default_rng(seed)
    return [
        (numbers.integers(0, COUNT, 30), numbers.standard_normal((30, WIDTH)) * 3)
        for _ in range(STEPS)
    ]


def table_of(optimizer: Optimizer, dtype: str) -> Table:
    return Table(TableSpec("t", WIDTH, optimizer, dtype, Uniform(-1.0, 1.0, seed=1)))


def train(table: Table, hyper: dict[int, dict[str, float]] | None = None) -> Array:
    for step, (keys, gradients) in enumerate(batches(), start=1):
        found, inverse = unique(keys)
        sums = sum_rows(gradients.astype(table.spec.dtype), inverse, found.size)
        table.push(found, sums, step=step, hyper=(hyper or {}).get(step))
    return table.pull(np.arange(COUNT))


def train_torch(table: Table, make: MakeTorch, lr: dict[int, float] | None = None) -> Array:
    """The same with an embedding of torch that has sparse gradients."""
    first = torch.from_numpy(table.pull(np.arange(COUNT)))
    embedding = torch.nn.Embedding(COUNT, WIDTH, sparse=True, _weight=first.clone())
    optimizer = make(list(embedding.parameters()))
    for step, (keys, gradients) in enumerate(batches(), start=1):
        if lr and step in lr:
            optimizer.param_groups[0]["lr"] = lr[step]
        optimizer.zero_grad()
        output = embedding(torch.from_numpy(keys))
        output.backward(torch.from_numpy(gradients).to(output.dtype))
        optimizer.step()
    trained: Array = embedding.weight.detach().numpy()
    return trained


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("optimizer", "make"),
    [
        (SGD(0.03), lambda it: torch.optim.SGD(it, lr=0.03)),
        (Adagrad(0.1), lambda it: torch.optim.Adagrad(it, lr=0.1)),
        (
            Adagrad(0.1, 1e-3, 0.4),
            lambda it: torch.optim.Adagrad(it, lr=0.1, eps=1e-3, initial_accumulator_value=0.4),
        ),
        (SparseAdam(), lambda it: torch.optim.SparseAdam(it)),
        (
            SparseAdam(0.02, 0.8, 0.9, 1e-4),
            lambda it: torch.optim.SparseAdam(it, lr=0.02, betas=(0.8, 0.9), eps=1e-4),
        ),
    ],
    ids=["SGD", "Adagrad", "Adagrad-start", "SparseAdam", "SparseAdam-other"],
)
def test_torch_gives_the_same_rows(optimizer: Optimizer, make: MakeTorch, dtype: str) -> None:
    table = table_of(optimizer, dtype)
    expected = train_torch(table, make)
    precise = 2e-6 if dtype == "float32" else 1e-12
    np.testing.assert_allclose(train(table), expected, rtol=precise, atol=precise)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "optimizer",
    [
        RowWiseAdagrad(0.1),
        RowWiseAdagrad(0.1, 1e-2, 0.3),
        FTRL(0.1),
        FTRL(0.3, 0.5, l1=2.0, l2=0.7),
        Add(),
    ],
    ids=["row-wise", "row-wise-start", "FTRL", "FTRL-regularized", "Add"],
)
def test_the_formulas_give_the_same_rows(optimizer: Optimizer) -> None:
    table = table_of(optimizer, "float64")
    model = ModelTable(table.spec)
    for step, (keys, gradients) in enumerate(batches(), start=1):
        found, inverse = unique(keys)
        model.push(found.tolist(), sum_rows(gradients, inverse, found.size), step)
    trained = train(table)
    np.testing.assert_allclose(trained, model.pull(list(range(COUNT))), rtol=1e-12, atol=1e-12)
    single = table_of(optimizer, "float32")
    np.testing.assert_allclose(train(single), trained, rtol=2e-5, atol=2e-5)


def test_ftrl_makes_rows_sparse() -> None:
    rows = train(table_of(FTRL(0.1, l1=8.0), "float64"))
    assert 0.1 < (rows == 0).mean() < 0.9


def test_a_schedule_changes_the_rate() -> None:
    table = table_of(Adagrad(0.1), "float64")
    schedule = {11: 0.05, 30: 0.01}
    expected = train_torch(table, lambda it: torch.optim.Adagrad(it, lr=0.1), schedule)
    trained = train(table, {step: {"lr": lr} for step, lr in schedule.items()})
    np.testing.assert_allclose(trained, expected, rtol=1e-12)
    assert table.optimizer == Adagrad(0.01)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_integers_are_added_and_wrap_around(dtype: str) -> None:
    table = Table(TableSpec("counts", 2, Add(), dtype))
    most = np.iinfo(dtype).max
    keys = np.array([3, 9])
    table.push(keys, np.array([[most, 1], [-5, 2]], dtype), step=1)
    table.push(keys, np.array([[1, 1], [-5, 2]], dtype), step=2)
    assert table.pull(keys).tolist() == [[-most - 1, 2], [-10, 4]]


@pytest.mark.parametrize("exponent", [1, 2, 3, 10, 1000, 2**40 - 1])
def test_powers_are_those_of_python(exponent: int) -> None:
    assert power(0.999, exponent) == pytest.approx(0.999**exponent, rel=1e-13)
    assert power(0.0, exponent) == 0.0
