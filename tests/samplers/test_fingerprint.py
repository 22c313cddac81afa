"""Orders by samplers and weights are told apart by a number."""

from __future__ import annotations

import torch

from tests.data.test_fingerprint import assert_told_apart
from trireme.data.order import Order
from trireme.samplers.orders import BatchSamplerOrder, SamplerOrder, SubsetOrder, WeightedOrder


def test_each_order_has_its_own_and_keeps_it() -> None:
    weights = torch.ones(20)

    def orders() -> list[Order]:
        return [
            Order(20),
            WeightedOrder(weights),
            WeightedOrder(weights, 19),
            WeightedOrder(weights, 19, replacement=False),
            WeightedOrder(torch.arange(20)),
            SubsetOrder(range(20)),
            SubsetOrder(range(1, 21)),
            SamplerOrder([1, 2, 3]),
            SamplerOrder([1, 3, 2]),
            BatchSamplerOrder([[1, 2], [3]]),
            BatchSamplerOrder([[1], [2, 3]]),
        ]

    assert_told_apart(orders)
