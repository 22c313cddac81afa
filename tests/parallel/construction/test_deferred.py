"""A model that is built without memory, and of which some tensors become real."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from images.networks import CifarNetwork, LeNet5
from language.networks import LSTMLanguageModel, Transformer
from torch import nn
from torch.nn import functional as F

from trireme.errors import ConfigurationError
from trireme.parallel.construction.deferred import Deferred, deferred

_SEED = 5


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {**parameters, **dict(model.named_buffers(remove_duplicate=False))}


def _ordinary(build: Callable[[], nn.Module]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    torch.manual_seed(_SEED)
    model = build()
    return _tensors(model), torch.get_rng_state()


def _deferred(build: Callable[[], nn.Module]) -> Deferred:
    torch.manual_seed(_SEED)
    made = deferred(build)
    assert all(tensor.is_meta for tensor in _tensors(made.model).values())
    return made


def _check(build: Callable[[], nn.Module], *, singly: bool = True) -> None:
    """Compares all tensors together, and each alone, with those of an ordinary construction."""
    expected, state = _ordinary(build)
    for names in [tuple(expected), *([(name,) for name in expected] if singly else [])]:
        made = _deferred(build)
        assert torch.equal(torch.get_rng_state(), state)
        made.materialise(names)
        assert torch.equal(torch.get_rng_state(), state)
        found = _tensors(made.model)
        assert list(found) == list(expected)
        for name in names:
            assert torch.equal(found[name], expected[name]), name
            assert found[name].stride() == expected[name].stride()
            assert found[name].requires_grad == expected[name].requires_grad
            assert type(found[name]) is type(expected[name])
        named = {id(found[name]) for name in names}
        assert all(t.is_meta for t in found.values() if id(t) not in named)


class _Odd(nn.Module):
    """Makes its tensors in many ways."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", torch.arange(10))
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)).bool())
        self.register_buffer("literal", torch.tensor([1.0, 2, 3]) + 1)
        self.register_buffer("outside", torch.from_numpy(torch.rand(3).numpy()))
        self.table = nn.Embedding(7, 5, padding_idx=2)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.table.weight
        self.layer = nn.Linear(5, 6)
        nn.init.orthogonal_(self.layer.weight)
        nn.init.trunc_normal_(self.layer.bias)
        self.tight = nn.Parameter(nn.init.trunc_normal_(torch.empty(40), std=9, a=-1, b=1))
        self.rates = [float(rate) for rate in torch.linspace(0, 0.1, 4)]
        self.more_rates = torch.linspace(0, 0.1, 4).tolist()
        with torch.no_grad():
            self.layer.weight[0].copy_(torch.randn(5))
            self.table.weight[torch.tensor([0, 3])] = 0.5
            self.table.weight[self.table.weight > 1] = 1.0
        self.conv = nn.Conv2d(4, 4, 3)
        nn.init.dirac_(self.conv.weight)
        self.kept = nn.Parameter(F.dropout(torch.ones(20)))
        self.counts = nn.Parameter(torch.poisson(torch.rand(9) * 4))
        self.chosen = nn.Parameter(torch.multinomial(torch.rand(9), 3).float())
        if torch.rand(1).item() > 0.5:
            self.perhaps = nn.Parameter(torch.rand(3))
        generator = torch.Generator().manual_seed(3)
        self.own = nn.Parameter(torch.rand(3, generator=generator))
        nn.init.normal_(self.own, generator=generator)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.forked = nn.Parameter(torch.rand(3))
        self.beside = nn.Buffer(torch.rand(3, dtype=torch.float64).to(self.forked.device))
        self.like = nn.Parameter(torch.randn_like(self.forked) + 1)
        self.basis = nn.Parameter(torch.linalg.qr(torch.randn(5, 3))[0].T)
        self.found = nn.Parameter(torch.nonzero(torch.rand(5) > 0.5).float())
        self.copied = copy.deepcopy(self.layer)
        self.frozen = nn.Parameter(torch.rand(2), requires_grad=False)


def _reinitialised() -> nn.Module:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.xavier_normal_(module.weight)
            nn.init.constant_(module.bias, 0.5)

    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).apply(init)


_BUILDS: dict[str, Callable[[], nn.Module]] = {
    "lenet": LeNet5,
    "language model": lambda: LSTMLanguageModel(11, 8, 2),
    "transformer": lambda: Transformer(11, 8, 2, 2, 6),
    "torch's transformer": lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True),
    "apply": _reinitialised,
    "odd": _Odd,
    "double": lambda: _Odd().double(),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4)),
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(3, 4)),
}


@pytest.mark.parametrize("name", _BUILDS)
def test_values_and_generator_are_those_of_a_construction(name: str) -> None:
    _check(_BUILDS[name])


def test_a_network_with_rejection_sampling() -> None:
    _check(CifarNetwork, singly=False)


@given(st.lists(st.tuples(st.integers(0, 15), st.integers(0, 5), st.integers(0, 5)), max_size=25))
def test_random_constructors(steps: list[tuple[int, int, int]]) -> None:
    def build() -> nn.Module:
        model = nn.Module()
        held = [torch.zeros(4, 5), torch.rand(4, 5), torch.ones(5, 4).t()]
        for action, one, other in steps:
            a, b = held[one % len(held)], held[other % len(held)]
            _ACTIONS[action % len(_ACTIONS)](held, a, b)
        for number, tensor in enumerate(held):
            if number % 2:
                model.register_buffer(f"t{number}", tensor)
            else:
                model.register_parameter(f"t{number}", nn.Parameter(tensor))
        return model

    _check(build)


