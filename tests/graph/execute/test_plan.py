"""The order of the events of a batch, on random cut graphs."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import torch
from hypothesis import given
from hypothesis import strategies as st

from trireme.graph.execute.cut import Cut, Segment, Value
from trireme.graph.execute.plan import BATCH, Message, plan


@st.composite
def cuts(draw: st.DrawFn) -> Cut:
    """Draws segments at random places that read random values of earlier ones, without modules."""
    places = draw(st.integers(1, 4))
    place = st.integers(0, places - 1)
    kept = {
        f"parameter {i}": Value(f"parameter {i}", draw(place), (), (), torch.float32, True, "p")
        for i in range(draw(st.integers(0, 2)))
    }
    found: dict[str, tuple[int, int, int, bool]] = {}  # place, depth, part, differentiable
    read: list[tuple[int, int, int, list[str]]] = []
    for number in range(draw(st.integers(1, 6))):
        at, names = draw(place), [*kept, *found]
        reads = draw(st.lists(st.sampled_from(names), max_size=3, unique=True)) if names else []
        reads = [each for each in reads if each in found or kept[each].place != at]
        above = [found[each][:3] for each in reads if each in found]
        # A late segment reads the values of the early one of its place and depth.
        least = [depth + (place != at or part == 1) for place, depth, part in above]
        depth = draw(st.integers(0, 1)) if not least else max(least)
        late = (at, depth, 0) in above or draw(st.booleans())
        read.append((at, depth, int(late), reads))
        found[f"value {number}"] = at, depth, int(late), draw(st.booleans())
    readers: dict[str, set[int]] = {name: set() for name in (*kept, *found)}
    for at, _, _, reads in read:
        for name in reads:
            if at != (kept[name].place if name in kept else found[name][0]):
                readers[name].add(at)
    values = {
        name: Value(name, each.place, tuple(sorted(readers[name])), (), torch.float32, True, "p")
        for name, each in kept.items()
        if readers[name]
    } | {
        name: Value(name, at, tuple(sorted(readers[name])), (), torch.float32, trained)
        for name, (at, _, _, trained) in found.items()
    }
    segments = [
        Segment(at, depth, part, cast("Any", None), tuple(reads), (), (f"value {number}",))
        for number, (at, depth, part, reads) in enumerate(read)
    ]
    segments[-1] = Segment(*read[-1][:3], cast("Any", None), tuple(read[-1][3]), (), ())
    del values[f"value {len(read) - 1}"]
    ordered = sorted(segments, key=lambda each: (each.depth, each.place, each.part))
    return Cut(tuple(ordered), values, (), cast("Any", None), cast("Any", None))


cases = given(cut=cuts(), trained=st.lists(st.booleans(), min_size=1, max_size=4))


@cases
def test_every_message_is_sent_once_and_received_once_and_later(
    cut: Cut, trained: list[bool]
) -> None:
    events = plan(cut, trained)
    sent = [(each, at) for at, event in enumerate(events) for each in event.sends]
    received = [(each, at) for at, event in enumerate(events) for each in event.receives]
    assert Counter(each for each, _ in sent) == Counter(each for each, _ in received)
    assert len(set(sent)) == len(dict(sent)) == len(sent)
    when = dict(received)
    for message, at in sent:
        assert when[message] > at
        assert events[at].place == message.sender != message.receiver
        assert events[when[message]].place == message.receiver


@cases
def test_every_segment_runs_once_after_what_it_depends_on(cut: Cut, trained: list[bool]) -> None:
    events = plan(cut, trained)
    when = {(each.kind, each.segment, each.microbatch): at for at, each in enumerate(events)}
    assert len(when) == len([each for each in events if each.segment >= 0]) + len(
        {each.kind for each in events if each.segment < 0}
    )
    makers = {name: i for i, each in enumerate(cut.segments) for name in each.outputs}
    for number, backward in enumerate(trained):
        for i, segment in enumerate(cut.segments):
            forward = when["forward", i, number]
            assert (("backward", i, number) in when) == backward
            if number:  # running statistics change in the order of the micro-batches
                assert forward > when["forward", i, number - 1]
            if backward:
                assert when["backward", i, number] > forward
            for maker in (makers[name] for name in segment.receives if name in makers):
                assert forward > when["forward", maker, number]
                if backward:
                    assert when["backward", i, number] < when["backward", maker, number]


@cases
def test_early_segments_are_before_late_ones_forward_and_after_them_backward(
    cut: Cut, trained: list[bool]
) -> None:
    events = plan(cut, trained)
    when = {(each.kind, each.segment, each.microbatch): at for at, each in enumerate(events)}
    for i, one in enumerate(cut.segments):
        for j, other in enumerate(cut.segments):
            if one.depth == other.depth and one.part < other.part:
                for number, backward in enumerate(trained):
                    assert when["forward", i, number] < when["forward", j, number]
                    if backward:
                        assert when["backward", i, number] > when["backward", j, number]


@cases
def test_values_are_released_after_their_last_use(cut: Cut, trained: list[bool]) -> None:
    kept: set[tuple[str, int, int]] = set()
    for event in plan(cut, trained):
        key = event.place, event.microbatch
        segment = cut.segments[event.segment] if event.segment >= 0 else None
        if event.kind == "forward" and segment is not None:
            kept |= {(each.name, *key) for each in event.receives if each.microbatch != BATCH}
            kept |= {(name, *key) for name in segment.outputs}
            assert all(
                (name, *key) in kept for name in segment.receives if not cut.values[name].attribute
            )
        for name in event.releases:
            kept.remove((name, *key))
    assert not kept


@given(cut=cuts(), count=st.integers(1, 9))
def test_1f1b_bounds_the_micro_batches_between_forward_and_backward(cut: Cut, count: int) -> None:
    depths = 1 + max(each.depth for each in cut.segments)
    between: Counter[int] = Counter()
    for event in plan(cut, [True] * count):
        if event.segment >= 0:
            between[event.segment] += 1 if event.kind == "forward" else -1
            assert between[event.segment] <= depths - cut.segments[event.segment].depth


def test_a_parameter_is_sent_once_a_batch_and_its_gradient_comes_back_once() -> None:
    value = Value("w", 0, (1,), (), torch.float32, True, "w")
    made = Value("x", 1, (0,), (), torch.float32, True)
    segments = (
        Segment(1, 0, 0, cast("Any", None), ("w",), (), ("x",)),
        Segment(0, 1, 1, cast("Any", None), ("x",), (), ()),
    )
    cut = Cut(segments, {"w": value, "x": made}, (), cast("Any", None), cast("Any", None))
    sent = [each for event in plan(cut, [True] * 3) for each in event.sends]
    assert [each for each in sent if each.name == "w"] == [
        Message("w", 0, 1, BATCH, back=False),
        Message("w", 1, 0, BATCH, back=True),
    ]
