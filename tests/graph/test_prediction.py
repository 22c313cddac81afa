"""The predicted step time and memory of placements, against hand-computed examples."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.graph.reference import graphs, machines, step_seconds
from trireme.errors import ConfigurationError
from trireme.graph.costs import CostGraph, Device, Hardware, Link, Operation
from trireme.graph.prediction import Traffic, predict

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
    # Twice 100 resident, three micro-batches of 10 + 10, and y works with 4 + 4.
    assert [device.peak_bytes for device in alone.devices] == [200 + 60 + 8, 0]
    assert alone.traffic == ()


def test_a_chain_on_two_devices_waits_for_the_value_and_the_gradient() -> None:
    # x until 1, sent until 2, y until 3 and backward until 5, returned until 6, x until 8.
    split = predict(chain("x", "y"), TWO, {"x": "a", "y": "b"})
    assert split.step_seconds == 8.0
    assert split.traffic == (Traffic("a", "b", 1, 4, 1.0), Traffic("b", "a", 1, 4, 1.0))
    # Each end holds what it receives: b the value, a the gradient.
    assert [device.peak_bytes for device in split.devices] == [114 + 4, 114 + 8]


def test_micro_batches_overlap() -> None:
    # a: forward until 2. b: forward 2-3 and 3-4, backward 4-6 and 6-8, the gradients arrive at 7
    # and 9; a: backward 7-9 and 9-11.
    pipeline = predict(chain("x", "y"), TWO, {"x": "a", "y": "b"}, micro_batches=2)
    assert pipeline.step_seconds == 11.0
    assert pipeline.traffic[0] == Traffic("a", "b", 2, 8, 2.0)


def test_a_value_is_sent_once_to_each_device() -> None:
    readers = [Operation(f"r{each}", ("x",), 1.0, 1.0) for each in range(3)]
    graph = CostGraph((Operation("x", (), 1.0, 1.0, output_bytes=4), *readers))
    split = predict(graph, TWO, {"x": "a", "r0": "b", "r1": "b", "r2": "b"})
    # x until 1, sent until 2, three readers until 5, backward until 8, returned until 9, x at 10.
    assert split.step_seconds == 10.0
    assert [traffic.transfers for traffic in split.traffic] == [1, 1]


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
    assert [traffic.sender for traffic in split.traffic] == ["a"]
    assert split.devices[0].peak_bytes == 8  # what it works with, and no gradient


def test_speeds_and_links_of_their_own() -> None:
    fast = Hardware((Device("a"), Device("b", speed=2.0)), TWO.link, {("b", "a"): Link(2.0)})
    split = predict(chain("x", "y"), fast, {"x": "a", "y": "b"})
    assert split.step_seconds == 1 + 2 + 0.5 + 1 + 2 + 2  # in one direction only: for both
    both = {("b", "a"): Link(2.0), ("a", "b"): Link(1.0)}
    split = predict(chain("x", "y"), Hardware(fast.devices, TWO.link, both), {"x": "a", "y": "b"})
    assert split.step_seconds == 1 + 1 + 0.5 + 1 + 2 + 2


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


def test_what_is_wrong_is_named() -> None:
    graph = chain("first", "second")
    with pytest.raises(ConfigurationError, match=r"no device for 1 of 2 operations, .*'second'"):
        predict(graph, TWO, {"first": "a"})
    with pytest.raises(ConfigurationError, match=r"unknown operation 'frist'.*mean first"):
        predict(graph, TWO, {"frist": "a"})
    with pytest.raises(ConfigurationError, match=r"unknown device 'c'.*there are a, b"):
        predict(graph, TWO, {"first": "a", "second": "c"})
    with pytest.raises(ConfigurationError, match="0 micro-batches"):
        predict(graph, TWO, {"first": "a", "second": "a"}, 0)
