"""What a table is made of: its rows, their first values, their optimizer, and how long they stay.

All of it is numbers and words, so that a specification travels in a message and in a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeAlias

import msgspec

from trireme.errors import ConfigurationError, suggestion
from trireme.wire.message import Name

FLOATS = ("float32", "float64")
INTEGERS = ("int64", "int32")
ITEM_SIZES = {"float32": 4, "float64": 8, "int64": 8, "int32": 4}
"""Bytes of one element, for every dtype that a row may have."""

MOST_NAME = 200  # the most characters of a table's name

MOST_COLUMNS = 1 << 20  # the most columns of a row

MOST_TOUCHES = (1 << 24) - 1  # A row's touches are counted up to this number, and stay there

MOST_STEPS = (1 << 40) - 1  # the largest step that a row remembers


def _check(holds: bool, what: str, value: object, rule: str) -> None:
    if not holds:
        raise ConfigurationError(f"{what} is {value!r}: {rule}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


_RANGES: Mapping[str, tuple[Callable[[float], bool], str]] = {
    **dict.fromkeys(
        ("lr", "eps", "initial_accumulator_value", "beta", "l1", "l2"),
        (lambda value: value >= 0, "it is at least 0"),
    ),
    **dict.fromkeys(("alpha", "std"), (lambda value: value > 0, "it is above 0")),
    **dict.fromkeys(
        ("beta1", "beta2"), (lambda value: 0 <= value < 1, "it is at least 0 and below 1")
    ),
    "seed": (
        lambda value: isinstance(value, int) and 0 <= value < 1 << 63,
        "it is an integer from 0 to 2**63 - 1",
    ),
}
"""What holds for a number of that name, and how it is said; any finite number for others."""


class _Numbers(msgspec.Struct, frozen=True, tag=True):
    """Base of values whose fields are finite numbers."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value, what = getattr(self, name), f"{type(self).__name__}.{name}"
            _check(_is_number(value), what, value, "it is a finite number")
            if name in _RANGES:
                holds, rule = _RANGES[name]
                _check(holds(value), what, value, rule)


class Zeros(_Numbers, frozen=True, tag=True):
    """New rows are zero."""


class Constant(_Numbers, frozen=True, tag=True):
    """Each element of a new row has the same value.

    Attributes:
        value: that value, an integer for a table of integers.
    """

    value: float | int


class Uniform(_Numbers, frozen=True, tag=True):
    """The elements of new rows are uniformly distributed in [low, high).

    An element follows from (seed, key, column) alone. The largest may be rounded to `high`.

    Attributes:
        low, high: the bounds, `low` below `high`.
        seed: the seed, from 0 to 2**63 - 1.
    """

    low: float
    high: float
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        span = self.high - self.low
        _check(span > 0, "Uniform.low", self.low, f"it is below high, {self.high!r}")
        _check(math.isfinite(span), "Uniform.high - low", span, "it is a finite number")


class Normal(_Numbers, frozen=True, tag=True):
    """The elements of new rows are normally distributed.

    An element follows from (seed, key, column) alone.

    Attributes:
        mean: the mean.
        std: the standard deviation, above 0.
        seed: the seed, from 0 to 2**63 - 1.
    """

    mean: float = 0.0
    std: float = 1.0
    seed: int = 0


Initializer: TypeAlias = Zeros | Constant | Uniform | Normal
"""How the first values of a row are made."""


class SGD(_Numbers, frozen=True, tag=True):
    """Stochastic gradient descent, as `torch.optim.SGD` without momentum. No state.

    Attributes:
        lr: the learning rate, at least 0.
    """

    lr: float


class Adagrad(_Numbers, frozen=True, tag=True):
    """Adagrad, as `torch.optim.Adagrad`: a sum of squares for each element.

    Source: Duchi et al., Adaptive Subgradient Methods for Online Learning and Stochastic
    Optimization (JMLR 2011), figure 1 with a diagonal matrix.

    Attributes:
        lr: the learning rate, at least 0.
        eps: is added to the root of the sum, at least 0.
        initial_accumulator_value: the sum of squares of a new row, at least 0.
    """

    lr: float
    eps: float = 1e-10
    initial_accumulator_value: float = 0.0


class RowWiseAdagrad(Adagrad, frozen=True, tag=True):
    """Adagrad with one accumulator for each row: the sum of the means of its squared gradients.

    Source: Gupta et al., Training Recommender Systems at Scale (2020), section 3; the same
    optimizer is `EXACT_ROWWISE_ADAGRAD` in FBGEMM.
    """


class SparseAdam(_Numbers, frozen=True, tag=True):
    """Lazy Adam, as `torch.optim.SparseAdam`: moments change where there is a gradient.

    The bias correction is that of the step that a push names, not of a counter of each row.

    Attributes:
        lr: the learning rate, at least 0.
        beta1, beta2: the decay rates of both moments, from 0 to less than 1.
        eps: is added to the root of the second moment, at least 0.
    """

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8