_ACTIONS: list[Callable[[list[torch.Tensor], torch.Tensor, torch.Tensor], object]] = [
    lambda held, a, b: held.append(torch.randn(4, 5)),
    lambda held, a, b: held.append(a + b),
    lambda held, a, b: held.append(a.t().contiguous().t()),
    lambda held, a, b: a.normal_(),
    lambda held, a, b: a.uniform_(-1, 1),
    lambda held, a, b: a.copy_(b),
    lambda held, a, b: a[1].copy_(b[2]),
    lambda held, a, b: a.view_as(a)[:, ::2].exponential_(),
    lambda held, a, b: a.mul_(b).add_(0.5),
    lambda held, a, b: nn.init.orthogonal_(a),
    lambda held, a, b: nn.init.trunc_normal_(a),
    lambda held, a, b: a.bernoulli_(b.sigmoid()),
    lambda held, a, b: torch.manual_seed(len(held)),
    lambda held, a, b: a.fill_(b.sum().item() if bool(b.isfinite().all()) else 1.0),
    lambda held, a, b: held.append(torch.rand_like(a)),
    lambda held, a, b: setattr(a, "data", b.clone()),
]


# -- identity ---------------------------------------------------------------------------------


def test_optimizers_and_ties_keep_their_tensors() -> None:
    made = _deferred(lambda: LSTMLanguageModel(11, 8, 1))
    optimizer = torch.optim.Adam(made.model.parameters())
    made.model.get_parameter("embedding.weight").note = "kept"  # type: ignore[attr-defined]
    made.materialise(made.names)
    assert made.model.get_parameter("embedding.weight").note == "kept"  # type: ignore[attr-defined]
    held = optimizer.param_groups[0]["params"]
    assert all(a is b for a, b in zip(held, made.model.parameters(), strict=True))
    before = [parameter.detach().clone() for parameter in held]
    made.model(torch.zeros(2, 3, dtype=torch.int64)).square().sum().backward()
    optimizer.step()
    assert not all(torch.equal(a, b) for a, b in zip(before, held, strict=True))

    odd = _deferred(_Odd)
    odd.materialise(["head.weight"])
    tied = odd.model.get_parameter("table.weight")
    assert tied is odd.model.get_parameter("head.weight") and not tied.is_meta


def test_a_model_is_exported_before_and_after() -> None:
    build = lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))  # noqa: E731
    expected, _ = _ordinary(build)
    made = _deferred(build)
    exported = torch.export.export(made.model, (torch.empty(2, 3, device="meta"),))
    made.materialise(["0.weight", "1.running_mean"])
    made.materialise(["0.bias"])
    assert torch.equal(made.model.get_parameter("0.weight"), expected["0.weight"])
    assert made.model.get_parameter("1.weight").is_meta
    made.materialise(made.names)
    assert exported.graph_signature.parameters
    whole = torch.export.export(made.model, (torch.ones(2, 3),)).module()
    assert torch.equal(whole(torch.ones(2, 3)), made.model(torch.ones(2, 3)))


def test_plain_attributes_can_be_made_real() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mask = torch.tril(torch.ones(3, 3))

    made = _deferred(Masked)
    assert made.names == () and made.attributes == ("mask",)
    assert made.model.mask.is_meta
    made.materialise(made.attributes)
    assert torch.equal(made.model.mask, Masked().mask)  # type: ignore[arg-type]


# -- refusals ---------------------------------------------------------------------------------


def test_what_is_on_another_device_is_refused_with_its_line() -> None:
    with pytest.raises(ConfigurationError, match=r"test_deferred.py, line \d+: .*xpu"):
        deferred(lambda: nn.Linear(2, 2, device="xpu"))


def test_a_tensor_from_elsewhere_is_not_changed() -> None:
    given_tensor = torch.ones(3)

    def build() -> nn.Module:
        given_tensor.mul_(2)
        return nn.Linear(2, 2)

    with pytest.raises(ConfigurationError, match=r"made elsewhere"):
        deferred(build)
    assert torch.equal(given_tensor, torch.ones(3))


def test_the_errors_of_a_constructor_name_their_line() -> None:
    def build() -> nn.Module:
        raise ValueError("two heads are better")

    with pytest.raises(ConfigurationError, match=r"test_deferred.py.*two heads are better"):
        deferred(build)


def test_unknown_names_and_changed_tensors_are_refused() -> None:
    made = _deferred(lambda: nn.Linear(2, 2))
    with pytest.raises(ConfigurationError, match="no tensor 'wait'"):
        made.materialise(["wait"])
    made.model.half()
    with pytest.raises(ConfigurationError, match="not the tensor that the model's constructor"):
        made.materialise(["weight"])


# -- memory -----------------------------------------------------------------------------------

_MEASURE = """
import torch
from torch import nn
from trireme.parallel.construction.deferred import deferred

def model(width):
    class Residual(nn.Sequential):
        def __init__(self):
            super().__init__(*[nn.Linear(width, width) for _ in range(16)])
            for layer in self:
                nn.init.INIT(layer.weight)
    return Residual

def kib(field):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))

small = deferred(model(64))
small.materialise(small.names)
before = kib("VmRSS")
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
made = deferred(model(2560))
made.materialise([n for n in made.names if int(n.split(".")[0]) % 4 == 1])
print((kib("VmHWM") - before) / 1024)
"""


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("init", "tensors"),
    [("xavier_uniform_", 1), pytest.param("trunc_normal_", 5, marks=pytest.mark.thorough)],
)
def test_memory_is_that_of_the_named_tensors(init: str, tensors: int) -> None:
    one = 25.0  # MiB of a weight; the model has 400
    code = _MEASURE.replace("INIT", init)
    # Without holes that glibc may leave in its heap: they are no memory of the tape.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    said = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    assert float(said.stdout) < 4 * one + tensors * one + 15
