"""Captured graphs compute what the model computes, and what cannot be captured is refused."""

from __future__ import annotations

import inspect
import logging
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from images.networks import CifarNetwork
from language.networks import LSTMLanguageModel, Transformer
from torch import nn

from tests.graph.equality import assert_same
from trireme.errors import ConfigurationError
from trireme.graph.capture.capture import capture
from trireme.graph.capture.source import scope, source_line
from trireme.models import MLP


class Calling(nn.Module):
    """A module whose forward is a function of the module and its inputs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))
        self.count = 0
        self.notes: dict[str, torch.Tensor] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(4, 4)
        self.again = self.head

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        values = self.norm(self.conv(images)).relu().mean((2, 3))
        return self.again(self.dropout(self.head(values)))


def images(batch: int, channels: int = 3, size: int = 8) -> tuple[torch.Tensor]:
    return (torch.randn(batch, channels, size, size, generator=torch.Generator().manual_seed(0)),)


def tokens(batch: int) -> tuple[torch.Tensor]:
    return (torch.randint(0, 20, (batch, 6), generator=torch.Generator().manual_seed(0)),)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[torch.Tensor]]]] = {
    "mlp": (lambda: MLP(48, 8, 4), lambda batch: images(batch, 3, 4)),
    "cifar": (lambda: CifarNetwork(size=8), images),
    "lstm": (lambda: LSTMLanguageModel(20, 8, 2, 0.3), tokens),
    "transformer": (lambda: Transformer(20, 8, 2, 2, 6, 0.3), tokens),
    "normed": (Normed, images),
    "torch transformer": (
        lambda: nn.Sequential(
            nn.Embedding(20, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        ),
        tokens,
    ),
}


@pytest.mark.slow(one_in=2)
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "training"), [*((name, True) for name in MODELS), ("lstm", False), ("normed", False)]
)
def test_models_equal_eager_with_any_batch_size(name: str, training: bool) -> None:
    torch.manual_seed(0)
    build, batch = MODELS[name]
    model = build().train(training)
    captured = capture(model, batch(4))
    assert captured.batch.dynamic and captured.training is training
    assert_same(captured, model, batch(4), batch(7), batch(1), tolerance=1e-6)


def test_the_graph_holds_the_models_own_tensors_and_shared_ones_once() -> None:
    model = Normed()
    module = capture(model, images(4)).module
    own = {id(each) for each in [*model.parameters(), *model.buffers()]}
    held = [*module.parameters(), *module.buffers()]
    assert {id(each) for each in held} == own and len(held) == len(own)
    named = [node.target for node in module.graph.find_nodes(op="get_attr")]
    assert len([each for each in named if "weight" in each]) == 3  # conv, norm, head = again


def test_an_optimizer_of_the_model_trains_the_graph() -> None:
    model = Normed()
    captured = capture(model, images(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = captured(*images(4)).square().sum()
    for _ in range(3):
        optimizer.zero_grad()
        captured(*images(4)).square().mean().backward()
        optimizer.step()
    assert captured(*images(4)).square().sum() < before


def test_capturing_leaves_model_inputs_and_random_states() -> None:
    model = Normed()
    given = images(4)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    states = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    capture(model, given)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), str(np.random.get_state()))
    assert torch.equal(given[0], images(4)[0])
    assert all(each.grad is None for each in model.parameters())


def test_each_mode_is_captured_as_it_is() -> None:
    model = Normed()
    assert_same(capture(model, images(4)), model, images(4))
    model.eval()
    assert_same(capture(model, images(4)), model, images(4))
    model.train()
    model.norm.eval()  # a frozen batch norm is a third graph
    assert_same(capture(model, images(4)), model, images(4))


def test_nodes_keep_scope_source_shape_and_dtype() -> None:
    model = Normed()
    graph = capture(model, images(4)).module.graph
    (conv,) = graph.find_nodes(op="call_function", target=torch.ops.aten.conv2d.default)
    first = inspect.getsourcelines(Normed.forward)[1]
    assert source_line(conv) == f"{__file__}:{first + 1}"
    assert scope(conv) == "conv"
    value = conv.meta["val"]
    assert value.shape[1:] == (4, 6, 6) and value.dtype is torch.float32
    assert not isinstance(value.shape[0], int)
    for node in graph.nodes:
        if node.op == "call_function":
            assert source_line(node) and node.meta["val"] is not None


def twice(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * 2


def test_lines_are_those_of_functions_that_forward_calls() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        chosen = torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (x,))
        with torch.no_grad():
            steady = twice(x)
        return twice(self.linear(chosen)) + steady

    module = capture(Calling(forward), [torch.ones(4, 4)]).module
    line = inspect.getsourcelines(twice)[1] + 1
    first = inspect.getsourcelines(forward)[1]
    found: dict[str, set[int]] = {}
    for node in module.graph.nodes:
        if node.op == "call_function" and "getitem" not in node.name:
            file, _, number = source_line(node).rpartition(":")
            assert file == __file__
            found.setdefault(str(node.target), set()).add(int(number))
    assert found["aten.sin.default"] == found["aten.mul.Tensor"] == {line}
    assert found["aten.linear.default"] == found["aten.add.Tensor"] == {first + 4}
    assert found["wrap_with_set_grad_enabled"] == {line}  # a region, by the first in it
    assert {first + 1} == found["aten.sum.default"]


def test_composite_operators_stay_whole() -> None:
    graph = capture(Transformer(20, 8, 2, 1, 6), tokens(4)).module.graph
    names = {str(node.target) for node in graph.nodes}
    assert {"aten.linear.default", "aten.scaled_dot_product_attention.default"} <= names
    graph = capture(LSTMLanguageModel(20, 8, 1), tokens(4)).module.graph
    assert "aten.lstm.input" in {str(node.target) for node in graph.nodes}


def test_a_model_that_fixes_the_batch_size_is_static_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Calling(lambda self, x: self.linear(x).reshape(4, -1))
    with caplog.at_level(logging.WARNING):
        captured = capture(model, [torch.ones(4, 4)])
    assert not captured.batch.dynamic and captured.batch.size == 4
    assert "batches of 4 examples only" in caplog.text and "size()[0] == 4" in caplog.text
    assert_same(captured, model, [torch.randn(4, 4)])
    with pytest.raises(ConfigurationError, match="the model's code fixes it"):
        captured(torch.ones(5, 4))


def test_a_condition_on_the_batch_size_is_checked() -> None:
    captured = capture(
        Calling(lambda self, x: self.linear(x) if x.shape[0] > 2 else x), [torch.ones(4, 4)]
    )
    assert captured.batch.dynamic
    captured(torch.ones(3, 4))
    with pytest.raises(ConfigurationError, match="does not take these inputs"):
        captured(torch.ones(2, 4))


def test_a_number_that_changes_is_refused_with_what_to_do() -> None:
    captured = capture(
        Calling(lambda self, x, scale: self.linear(x) * scale), [torch.ones(4, 4), 1.0]
    )
    captured(torch.ones(3, 4), 1.0)
    with pytest.raises(ConfigurationError, match="make those that change tensors"):
        captured(torch.ones(3, 4), 2.0)


def test_an_example_of_one_row_makes_a_dynamic_graph() -> None:
    model = Normed().eval()
    captured = capture(model, images(1))
    assert captured.batch.dynamic
    assert_same(captured, model, images(1), images(5))


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(values)
        return values * values

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * 100


def branch(self: Any, x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        return self.linear(x)
    return x


def loop(self: Any, x: torch.Tensor) -> torch.Tensor:
    for _ in range(int(x.abs().sum())):
        x = self.linear(x)
    return x


def with_numpy(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.linear(x) + torch.from_numpy(x.numpy())


def counts(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.count += 1
    return self.linear(x) * self.count


def notes(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.notes["last"] = self.linear(x)
    return self.notes["last"]


def hooks(self: Any, x: torch.Tensor) -> torch.Tensor:
    values = self.linear(x)
    if values.requires_grad:
        values.register_hook(lambda gradient: gradient * 2)
    return values


def python_random(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.linear(x) * random.random()


def numpy_random(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.linear(x) * float(np.random.rand())


def generator(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.linear(x) + torch.rand(4, generator=torch.Generator().manual_seed(3))


def clamps(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        self.linear.weight.clamp_(-0.1, 0.1)
    return self.linear(x)


def test_a_condition_of_torch_may_have_parameters() -> None:
    def conditional(self: Any, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        return torch.cond(h.sum() > 0, lambda y: self.linear(y), lambda y: y * 2, (h,))

    model = Calling(conditional)
    captured = capture(model, [torch.ones(4, 4)])
    assert_same(captured, model, [torch.ones(4, 4)], [-torch.ones(4, 4)])


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_refused(kind: type[nn.Module]) -> None:
    model = nn.Sequential(kind(5, 4, sparse=True), nn.Linear(4, 4))
    with pytest.raises(ConfigurationError, match=r"gradient of 0\.weight is sparse.*sparse=False"):
        capture(model, [torch.ones(4, 2, dtype=torch.long)])


@pytest.mark.parametrize(
    ("function", "says", "line"),
    [
        (branch, "depends on the value of a tensor", 1),
        (loop, "depends on the value of a tensor", 1),
        (with_numpy, "numpy", 1),
        (counts, "forward assigns count", None),
        (notes, "forward assigns notes", None),
        (hooks, "computes something else than the model: the gradient of", None),
        (python_random, "random numbers of Python or NumPy", None),
        (numpy_random, "random numbers of Python or NumPy", None),
        (generator, "torch.Generator", 1),
        (clamps, "changes the parameters linear.weight in place", None),
        (lambda self, x: Square.apply(self.linear(x)), "backward pass of Square", None),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_cannot_be_captured_is_refused_with_its_line(
    function: Callable[..., Any], says: str, line: int | None, capfd: pytest.CaptureFixture[str]
) -> None:
    model = Calling(function)
    with pytest.raises(ConfigurationError, match=r"--strategy graph cannot capture Calling") as it:
        capture(model, [torch.ones(4, 4)])
    assert says in str(it.value)
    if line is not None:
        assert f"{__file__}:{inspect.getsourcelines(function)[1] + line}" in str(it.value)
    assert (model.count, model.notes) == (0, {})
    assert model.linear(torch.ones(1, 4)).shape == (1, 4)  # no fake tensors are left behind
    out, err = capfd.readouterr()
    assert "def forward" not in out + err


def test_carried_state_is_refused_and_stays_empty() -> None:
    model = LSTMLanguageModel(20, 8, 1, carry=True)
    with pytest.raises(ConfigurationError, match=r"forward assigns lstm_0._states"):
        capture(model, tokens(4))
    assert model(*tokens(3)).shape == (3, 6, 20)


def test_the_models_own_errors_are_raised_as_they_are() -> None:
    with pytest.raises(ValueError, match="the context is 4"):
        capture(Transformer(20, 8, 2, 1, 4), tokens(2))


def test_buffers_that_forward_updates_are_the_models() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen * 0.5 + x.mean(0)
        with torch.no_grad():
            self.seen.add_(1)
        return self.linear(x) + self.seen

    model = Calling(forward)
    captured = capture(model, [torch.ones(4, 4)])
    assert_same(captured, model, [torch.randn(4, 4)], [torch.randn(6, 4)])
    assert model.seen.abs().sum() > 0
