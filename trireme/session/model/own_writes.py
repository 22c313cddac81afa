"""What a program writes to the values of its model itself, between two updates of the job.

Weight clipping, `load_state_dict` in the middle of training and new initial values are such writes.
A lone process trains the values as they are. Elsewhere other processes have values too, and a
plug-in finds the writes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from trireme.plugins import Plugins
from trireme.ps.snapshot import ModelState


class OwnWrites:
    """Judges the writes since the last update of the job; this class notices none."""

    def remember(self, step: int) -> None:
        """Takes the present values as those of the job, at a global step."""

    def check(self) -> str:
        """Checks that the next update replaces nothing that the program has written.

        Returns a warning if autograd has counted a write and the values do not show what has
        changed; else an empty string.
        """
        return ""

    def to_send(self, held: Callable[[], ModelState]) -> tuple[dict[str, torch.Tensor], int] | None:
        """Returns all values and their digest, where the program has written to some.

        Args:
            held: returns what the servers have, where the values here do not tell.
        """
        return None

    @contextmanager
    def ours(self, names: Collection[str] = ()) -> Iterator[None]:
        """Lets the package write values during the block, and forgets writes to these names."""
        yield


@dataclass(frozen=True, slots=True)
class WritesType:
    """What finds the writes of programs.

    Attributes:
        open: the function from a `TrainingSetup` to its `OwnWrites`, as `package.module:function`.
    """

    open: str


def own_writes_of(setup: Any) -> OwnWrites:
    """Returns what judges the writes of the program to a model."""
    kinds = Plugins("trireme.writes", "watch", WritesType)
    if "watched" not in kinds:
        return OwnWrites()
    watched: OwnWrites = kinds.imported("watched", "open")(setup)
    return watched