class FTRL(_Numbers, frozen=True, tag=True):
    """FTRL-proximal for each coordinate: sparse linear models.

    Source: McMahan et al., Ad Click Prediction: a View from the Trenches (KDD 2013), algorithm 1.
    A first value other than 0 holds until the first update only: what follows it is computed from
    the sums of gradients, as in TensorFlow's `Ftrl`.

    Attributes:
        alpha: the learning rate, above 0.
        beta: is added to the root of the sum of squares, at least 0.
        l1, l2: the strengths of the regularization, at least 0.
    """

    alpha: float
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0


class Add(_Numbers, frozen=True, tag=True):
    """Adds each update to its row: counters, and sums that the workers have scaled themselves.

    Integers wrap around as numpy's do.
    """


class Plugged(msgspec.Struct, frozen=True, tag=True):
    """A row optimizer that an installed package adds, on the host of every server.

    Attributes:
        name: the name of its entry point in the group `trireme.row_optimizers`.
        numbers: its hyper-parameters by name, finite numbers; all that it has.
    """

    name: Name
    numbers: dict[str, float]

    def __post_init__(self) -> None:
        for name, value in self.numbers.items():
            _check(_is_number(value), f"{self.name}.{name}", value, "it is a finite number")


Optimizer: TypeAlias = SGD | Adagrad | RowWiseAdagrad | SparseAdam | FTRL | Add | Plugged
"""How an update changes a row."""


def optimizer_name(optimizer: Optimizer) -> str:
    """Returns the name of a row optimizer."""
    return optimizer.name if isinstance(optimizer, Plugged) else type(optimizer).__name__


class TableSpec(msgspec.Struct, frozen=True):
    """A table: the shape of its rows, how they begin, how they change, and when they go.

    Attributes:
        name: the table's name, of 1 to 200 characters.
        width: the number of columns, from 1 to 2**20.
        optimizer: how an update changes a row; `Add` for integers.
        dtype: the dtype of a row: float32, float64, int64 or int32.
        initializer: the first values of a row; zeros or an integer constant for integers.
        admit_after: the touch at which a key gets a row, from 1. Updates of earlier touches are
            counted and not applied.
        drop_after: the number of steps after which a key that no update touched is dropped; 0 for
            never.

    Raises:
        ConfigurationError: a value is out of range, or values contradict each other.
    """

    name: Name
    width: int
    optimizer: Optimizer
    dtype: str = "float32"
    initializer: Initializer = Zeros()
    admit_after: int = 1
    drop_after: int = 0

    def __post_init__(self) -> None:
        name: object = self.name  # what a program gave: types are checked when a message is read
        named = isinstance(name, str) and 0 < len(name) <= MOST_NAME
        _check(named, "a table's name", name, f"it is a text of 1 to {MOST_NAME} characters")
        table = f"table {self.name!r}: "
        close = suggestion(str(self.dtype), ITEM_SIZES)
        _check(self.dtype in ITEM_SIZES, f"{table}dtype", self.dtype,
               f"it is one of {', '.join(ITEM_SIZES)}{close}")  # fmt: skip
        for field, least, most in (
            ("width", 1, MOST_COLUMNS),
            ("admit_after", 1, MOST_TOUCHES),
            ("drop_after", 0, MOST_STEPS),
        ):
            value = getattr(self, field)
            whole = isinstance(value, int) and not isinstance(value, bool)
            _check(whole and least <= value <= most, f"{table}{field}", value,
                   f"it is an integer from {least} to {most}")  # fmt: skip
        for field, kinds in (("initializer", Initializer), ("optimizer", Optimizer)):
            value = getattr(self, field)
            known = ", ".join(kind.__name__ for kind in kinds.__args__)
            _check(isinstance(value, kinds), f"{table}{field}", value, f"it is one of {known}")
        if self.dtype in INTEGERS:
            self._check_integers(table)

    def _check_integers(self, table: str) -> None:
        advice = f"a table of {self.dtype} has"
        _check(isinstance(self.optimizer, Add), f"{table}optimizer", self.optimizer,
               f"{advice} the optimizer Add; choose a dtype of floats for another")  # fmt: skip
        if not isinstance(self.initializer, Zeros):
            bits = 8 * ITEM_SIZES[self.dtype] - 1
            value = self.initializer.value if isinstance(self.initializer, Constant) else None
            whole = isinstance(value, int) and -1 << bits <= value < 1 << bits
            rule = f"{advice} the initializer Zeros, or Constant with an integer of that dtype"
            _check(whole, f"{table}initializer", self.initializer, rule)

    @property
    def item_size(self) -> int:
        """Bytes of one element."""
        return ITEM_SIZES[self.dtype]


def changed(optimizer: Optimizer, hyper: Mapping[str, float]) -> Optimizer:
    """Returns the optimizer with other values of the hyper-parameters that are named."""
    own = optimizer.numbers if isinstance(optimizer, Plugged) else None
    fields = optimizer.__struct_fields__ if own is None else tuple(own)
    for name in hyper:
        known = f"it has {', '.join(fields)}" if fields else "it has none"
        _check(name in fields, f"a hyper-parameter of {optimizer_name(optimizer)}", name,
               f"{known}{suggestion(name, fields)}")  # fmt: skip
    if own is not None:
        return msgspec.structs.replace(optimizer, numbers={**own, **hyper})
    return msgspec.structs.replace(optimizer, **hyper)
