"""Where a chain of layers is cut into stages."""

from __future__ import annotations

import itertools
from collections import OrderedDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from images.networks import LeNet5
from language.networks import Transformer
from torch import nn

from trireme.errors import ConfigurationError
from trireme.parallel.config import PipelineConfig
from trireme.parallel.stages import Stage, balance, chain_of, cut_at, parameter_costs


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=9), st.integers(1, 4))
def test_the_dearest_stage_is_as_cheap_as_can_be(costs: list[float], stages: int) -> None:
    if stages > len(costs):
        with pytest.raises(ConfigurationError, match="a stage needs at least one"):
            balance(costs, stages)
        return

    def worst(cuts: tuple[int, ...]) -> float:
        return max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *cuts, len(costs))))

    found = tuple(balance(costs, stages))
    every = itertools.combinations(range(1, len(costs)), stages - 1)
    assert worst(found) == pytest.approx(min(map(worst, every)))
    assert len(found) == stages - 1


@pytest.mark.parametrize("count", [1, 2, 3])
def test_stages_in_turn_compute_what_the_model_computes(count: int) -> None:
    model = Transformer(11, 8, 2, 3, 6)
    links = chain_of(model)
    bounds = [0, *balance(parameter_costs(links), count), len(links)]
    value = tokens = torch.randint(11, (2, 6))
    names: list[str] = []
    for start, stop in itertools.pairwise(bounds):
        stage = Stage(links[start:stop])
        names += [name for name, _ in stage.named_parameters()]
        value = stage(value)
    assert torch.equal(value, model(tokens))
    assert names == [name for name, _ in model.named_parameters()], "names are the model's"


def test_chains_inside_a_chain_are_cut_too() -> None:
    names = [name for name, _ in chain_of(LeNet5())]
    assert names[:4] == ["flat", "images", "features.0", "features.1"]
    assert names[-1] == "classifier.5"


def test_what_is_no_chain_is_refused_with_what_to_do() -> None:
    class Forked(nn.Module):
        pass

    with pytest.raises(ConfigurationError, match=r"Forked cannot be split.*--strategy fsdp"):
        chain_of(Forked())


def chain() -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            a=nn.Linear(2, 2), b=nn.Sequential(nn.Linear(2, 2), nn.ReLU()), c=nn.Linear(2, 2)
        )
    )


def test_split_points_name_where_stages_begin() -> None:
    links = chain_of(chain())
    assert cut_at(links, ["b"]) == [1]
    assert cut_at(links, ["b.1", "c"]) == [2, 3]
    with pytest.raises(
        ConfigurationError, match=r"'d' is not a layer: the layers are a, b\.0, b\.1, c"
    ):
        cut_at(links, ["d"])
    for wrong in (["c", "b"], ["a"], ["b", "b"]):
        with pytest.raises(ConfigurationError, match="in the model's order"):
            cut_at(links, wrong)


def test_a_rehearsal_leaves_no_trace() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    stage = Stage(chain_of(model))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    stage.rehearses = True
    torch.manual_seed(1)
    state = torch.get_rng_state()
    stage(torch.full((3, 4), torch.nan))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    stage(torch.randn(3, 4))
    assert not torch.equal(model[1].running_mean, before["1.running_mean"])


@pytest.mark.parametrize(
    ("config", "examples", "pieces"),
    [
        (PipelineConfig(), 16, 4),
        (PipelineConfig(), 6, 3),
        (PipelineConfig(), 7, 1),
        (PipelineConfig(microbatches=8), 16, 8),
        (PipelineConfig(microbatches=8), 4, 4),
        (PipelineConfig(schedule="interleaved", microbatches=5), 12, 4),
    ],
)
def test_batches_are_cut_into_as_many_equal_pieces_as_can_be(
    config: PipelineConfig, examples: int, pieces: int
) -> None:
    assert config.pieces(examples, 2) == pieces


def test_impossible_pipelines_say_why() -> None:
    with pytest.raises(ConfigurationError, match="there are gpipe, 1f1b"):
        PipelineConfig(schedule="2f2b")
    with pytest.raises(ConfigurationError, match="it must be 1 or more"):
        PipelineConfig(microbatches=0)
    with pytest.raises(ConfigurationError, match="or --schedule 1f1b"):
        PipelineConfig(schedule="interleaved").pieces(7, 2)
