"""Steps of an optimizer over pieces of a shard that do without `torch.optim`, by a plug-in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from trireme.plugins import Plugins
from trireme.ps.flat import PartBuffer
from trireme.ps.shard.values.piece import Piece

Bound: TypeAlias = tuple[Mapping[str, Any], Sequence[Piece], Sequence[Mapping[str, torch.Tensor]]]
"""The hyper-parameters of a group, pieces of it, and the state of each."""


class DirectSteps:
    """Makes no step, so that `torch.optim` makes all of them."""

    def step(self, gradients: PartBuffer, divisor: float, absent: tuple[int, ...]) -> bool:
        """Makes a step like the one after which pieces were bound; False where none were.

        It updates values and state in place, and may divide the gradients in place.
        """
        return False

    def bind(self, absent: tuple[int, ...], found: Sequence[Bound]) -> None:
        """Takes what torch has updated in a step without gradients of the parameters `absent`."""

    def clear(self) -> None:
        """Forgets all that was bound, as pieces or their state are replaced."""

    def refresh(self) -> None:
        """Takes other hyper-parameters, which the groups that were bound have already."""


@dataclass(frozen=True, slots=True)
class DirectStepsType:
    """A kind of such steps."""

    open: Callable[..., DirectSteps]  # the function (name, *, wide); see `direct_steps`


KERNELS = Plugins("trireme.kernels", "kind of kernels", DirectStepsType)  # `fused` is used


def direct_steps(name: str, *, wide: bool) -> DirectSteps:
    """Returns the steps of an optimizer of `torch.optim` that has fused kernels.

    Args:
        name: of its class.
        wide: whether all values are float32 or float64.
    """
    kind = KERNELS.find("fused")
    return DirectSteps() if kind is None else kind.open(name, wide=wide)
