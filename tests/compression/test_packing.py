"""Packed gradients as they are sent: deflated where that is shorter, and bounded where received."""

from __future__ import annotations

import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trireme.compression.packing import Packed, Packer, Residuals
from trireme.errors import FrameError
from trireme.ps.flat import PartBuffer
from trireme.ps.layout import Layout
from trireme.ps.messages import ParameterSpec

MODEL = [
    ParameterSpec("w", (60, 10), "float32", 0),
    ParameterSpec("b", (), "float32", 0),
    ParameterSpec("d", (70,), "float64", 0),
]


def buffer(values: torch.Tensor | None = None) -> PartBuffer:
    """One server's part of a model, with these numbers and then zeros in its first vector."""
    part = PartBuffer(Layout.of(MODEL, servers=1), 0)
    if values is not None:
        part.vectors[0][: values.numel()] = values
    return part


def sent(views: object) -> bytes:
    return b"".join(bytes(view) for view in views)  # type: ignore[attr-defined]


def receive(data: bytes, target: PartBuffer) -> None:
    unpacker = Packed("int8", target, deflates=True)
    assert unpacker.fits(len(data))
    rest = memoryview(data)
    for view in unpacker.place(len(data)):
        view[:] = rest[: view.nbytes]
        rest = rest[view.nbytes :]
    unpacker.unpack()


@given(seed=st.integers(0, 2**32 - 1), share=st.floats(0, 1))
def test_deflated_or_not_the_same_numbers_arrive(seed: int, share: float) -> None:
    """`share` of the numbers are zero, so that deflating is now shorter and now longer."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(600, generator=generator)
    values[torch.rand(600, generator=generator) < share] = 0
    plain, short = buffer(values), buffer(values)
    outs = []
    for source, deflates in ((plain, False), (short, True)):
        packer = Packer("int8", source, deflates=deflates)
        packer.pack()
        outs.append(sent(packer.views))
    assert len(outs[1]) <= len(outs[0])
    targets = [buffer(), buffer()]
    for data, target in zip(outs, targets, strict=True):
        receive(data, target)
    assert all(map(torch.equal, targets[0].vectors, targets[1].vectors))


def test_what_deflating_would_make_longer_goes_as_it_is() -> None:
    packed = Packed("int8", buffer(), deflates=True)
    packed.seal()
    assert sum(view.nbytes for view in packed.views) < 60, "zeros"
    for each in packed.packed:
        each.random_(0, 256)
    packed.seal()
    assert sent(packed.views) == b"".join(each.numpy().tobytes() for each in packed.packed)


def test_what_is_sent_does_not_change_with_the_next() -> None:
    """It may be sent again after its connection broke."""
    source = buffer(torch.ones(600))
    packer = Packer("int8", source, deflates=True)
    packer.pack()
    views, before = packer.views, sent(packer.views)
    source.vectors[0].zero_()
    packer.pack()
    assert sent(views) == before != sent(packer.views)


@pytest.mark.parametrize("deflates", [False, True])
def test_more_bytes_than_the_packed_form_has_never_fit(deflates: bool) -> None:
    unpacker = Packed("int8", buffer(), deflates=deflates)
    assert unpacker.fits(unpacker.nbytes)
    assert not unpacker.fits(unpacker.nbytes + 1)
    assert unpacker.fits(unpacker.nbytes - 1) == deflates
    assert not unpacker.fits(0)


PACKED = Packed("int8", buffer(), deflates=True).nbytes


def test_what_was_deflated_whole_is_taken() -> None:
    receive(zlib.compress(bytes(PACKED)), buffer())


@pytest.mark.parametrize(
    "data",
    [
        b"x" * 50,
        zlib.compress(b""),
        zlib.compress(bytes(1 << 20)),
        zlib.compress(bytes(PACKED))[:-1],
        zlib.compress(bytes(PACKED)) + b"x",
    ],
    ids=["noise", "empty", "too much", "cut", "more behind"],
)
def test_what_nobody_deflated_is_one_clear_error(data: bytes) -> None:
    with pytest.raises(FrameError, match="a packed gradient makes no sense: the deflated bytes"):
        receive(data if len(data) < 700 else data[:700], buffer())


@pytest.mark.parametrize("servers", [1, 3])
def test_what_was_lost_is_named_by_parameter_however_many_servers(servers: int) -> None:
    generator = torch.Generator().manual_seed(3)
    layout = Layout.of(MODEL, servers=servers)
    parts = [PartBuffer(layout, server) for server in range(servers)]
    packers = [Packer("int8", part) for part in parts]
    residuals = Residuals(layout, packers)
    assert {name: tuple(t.shape) for name, t in residuals.export().items()} == {
        spec.name: spec.shape for spec in MODEL
    }
    assert not any(tensor.any() for tensor in residuals.export().values())
    named = {spec.name: torch.randn(spec.shape, generator=generator) for spec in MODEL}
    residuals.restore(named)
    found = residuals.export()
    assert all(torch.equal(found[name], tensor) for name, tensor in named.items())
    other = Layout.of(MODEL, servers=2)
    others = [Packer("int8", PartBuffer(other, server)) for server in range(2)]
    Residuals(other, others).restore(found)
    again = Residuals(other, others).export()
    assert all(torch.equal(again[name], tensor) for name, tensor in named.items())
    residuals.restore({})
    assert not any(tensor.any() for tensor in residuals.export().values())


def test_what_was_lost_of_absent_parameters_waits_at_every_server() -> None:
    layout = Layout.of(MODEL, servers=3)
    (vector, start, stop), *_ = layout.ranges((len(MODEL) - 1,), 2)
    part = PartBuffer(layout, 2)
    packer = Packer("int8", part)
    at, begin = part.place(vector)
    assert begin > 0, "the part of the last server begins later"
    packer.residuals[at].fill_(0.25)
    packer.pack([(vector, start, stop)])
    assert (packer.residuals[at][start - begin : stop - begin] == 0.25).all()


def test_what_was_lost_of_absent_parameters_waits() -> None:
    gradients = buffer(torch.linspace(-1.0, 1.0, 600))
    gradients.vectors[1].fill_(0.3)
    packer = Packer("int8", gradients)
    packer.pack()
    lost = [residual.clone() for residual in packer.residuals]
    assert lost[0][:600].any()
    gradients.vectors[0].zero_()
    packer.pack([(0, 100, 300)])
    assert torch.equal(packer.residuals[0][100:300], lost[0][100:300])
    data = sent(packer.views)
    received = buffer()
    receive(data, received)
    assert not received.vectors[0][100:300].any()
    assert received.vectors[0][:100].any()
