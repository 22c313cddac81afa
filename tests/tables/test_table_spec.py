"""Table specifications: what they accept, and that they survive a message."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from trireme.errors import ConfigurationError
from trireme.tables.table_spec import (
    FTRL,
    SGD,
    Adagrad,
    Add,
    Constant,
    Normal,
    RowWiseAdagrad,
    SparseAdam,
    TableSpec,
    Uniform,
    Zeros,
    changed,
)

INFINITE = float("inf")


@pytest.mark.parametrize("initializer", [Zeros(), Constant(1), Uniform(-1.0, 1.0, 7), Normal()])
@pytest.mark.parametrize(
    "optimizer",
    [SGD(0.1), Adagrad(0.1), RowWiseAdagrad(0.1), SparseAdam(), FTRL(0.1), Add()],
    ids=lambda each: type(each).__name__,
)
def test_a_specification_survives_a_message(initializer: Any, optimizer: Any) -> None:
    spec = TableSpec("words", 16, optimizer, "float64", initializer, admit_after=3, drop_after=9)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=TableSpec) == spec


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"name": ""}, "a table's name is ''"),
        ({"name": 3}, "a table's name is 3"),
        ({"width": 0}, "table 'words': width is 0: it is an integer from 1 to"),
        ({"width": 1.0}, "width is 1.0"),
        ({"width": True}, "width is True"),
        ({"dtype": "float23"}, r"dtype is 'float23'.*did you mean float32"),
        ({"dtype": "int64", "optimizer": SGD(0.1)}, "a table of int64 has the optimizer Add"),
        ({"dtype": "int64", "initializer": Normal()}, "the initializer Zeros, or Constant"),
        ({"dtype": "int32", "initializer": Constant(1 << 31)}, "with an integer of that dtype"),
        ({"dtype": "int32", "initializer": Constant(0.5)}, "with an integer of that dtype"),
        ({"optimizer": Zeros()}, "optimizer is Zeros.*: it is one of SGD, Adagrad"),
        ({"initializer": Add()}, "initializer is Add.*: it is one of Zeros, Constant"),
        ({"admit_after": 0}, "admit_after is 0"),
        ({"drop_after": -1}, "drop_after is -1"),
    ],
    ids=lambda each: str(each)[:40],
)
def test_a_value_out_of_range_is_refused_by_name(values: dict[str, Any], says: str) -> None:
    given: dict[str, Any] = {"name": "words", "width": 2, "optimizer": Add(), **values}
    with pytest.raises(ConfigurationError, match=says):
        TableSpec(**given)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: SGD(-1.0), r"SGD.lr is -1.0: it is at least 0"),
        (lambda: SGD(INFINITE), r"SGD.lr is inf: it is a finite number"),
        (lambda: SGD("1"), r"SGD.lr is '1': it is a finite number"),
        (lambda: Adagrad(0.1, -1e-3), r"Adagrad.eps"),
        (lambda: RowWiseAdagrad(0.1, initial_accumulator_value=-1.0), r"RowWiseAdagrad.initial"),
        (lambda: SparseAdam(beta2=1.0), r"SparseAdam.beta2 is 1.0"),
        (lambda: FTRL(0.0), r"FTRL.alpha is 0.0: it is above 0"),
        (lambda: FTRL(0.1, l1=-1.0), r"FTRL.l1"),
        (lambda: Uniform(1.0, 1.0), r"Uniform.low is 1.0: it is below high, 1.0"),
        (lambda: Uniform(-1e308, 1e308), r"Uniform.high - low"),
        (lambda: Normal(std=0.0), r"Normal.std"),
        (lambda: Normal(seed=-1), r"Normal.seed is -1"),
        (lambda: Uniform(0.0, 1.0, seed=1 << 63), r"Uniform.seed"),
    ],
    ids=[*"abcdefghijklm"],
)
def test_numbers_are_checked(make: Any, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        make()


def test_hyper_parameters_change_by_name() -> None:
    assert changed(Adagrad(0.1), {"lr": 0.2, "eps": 1e-3}) == Adagrad(0.2, 1e-3)
    with pytest.raises(ConfigurationError, match=r"of Adagrad is 'lrr': it has lr, eps, .*mean lr"):
        changed(Adagrad(0.1), {"lrr": 0.2})
    with pytest.raises(ConfigurationError, match=r"Adagrad.lr is -0.2"):
        changed(Adagrad(0.1), {"lr": -0.2})
    with pytest.raises(ConfigurationError, match="it has none"):
        changed(Add(), {"lr": 0.2})
