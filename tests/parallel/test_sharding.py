from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from trireme.errors import ConfigurationError
from trireme.parallel.sharding import fully_sharded


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.factor = nn.Parameter(torch.tensor(1.0))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = self.layer(values) * self.factor
        return scaled


def test_a_number_without_dimensions_is_refused_by_name() -> None:
    no_mesh: Any = None
    with pytest.raises(ConfigurationError, match=r"'factor' is a number .* torch.ones\(1\)"):
        fully_sharded(Scaled(), no_mesh)
