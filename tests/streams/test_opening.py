"""What a loader cannot do with a stream is refused when it is made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import trireme
from tests.data.sources import Flow
from trireme.errors import ConfigurationError


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_workers": 2}, "Use num_workers=1"),
        ({"shuffle": True}, "Shuffle in the data set itself"),
        ({"sampler": [0]}, "can only be read in its own order"),
        ({"resized": True}, "can only be read in its own order"),
        ({"by": "shard"}, "has no num_shards above 1"),
    ],
)
def test_a_stream_refuses_what_it_cannot_do(options: dict[str, Any], says: str) -> None:
    model = nn.Linear(2, 1)
    session = trireme.Session(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ConfigurationError, match=says), session:
        session.loader(Flow(5), 2, **options)
