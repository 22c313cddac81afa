"""How long who waits looks for what has not come, before going to sleep."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Spin"]


@dataclass(frozen=True, slots=True)
class Spin:
    """Looking again and again costs processor time, and being woken costs time.

    So who computes long between two waits may look long: at most `share` of that time is spent.

    Attributes:
        least: seconds that one may always look.
        most: seconds that one never looks longer than.
        share: of the time since the last wait was over, between the two.
    """

    least: float
    most: float
    share: float = 0.0

    def seconds(self, apart: float) -> float:
        """Returns how long to look.

        Args:
            apart: seconds since the last wait was over.
        """
        return min(max(self.least, self.share * apart), self.most)
