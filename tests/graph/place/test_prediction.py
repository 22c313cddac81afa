"""The predicted step time and memory of placements, against hand-computed examples."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.graph.reference import graphs, machines, step_seconds
from trireme.graph.place.costs import CostGraph, Device, Hardware, Link, Operation
from trireme.graph.place.prediction import predict

TWO = Hardware((Device("a"), Device("b")), Link(0.5, 8.0))


def chain(*names: str) -> CostGraph:
    operations: list[Operation] = []
    for name in names:
        inputs = (operations[-1].name,) if operations else ()
        operations.append(Operation(name, inputs, 1.0, 2.0, 100, 10, 4))
    return CostGraph(tuple(operations))


def test_one_device_computes_one_operation_after_the_other() -> None:
    alone = predict(chain("x", "y"), TWO, {"x": "a", "y": "a"}, micro_batches=3)
    assert alone.step_seconds == 3 * 2 * (1 + 2)
    assert [device.busy_seconds for device in alone.devices] == [18.0, 0.0]
    # Twice 100 resident, one micro-batch at a time of 10 + 10, and y works with 4 + 4.
    assert [device.peak_bytes for device in alone.devices] == [200 + 20 + 8, 0]
    assert alone.transfers == 0


def test_a_chain_on_two_devices_waits_for_the_value_and_the_gradient() -> None:
    # x until 1, sent until 2, y until 3 and backward until 5, returned until 6, x until 8.
    split = predict(chain("x", "y"), TWO, {"x": "a", "y": "b"})
    assert split.step_seconds == 8.0
    assert split.transfers == 2
    # Each end holds what it receives: b the value, a the gradient.
    assert [device.peak_bytes for device in split.devices] == [114 + 4, 114 + 8]


def test_micro_batches_overlap() -> None:
    # a: forward until 2. b: forward 2-3 and 3-4, backward 4-6 and 6-8, the gradients arrive at 7
    # and 9; a: backward 7-9 and 9-11.
    pipeline = predict(chain("x", "y"), TWO, {"x": "a", "y": "b"}, micro_batches=2)
    assert pipeline.step_seconds == 11.0
    assert pipeline.transfers == 4


def test_a_transfer_keeps_both_sides_from_computing_unless_they_wait() -> None:
    busy = Hardware(TWO.devices, Link(0.5, 8.0, work_seconds=0.125, work_byte_seconds=1 / 32))
    placement = {"x": "a", "y": "b"}
    # Of one micro-batch each device waits for the other anyway.
    assert predict(chain("x", "y"), busy, placement).step_seconds == 8.0
    # a: forward 0-1 and 1.25-2.25, sent until 2 and 3.25. b: forward 2-3 and 3.25-4.25, backward
    # until 6.25 and, after it has sent, 6.5-8.5; the gradients arrive at 7.25 and 9.5; a: 9.5-11.5.
    assert predict(chain("x", "y"), busy, placement, micro_batches=2).step_seconds == 11.5


def test_a_device_holds_few_micro_batches_at_a_time() -> None:
    some = predict(chain("x", "y"), TWO, {"x": "a", "y": "b"}, 8)
    # Of 8 micro-batches a has activations and gradients of 2 at a time, and b of one.
    assert [device.peak_bytes for device in some.devices] == [
        100 + 2 * (10 + 4) + 4,
        100 + 1 * (10 + 4) + 8,
    ]


def test_a_stored_value_is_sent_once_and_updated_at_the_end() -> None:
    weight = Operation("w", backward_seconds=5.0, resident_bytes=64, output_bytes=4, stored=True)
    graph = CostGraph((weight, Operation("x", ("w",), 1.0, 2.0)))
    # w arrives at 1; x forward until 3 and backward until 7, the gradient at 8, w until 13.
    split = predict(graph, TWO, {"w": "a", "x": "b"}, micro_batches=2)
    assert split.step_seconds == 13.0
    assert split.transfers == 2
    assert [device.busy_seconds for device in split.devices] == [5.0, 6.0]
    assert [device.peak_bytes for device in split.devices] == [64 + 4 + 4, 4 + 4]


def test_a_segment_waits_for_all_that_it_receives_and_sends_when_it_ends() -> None:
    operations = (
        Operation("y", (), 4.0, 0.0),
        Operation("x", ("y",), 1.0, 0.0, output_bytes=4),
        Operation("z", ("x",), 1.0, 0.0),
    )
    # y and x are one segment of 5 seconds and 0.25 more: x arrives at 6.25, and z ends at 7.5.
    graph = CostGraph(operations, segment_seconds=0.25)
    split = predict(graph, TWO, {"x": "a", "y": "a", "z": "b"})
    assert split.step_seconds == 7.5 + 0.25 + 1 + 0.25  # and the gradient, the same way back


def test_what_no_other_device_waits_for_is_computed_after_sending() -> None:
    operations = (
        Operation("y", (), 4.0, 3.0),
        Operation("x", (), 1.0, 0.5, output_bytes=4),
        Operation("z", ("x",), 1.0, 0.25),
    )
    placement = {"x": "a", "y": "a", "z": "b"}
    # a: x 0-1, y 1-5, backward y 5-8, x 8-8.5. b: x arrives at 2, z until 3.25, its gradient 4.25.
    assert predict(CostGraph(operations), TWO, placement).step_seconds == 8.5
    # The segments of x, of y and of z take 0.25 more, in each direction.
    graph = CostGraph(operations, segment_seconds=0.25)
    split = predict(graph, TWO, placement)
    assert split.step_seconds == 8.5 + 4 * 0.25
    assert [device.busy_seconds for device in split.devices] == [8.5 + 4 * 0.25, 1.25 + 2 * 0.25]


@pytest.mark.parametrize(("here", "there"), [(6.0, 4.0), (3.0, 7.0)])
def test_two_branches_of_a_stem_take_as_long_as_the_longer_one(here: float, there: float) -> None:
    graph = CostGraph(
        (
            Operation("stem", (), 1.0, 2.0, output_bytes=4),
            Operation("here", ("stem",), here, 2 * here, output_bytes=4),
            Operation("there", ("stem",), there, 2 * there, output_bytes=4),
            Operation("join", ("here", "there"), 1.0, 2.0),
        )
    )
    fast = Hardware(TWO.devices, Link(1e-3, 1e9))
    for order in (graph.operations, [graph.operations[at] for at in (0, 2, 1, 3)]):
        split = predict(
            CostGraph(tuple(order)), fast, {"stem": "a", "here": "a", "there": "b", "join": "a"}
        )
        assert split.step_seconds == pytest.approx(3 * (1 + max(here, there) + 1), abs=5e-3)


def test_a_segment_waits_only_for_what_it_reads_itself() -> None:
    # On a, x goes on to b at once; only y, which nobody waits for, reads the late w from c.
    graph = CostGraph(
        (
            Operation("u", (), 1.0, output_bytes=4),
            Operation("w", (), 9.0, output_bytes=4),
            Operation("x", ("u",), 1.0, output_bytes=4),
            Operation("y", ("w", "u"), 1.0),
            Operation("z", ("x",), 6.0),
        )
    )
    three = Hardware((*TWO.devices, Device("c"), Device("d")), TWO.link)
    placement = {"u": "d", "w": "c", "x": "a", "y": "a", "z": "b"}
    # u at 2, x until 3, at b at 4, z until 10; w at 10, y until 11. Then z's gradient has arrived
    # at 11, and w's, returned by y, at 12. One transfer of u serves both x and y; x returns it.
    split = predict(graph, three, placement)
    assert split.step_seconds == 12.0
    assert split.transfers == 6


def test_a_value_is_sent_once_to_each_device() -> None:
    readers = [Operation(f"r{each}", ("x",), 1.0, 1.0) for each in range(3)]
    graph = CostGraph((Operation("x", (), 1.0, 1.0, output_bytes=4), *readers))
    split = predict(graph, TWO, {"x": "a", "r0": "b", "r1": "b", "r2": "b"})
    # x until 1, sent until 2, three readers until 5, backward until 8, returned until 9, x at 10.
    assert split.step_seconds == 10.0
    assert split.transfers == 2


def test_a_link_carries_one_transfer_at_a_time() -> None:
    graph = CostGraph(
        (
            Operation("x", output_bytes=4, differentiable=False),
            Operation("y", output_bytes=4, differentiable=False),
            Operation("z", ("x", "y"), 1.0),
        )
    )
    assert predict(graph, TWO, {"x": "a", "y": "a", "z": "b"}).step_seconds == 3.0
    three = Hardware((*TWO.devices, Device("c")), TWO.link)
    assert predict(graph, three, {"x": "a", "y": "c", "z": "b"}).step_seconds == 2.0


def test_no_gradient_of_data_returns() -> None:
    data = Operation("x", (), output_bytes=8, differentiable=False)
    graph = CostGraph((data, Operation("y", ("x",), 1.0, 1.0)))
    split = predict(graph, TWO, {"x": "a", "y": "b"})
    assert split.step_seconds == 1.5 + 2
    assert split.transfers == 1
    assert split.devices[0].peak_bytes == 8  # what it works with, and no gradient


def test_links_of_their_own() -> None:
    slow = Hardware(TWO.devices, TWO.link, {("b", "a"): Link(2.0)})
    split = predict(chain("x", "y"), slow, {"x": "a", "y": "b"})
    assert split.step_seconds == 1 + 2 + 1 + 2 + 2 + 2  # in one direction only: for both
    both = {("b", "a"): Link(2.0), ("a", "b"): Link(1.0)}
    split = predict(chain("x", "y"), Hardware(TWO.devices, TWO.link, both), {"x": "a", "y": "b"})
    assert split.step_seconds == 1 + 1 + 1 + 2 + 2 + 2


@given(graphs(), machines(), st.integers(1, 3), st.data())
def test_it_agrees_with_the_rules_executed_one_by_one(
    graph: CostGraph, hardware: Hardware, micro_batches: int, data: st.DataObject
) -> None:
    names = st.sampled_from([device.name for device in hardware.devices])
    placement = {each.name: data.draw(names) for each in graph.operations}
    predicted = predict(graph, hardware, placement, micro_batches).step_seconds
    expected = step_seconds(graph, hardware, placement, micro_batches)
    assert predicted == pytest.approx(expected, rel=1e-9)


@given(graphs(), machines(), st.data())
def test_a_step_takes_as_long_as_its_busiest_device_and_more_with_more_to_do(
    graph: CostGraph, hardware: Hardware, data: st.DataObject
) -> None:
    names = st.sampled_from([device.name for device in hardware.devices])
    placement = {each.name: data.draw(names) for each in graph.operations}
    one, two = (predict(graph, hardware, placement, count) for count in (1, 2))
    assert one.step_seconds >= max(device.busy_seconds for device in one.devices) - 1e-9
    assert one.step_seconds <= two.step_seconds + 1e-9
    for less, more in zip(one.devices, two.devices, strict=True):
        assert less.peak_bytes <= more.peak_bytes
    links = {pair: Link(0.0) for pair in hardware.links}
    free = Hardware(hardware.devices, Link(), links)
    assert predict(graph, free, placement).step_seconds <= one.step_seconds + 1e-9
