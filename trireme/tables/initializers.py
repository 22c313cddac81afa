"""The first values of rows: each element follows from (seed, key, column), in any order.

The random numbers are those of SplitMix64, started at a hash of seed and key: element by element
one more step of the counter. Uniform numbers have 53 random bits. Normal ones are the inverse of
the normal distribution's cumulative function at a uniform number (Wichura, Algorithm AS 241: The
Percentage Points of the Normal Distribution, Applied Statistics 37, 1988: PPND16), with a logarithm
of our own in the tails. Both are computed in float64 and rounded once to the dtype of the row, so
all machines have the same bits, whatever mathematical library they have: see
`trireme.tables.compiled` for what that relies on.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trireme.tables.compiled import compiled
from trireme.tables.keys import mix
from trireme.tables.table_spec import Constant, Initializer, Normal, Uniform

CONSTANT, UNIFORM, NORMAL = 0, 1, 2
"""The kinds of first values that kernels know; zeros are the constant 0."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_S11, _S12 = np.uint64(11), np.uint64(12)
_TO_UNIT = 2.0**-53
_TO_OPEN_UNIT = 2.0**-52
_LN2_HIGH = (
    6.93147180369123816490e-01  # its last 32 bits are zero: a product with an exponent is exact
)
_LN2_LOW = 1.90821492927058770002e-10
_ROOT_HALF = 0.7071067811865476


@compiled
def _logarithm(value: Any) -> Any:
    """Returns the natural logarithm of a float64 in (0, 1), to 1e-16: by IEEE arithmetic alone."""
    exponent = 0.0
    while value < _ROOT_HALF:
        value *= 2.0
        exponent -= 1.0
    ratio = (value - 1.0) / (value + 1.0)
    square = ratio * ratio
    total = 0.0
    for odd in range(23, 1, -2):  # artanh: square**11 / 23 is below 1e-18
        total = square * (total + 1.0 / odd)
    return exponent * _LN2_HIGH + (2.0 * ratio + (2.0 * ratio * total + exponent * _LN2_LOW))


@compiled
def _quantile(chance: Any) -> Any:
    """Returns the normal distribution's quantile of a float64 in (0, 1): PPND16."""
    middle = chance - 0.5
    if abs(middle) <= 0.425:
        r = 0.180625 - middle * middle
        above = (((((((2.5090809287301226727e3 * r + 3.3430575583588128105e4) * r
            + 6.7265770927008700853e4) * r + 4.5921953931549871457e4) * r
            + 1.3731693765509461125e4) * r + 1.9715909503065514427e3) * r
            + 1.3314166789178437745e2) * r + 3.3871328727963666080e0)  # fmt: skip
        below = (((((((5.2264952788528545610e3 * r + 2.8729085735721942674e4) * r
            + 3.9307895800092710610e4) * r + 2.1213794301586595867e4) * r
            + 5.3941960214247511077e3) * r + 6.8718700749205790830e2) * r
            + 4.2313330701600911252e1) * r + 1.0)  # fmt: skip
        return middle * above / below
    r = math.sqrt(-_logarithm(chance if middle < 0.0 else 1.0 - chance))
    if r <= 5.0:
        r -= 1.6
        above = (((((((7.74545014278341407640e-4 * r + 2.27238449892691845833e-2) * r
            + 2.41780725177450611770e-1) * r + 1.27045825245236838258e0) * r
            + 3.64784832476320460504e0) * r + 5.76949722146069140550e0) * r
            + 4.63033784615654529590e0) * r + 1.42343711074968357734e0)  # fmt: skip
        below = (((((((1.05075007164441684324e-9 * r + 5.47593808499534494600e-4) * r
            + 1.51986665636164571966e-2) * r + 1.48103976427480074590e-1) * r
            + 6.89767334985100004550e-1) * r + 1.67638483018380384940e0) * r
            + 2.05319162663775882187e0) * r + 1.0)  # fmt: skip
    else:
        r -= 5.0
        above = (((((((2.01033439929228813265e-7 * r + 2.71155556874348757815e-5) * r
            + 1.24266094738807843860e-3) * r + 2.65321895265761230930e-2) * r
            + 2.96560571828504891230e-1) * r + 1.78482653991729133580e0) * r
            + 5.46378491116411436990e0) * r + 6.65790464350110377720e0)  # fmt: skip
        below = (((((((2.04426310338993978564e-15 * r + 1.42151175831644588870e-7) * r
            + 1.84631831751005468180e-5) * r + 7.86869131145613259100e-4) * r
            + 1.48753612908506148525e-2) * r + 1.36929880922735805310e-1) * r
            + 5.99832206555887937690e-1) * r + 1.0)  # fmt: skip
    return -above / below if middle < 0.0 else above / below


@compiled
def fill_row(row: Any, width: Any, key: Any, first_values: Any) -> None:
    """Writes the first values of a key's row: its first `width` elements."""
    if first_values.kind == CONSTANT:
        for column in range(width):
            row[column] = first_values.constant[0]
        return
    numbers = first_values.numbers
    counter = mix(mix(key) ^ first_values.seed)
    for column in range(width):
        bits = mix(counter)
        counter += _GOLDEN
        if first_values.kind == UNIFORM:
            row[column] = numbers[0] + (numbers[1] - numbers[0]) * (float(bits >> _S11) * _TO_UNIT)
        else:  # the middle of one of 2**52 equal intervals, so neither 0 nor 1
            chance = (float(bits >> _S12) + 0.5) * _TO_OPEN_UNIT
            row[column] = numbers[0] + numbers[1] * _quantile(chance)


class FirstValues(NamedTuple):
    """An initializer as kernels take it."""

    kind: np.int64  # `CONSTANT`, `UNIFORM` or `NORMAL`
    constant: npt.NDArray[Any]  # of the dtype of the row and of shape (1,)
    numbers: npt.NDArray[np.float64]  # (low, high) or (mean, std)
    seed: np.uint64

    @classmethod
    def of(cls, initializer: Initializer, dtype: str) -> FirstValues:
        """Returns the first values that an initializer describes, for rows of a dtype."""
        kind, value, numbers, seed = CONSTANT, 0.0, (0.0, 0.0), 0
        match initializer:
            case Constant(value):
                pass
            case Uniform(low, high, seed):
                kind, numbers = UNIFORM, (low, high)
            case Normal(mean, std, seed):
                kind, numbers = NORMAL, (mean, std)
        return cls(
            np.int64(kind), np.array([value], dtype), np.array(numbers, np.float64), np.uint64(seed)
        )
