"""What looks at the values of one replica of a shard: nothing, unless a plug-in does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from trireme.ps.flat import PartBuffer
from trireme.ps.messages import Push
from trireme.ps.shard.values.parameters import Values


class Watch:
    """Looks at one replica. Each method does nothing unless a subclass overrides it."""

    def accepts(self, task: str, push: Push, gradients: PartBuffer) -> bool:
        """Returns whether a gradient is as its worker has sent it; else its link is closed.

        Args:
            task: the task that it has come from.
        """
        return True

    def before_change(self, step: int, values: Values) -> None:
        """Called before an update changes the values of a step."""

    def after_change(self, step: int, values: Values) -> None:
        """Called after an update has changed the values, which are of a step now."""

    def digest(self, values: Values, sent: Sequence[torch.Tensor]) -> int:
        """Returns a digest of the values that an answer carries; 0 where none was taken."""
        return 0

    def status(self) -> Mapping[str, float | str]:
        """Returns what the server tells of it."""
        return {}
