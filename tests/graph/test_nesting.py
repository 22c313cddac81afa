"""Inputs and outputs of captured graphs keep their nesting, and a dynamic batch size."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from tests.graph.equality import assert_same
from trireme.errors import ConfigurationError
from trireme.graph.capture.capture import capture


class Calling(nn.Module):
    """A module whose forward is a function of the module and its inputs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.linear = nn.Linear(4, 4)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def test_nested_inputs_and_outputs() -> None:
    def forward(self: Any, pair: Any, *, more: Any, factor: float) -> Any:
        values = self.linear(pair[0] + more["x"]) * factor
        return {"values": values, "rest": (pair[1], [values.sum(), None, 3])}

    class Named(Calling):
        def forward(self, pair: Any, *, more: Any, factor: float) -> Any:
            return self.function(self, pair, more=more, factor=factor)

    model = Named(forward)
    captured = capture(
        model,
        [(torch.ones(3, 4), torch.zeros(3))],
        {"more": {"x": torch.ones(3, 4)}, "factor": 2.0},
    )
    assert captured.batch.dynamic

    def call(pair: Any, more: Any) -> Any:
        return captured(pair, factor=2.0, more=more)

    eager = Calling(lambda self, pair, more: forward(self, pair, more=more, factor=2.0))
    eager.load_state_dict(model.state_dict())
    for rows in (3, 5):
        pair, more = (torch.randn(rows, 4), torch.zeros(rows)), {"x": torch.randn(rows, 4)}
        found, expected = call(pair, more), eager(pair, more)
        assert found.keys() == expected.keys() and found["rest"][1][1:] == [None, 3]
        assert torch.equal(found["values"], expected["values"])
    with pytest.raises(ConfigurationError, match=r"does not take these inputs: .*factor"):
        captured(pair, more=more, factor=3.0)
    with pytest.raises(ConfigurationError, match="does not take these inputs"):
        captured(pair[0], more=more, factor=2.0)


class Pair(NamedTuple):
    logits: torch.Tensor
    rest: Any


@dataclass
class Registered:
    logits: torch.Tensor
    loss: torch.Tensor | None = None


torch.export.register_dataclass(Registered)


@dataclass
class Unregistered:
    logits: torch.Tensor


@pytest.mark.parametrize(
    "make",
    [
        lambda values: Pair(values, [values.sum(), None]),
        lambda values: OrderedDict(logits=values, past=((values, values), (values.exp(),))),
        lambda values: {"logits": values, "pair": Pair(values, {"sum": values.sum()})},
        lambda values: Registered(values, values.mean()),
    ],
    ids=["named tuple", "ordered dict", "dict", "dataclass"],
)
def test_outputs_keep_their_nesting(make: Callable[[torch.Tensor], Any]) -> None:
    model = Calling(lambda self, x: make(self.linear(x)))
    captured = capture(model, [torch.ones(3, 4)])
    assert captured.batch.dynamic
    assert type(captured(torch.ones(5, 4))) is type(make(torch.ones(5, 4)))
    assert_same(captured, model, [torch.randn(3, 4)], [torch.randn(5, 4)])


def test_inputs_of_registered_classes_have_a_dynamic_size() -> None:
    model = Calling(lambda self, x: self.linear(x.logits))
    captured = capture(model, [Registered(torch.ones(3, 4))])
    assert captured.batch.dynamic
    assert_same(captured, model, [Registered(torch.randn(5, 4))])
    with pytest.raises(ConfigurationError, match=r"nested otherwise .*expected .*Registered"):
        captured(Pair(torch.ones(3, 4), None))


@pytest.mark.parametrize("inside", [True, False], ids=["output", "input"])
def test_classes_that_torch_does_not_know_are_refused(inside: bool) -> None:
    made = Unregistered(torch.ones(3, 4))
    model = Calling(lambda self, x: Unregistered(self.linear(x)) if inside else x.logits * 2)
    with pytest.raises(ConfigurationError, match=r"Unregistered, whose .*register_dataclass"):
        capture(model, [torch.ones(3, 4) if inside else made])
