"""Orders by samplers and weights are told apart by a number."""

from __future__ import annotations

import torch
from torch.utils.data import SubsetRandomSampler, WeightedRandomSampler

from tests.data.test_fingerprint import assert_told_apart
from trireme.data.order import Order
from trireme.samplers.orders import BatchSamplerOrder, SamplerOrder


def test_each_order_has_its_own_and_keeps_it() -> None:
    weights = torch.ones(20)

    def orders() -> list[Order]:
        return [
            Order(20),
            SamplerOrder(WeightedRandomSampler(weights, 20)),
            SamplerOrder(WeightedRandomSampler(weights, 19)),
            SamplerOrder(WeightedRandomSampler(weights, 19, replacement=False)),
            SamplerOrder(WeightedRandomSampler(range(20), 20)),
            SamplerOrder(SubsetRandomSampler(range(20))),
            SamplerOrder(SubsetRandomSampler(range(1, 21))),
            SamplerOrder([1, 2, 3]),
            SamplerOrder([1, 3, 2]),
            BatchSamplerOrder([[1, 2], [3]]),
            BatchSamplerOrder([[1], [2, 3]]),
        ]

    assert_told_apart(orders)
