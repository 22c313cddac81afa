"""Codecs: sizes known beforehand, errors within their service_limits, and nothing lost for good."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trireme import job_config
from trireme.compression.codec import CODECS, BlockInt8, Codec, ErrorFeedback, TopK, make_codec
from trireme.errors import ConfigurationError

NAMES = [*CODECS, "topk:0.1"]


def roundtrip(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    data = torch.full((codec.nbytes(values.numel()),), 0xAA, dtype=torch.uint8)
    codec.encode(values, data)
    out = torch.full_like(values, float("nan"))
    codec.decode(data, out)
    return out


@pytest.mark.parametrize("name", NAMES)
@given(count=st.integers(0, 1100), seed=st.integers(0, 2**32 - 1))
def test_every_number_is_written(name: str, count: int, seed: int) -> None:
    codec = make_codec(name)
    assert codec is not None
    values = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    assert bool(roundtrip(codec, values).isfinite().all())


@pytest.mark.parametrize(("name", "bits"), [("fp16", 11), ("bf16", 8)])
def test_half_precision_keeps_its_bits(name: str, bits: int) -> None:
    codec = make_codec(name)
    assert codec is not None
    values = torch.randn(10_000)
    error = (roundtrip(codec, values) - values).abs()
    assert bool((error <= values.abs() * 2.0**-bits + 1e-7).all())


def test_fp16_clamps_what_does_not_fit_instead_of_making_it_infinite() -> None:
    codec = make_codec("fp16")
    assert codec is not None
    assert roundtrip(codec, torch.tensor([1e6, -1e6])).tolist() == [65504.0, -65504.0]


def test_int8_is_within_half_a_step_of_each_blocks_own_scale() -> None:
    values = torch.randn(1000) * torch.logspace(-6, 6, 1000)
    out = roundtrip(BlockInt8(), values)
    for start in range(0, 1000, 256):
        block = values[start : start + 256]
        step = block.abs().max() / 127
        assert bool(((out[start : start + 256] - block).abs() <= 0.5001 * step).all())


def test_int8_of_zeros_is_zeros() -> None:
    assert not roundtrip(BlockInt8(), torch.zeros(300)).any()


def test_topk_keeps_the_largest_exactly_and_drops_the_rest() -> None:
    values = torch.arange(-50.0, 50.0)
    out = roundtrip(TopK(0.1), values)
    kept = values.abs().topk(10).indices
    assert torch.equal(out[kept], values[kept])
    assert int((out != 0).sum()) == 10


def test_topk_refuses_places_that_are_not_there() -> None:
    data = torch.zeros(TopK(0.1).nbytes(100), dtype=torch.uint8)
    data[:4] = 0x7F
    with pytest.raises(ValueError, match="outside"):
        TopK(0.1).decode(data, torch.zeros(100))


@pytest.mark.parametrize(
    ("name", "size"), [("fp16", 2000), ("bf16", 2000), ("int8", 1016), ("topk:0.1", 800)]
)
def test_sizes_are_known_beforehand(name: str, size: int) -> None:
    codec = make_codec(name)
    assert codec is not None
    assert codec.nbytes(1000) == size


@pytest.mark.parametrize("name", NAMES)
def test_with_feedback_the_sum_of_what_arrives_follows_the_sum_of_what_was_sent(name: str) -> None:
    """What is missing at any time is at most what the last messages lost."""
    codec = make_codec(name)
    assert codec is not None
    generator = torch.Generator().manual_seed(1)
    feedback = ErrorFeedback(codec, 500)
    data = torch.zeros(codec.nbytes(500), dtype=torch.uint8)
    sent, arrived, one = torch.zeros(500), torch.zeros(500), torch.zeros(500)
    bias = torch.randn(500, generator=generator) * 0.01
    behind = []
    for _ in range(400):
        values = bias + 0.001 * torch.randn(500, generator=generator)
        feedback.encode(values, data)
        codec.decode(data, one)
        sent += values
        arrived += one
        behind.append(float((sent - arrived).abs().max()))
    assert behind[-1] <= 1.5 * max(behind[50:200]) + 1e-4  # bounded, not growing
    assert behind[-1] < 0.25 * float(sent.abs().max())


def test_without_feedback_topk_loses_the_small_ones_for_good() -> None:
    """The check above can fail: this is what it is there to catch."""
    codec, values = TopK(0.1), torch.arange(1.0, 101.0)
    arrived = sum(roundtrip(codec, values) for _ in range(50))
    assert isinstance(arrived, torch.Tensor)
    assert float(arrived[:90].sum()) == 0.0


@pytest.mark.parametrize("name", ["int9", "topk:x", "topk:0", "topk:2", "fp16:3"])
def test_unknown_codecs_are_refused(name: str) -> None:
    with pytest.raises(ConfigurationError):
        make_codec(name)


def test_a_misspelt_codec_gets_a_suggestion() -> None:
    with pytest.raises(ConfigurationError, match="did you mean bf16"):
        make_codec("bf61")


def test_the_command_line_knows_these_codecs() -> None:
    assert set(job_config.CODECS) == {"none", *CODECS}


@pytest.mark.thorough
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_is_forgotten(name: str, bad: float) -> None:
    codec = make_codec(name)
    assert codec is not None
    feedback = ErrorFeedback(codec, 300)
    data = torch.zeros(codec.nbytes(300), dtype=torch.uint8)
    values = torch.linspace(-1.0, 1.0, 300)
    spoilt = values.clone()
    spoilt[7] = bad
    feedback.encode(spoilt, data)
    out = torch.zeros(300)
    total = torch.zeros(300)
    for _ in range(1000):  # what was lost before comes after it: nothing of the rest is
        feedback.encode(values, data)
        codec.decode(data, out)
        total += out
    assert bool(total.isfinite().all())
    assert torch.allclose(total / 1000, values, atol=0.2)
