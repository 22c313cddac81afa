"""`--strategy lookahead`: rounds of local steps, of whose mean the servers go a part of the way.

Source: Zhang et al., Lookahead Optimizer: k steps forward, 1 step back (NeurIPS 2019), with the
mean of all workers' fast weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from trireme.errors import ConfigurationError
from trireme.ps.rule import Rule
from trireme.strategies import Strategy


@dataclass(frozen=True)
class Lookahead(Strategy):
    """Each worker makes `every` steps alone; then the values move towards the workers' mean.

    Attributes:
        every: the steps between two exchanges, at least 1.
        share: how much of the way the values go, above 0 and at most 1.
    """

    name: ClassVar[str] = "lookahead"
    every: int = 5
    share: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigurationError(f"lookahead with share {self.share}: above 0, at most 1")

    def rule(self) -> Rule:
        return Rule(aggregate=0, staleness=0, every=self.every)

    def outer(self, workers: int) -> Mapping[str, float | bool]:
        return {"lr": self.share}
