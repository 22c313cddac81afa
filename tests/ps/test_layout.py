"""Where parameters lie: aligned, contiguous, and the same however many servers hold them."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trireme.errors import ConfigurationError, ModelMismatchError
from trireme.ps.layout import ALIGNMENT, DEFAULT_SLOTS, ITEM_SIZES, Layout
from trireme.ps.messages import LayoutSpec, ParameterSpec

SMALL = [
    ParameterSpec("weight", (3, 7), "float32", 0),
    ParameterSpec("scale", (5,), "float64", 1),
    ParameterSpec("bias", (3,), "float32", 1),
    ParameterSpec("embedding", (40, 2), "float32", 0),
]

parameters = st.lists(
    st.builds(
        ParameterSpec,
        st.uuids().map(str),
        st.lists(st.integers(0, 30), max_size=3).map(tuple),
        st.sampled_from(list(ITEM_SIZES)),
        st.integers(0, 2),
    ),
    max_size=12,
)


def test_parameters_are_grouped_by_dtype_then_group_in_the_models_order() -> None:
    layout = Layout.of(SMALL, servers=1)
    names = [p.name for p in layout.spec.parameters]
    assert names == ["weight", "embedding", "bias", "scale"]
    assert [vector.dtype for vector in layout.vectors] == ["float32", "float64"]
    single = layout.vectors[0]
    assert [(p.parameter.name, p.start, p.stop) for p in single.placed] == [
        ("weight", 0, 21),
        ("embedding", 32, 112),
        ("bias", 112, 115),
    ]
    assert single.length == 128
    assert single.groups == ((0, 0, 112), (1, 112, 128))
    assert layout.elements == 21 + 5 + 3 + 80
    assert layout.bytes == 128 * 4 + 8 * 8


def test_a_segment_ends_where_a_part_or_a_group_ends() -> None:
    layout = Layout.of(SMALL, servers=2, slots=8)
    assert [(part.start, part.stop) for part in layout.parts(0)] == [(0, 64), (0, 0)]
    assert [(part.start, part.stop) for part in layout.parts(1)] == [(64, 128), (0, 8)]
    assert [(s.group, s.start, s.stop) for s in layout.segments(0)] == [(0, 0, 64)]
    assert [(s.vector.dtype, s.group, s.start, s.stop) for s in layout.segments(1)] == [
        ("float32", 0, 64, 112),
        ("float32", 1, 112, 128),
        ("float64", 1, 0, 8),
    ]
    assert layout.parts(1)[0].bytes == 64 * 4


@given(given_parameters=parameters, servers=st.integers(1, 9), more=st.integers(0, 60))
def test_every_element_has_one_place_and_one_server(
    given_parameters: list[ParameterSpec], servers: int, more: int
) -> None:
    layout = Layout.of(given_parameters, servers=servers, slots=servers + more)
    placed = {p.parameter: p for vector in layout.vectors for p in vector.placed}
    assert len(placed) == len(given_parameters)
    for vector in layout.vectors:
        step = ALIGNMENT // vector.item_size
        end = 0
        for parameter in vector.placed:
            assert parameter.start == end, "no gap but padding"
            assert parameter.start % step == 0
            assert parameter.stop - parameter.start == math.prod(parameter.parameter.shape)
            end = -(-parameter.stop // step) * step
        assert end == vector.length
        assert [g[1] for g in vector.groups] == [0, *(g[2] for g in vector.groups[:-1])]
    for index, vector in enumerate(layout.vectors):
        parts = [layout.parts(server)[index] for server in range(servers)]
        assert parts[0].start == 0
        assert parts[-1].stop == vector.length
        for before, after in pairwise(parts):
            assert before.stop == after.start
            assert after.start * vector.item_size % ALIGNMENT == 0
    for server in range(servers):
        covered = sum(s.stop - s.start for s in layout.segments(server))
        assert covered == sum(part.length for part in layout.parts(server))
        for segment in layout.segments(server):
            groups = [
                g for g, start, stop in segment.vector.groups if start <= segment.start < stop
            ]
            assert segment.group in groups


@given(servers=st.integers(1, 40), slots=st.integers(1, 300))
def test_slots_are_dealt_out_evenly_and_in_order(servers: int, slots: int) -> None:
    if slots < servers:
        return
    layout = Layout.of(SMALL, servers=servers, slots=slots)
    held = [slot for server in range(servers) for slot in layout.slots_of(server)]
    assert held == list(range(slots))
    sizes = {len(layout.slots_of(server)) for server in range(servers)}
    assert max(sizes) - min(sizes) <= 1


def test_there_are_always_enough_slots() -> None:
    assert Layout.of(SMALL, servers=1).spec.slots == DEFAULT_SLOTS
    assert Layout.of(SMALL, servers=300).spec.slots == 300


def test_the_servers_share_the_bytes_of_a_large_model_evenly() -> None:
    layout = Layout.of([ParameterSpec("w", (1000, 1000), "float32", 0)], servers=3)
    sizes = [sum(part.bytes for part in layout.parts(server)) for server in range(3)]
    assert sum(sizes) == layout.bytes
    assert max(sizes) - min(sizes) <= layout.bytes / DEFAULT_SLOTS + 2 * ALIGNMENT  # one slot


# What cannot be --------------------------------------------------------------------------------


@pytest.mark.parametrize("bounds", [(), (0,), (1, 4), (0, 0, 4), (0, 3, 2)])
def test_a_shard_without_slots_cannot_be(bounds: tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError, match="at least one slot for each"):
        Layout(LayoutSpec(tuple(SMALL), bounds))


def test_a_layout_over_no_server_cannot_be() -> None:
    with pytest.raises(ConfigurationError, match="over 0 servers"):
        Layout.of(SMALL, servers=0)


def test_a_layout_is_divided_anew() -> None:
    layout = Layout.of(SMALL, servers=2, slots=8)
    other = layout.divided((0, 2, 6, 8))
    assert [list(other.slots_of(shard)) for shard in range(3)] == [[0, 1], [2, 3, 4, 5], [6, 7]]
    assert other.vectors == layout.vectors
    assert layout.divided(layout.spec.bounds) is layout


def test_what_cannot_be_trained_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"'steps' has dtype int64.*float64, float32"):
        Layout.of([*SMALL, ParameterSpec("steps", (1,), "int64", 0)], servers=1)


def test_the_same_models_agree() -> None:
    Layout.of(SMALL, servers=2).check_same(Layout.of(SMALL, servers=2), whose="a", others="b")


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (
            Layout.of([ParameterSpec("weight", (3, 8), "float32", 0), *SMALL[1:]], servers=2),
            r"parameter 0 is 'weight' \(3x7 float32, group 0\) at worker:1 and "
            r"'weight' \(3x8 float32, group 0\) at worker:2",
        ),
        (
            Layout.of(SMALL[:1] + SMALL[2:], servers=2),
            r"parameter 3 is 'scale' \(5 float64, group 1\) at worker:1 and missing at worker:2",
        ),
        (
            Layout.of([*SMALL, ParameterSpec("z", (), "float64", 2)], servers=2),
            r"parameter 4 is missing at worker:1 and 'z' \(scalar",
        ),
        (Layout.of(SMALL, servers=3), "in 2 shards at worker:1, 256 in 3 at worker:2"),
    ],
    ids=["shape", "one less", "one more", "servers"],
)
def test_the_first_difference_is_named(other: Layout, said: str) -> None:
    with pytest.raises(ModelMismatchError, match=said):
        Layout.of(SMALL, servers=2).check_same(other, whose="worker:1", others="worker:2")
