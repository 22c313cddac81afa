"""What a loop's model is called with: tensors of every layout, of which plain ones are compared."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from trireme.loops.batch_watch import BatchWatch

ROWS = torch.ones(4, 3)


class Sum(nn.Module):
    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return ROWS.sum()


def nested() -> torch.Tensor:
    return torch.nested.as_nested_tensor([ROWS[0], ROWS[1, :2], ROWS[2], ROWS[3]])


@pytest.mark.parametrize("make", [ROWS.to_sparse, ROWS.to_sparse_csr, nested])
@pytest.mark.parametrize("first", [True, False])
def test_sparse_and_nested_batches_count_and_are_not_compared(
    make: Callable[[], torch.Tensor], first: bool
) -> None:
    model = Sum()
    watch = BatchWatch(model)
    model(*([make(), ROWS] if first else [ROWS, make()]))
    assert watch.take_examples() == 4
    assert watch.digests == []
    model(ROWS)
    assert len(watch.digests) == 1
