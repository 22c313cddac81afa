from __future__ import annotations

import threading
import timeit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trireme.metrics import Registry, Sample


def test_counters_count_by_label() -> None:
    registry = Registry()
    applied = registry.counter("trireme_pushes_total", "Pushes answered.", verdict="applied")
    stale = registry.counter("trireme_pushes_total", verdict="stale")
    applied.increment()
    applied.increment(2)
    stale.increment(0.5)
    assert registry.counter("trireme_pushes_total", verdict="applied") is applied
    assert registry.value("trireme_pushes_total", verdict="applied") == 3
    assert registry.value("trireme_pushes_total", verdict="stale") == 0.5
    assert registry.value("trireme_pushes_total", verdict="fenced") == 0
    (family,) = registry.families()
    told = (family.name, family.kind, family.help)
    assert told == ("trireme_pushes_total", "counter", "Pushes answered.")


def test_labels_are_compared_as_text_in_any_order() -> None:
    registry = Registry()
    first = registry.gauge("trireme_lag", worker=1, server="0")
    assert registry.gauge("trireme_lag", server=0, worker="1") is first


def test_gauges_are_set() -> None:
    registry = Registry()
    registry.gauge("trireme_memory_bytes").value = 12.5
    assert registry.value("trireme_memory_bytes") == 12.5


def samples_of(registry: Registry) -> list[Sample]:
    return [sample for family in registry.families() for sample in family.samples]


def test_a_histogram_has_a_sample_for_each_range_and_for_the_whole() -> None:
    registry = Registry()
    registry.counter("trireme_sent_bytes_total").increment(10)
    registry.gauge("trireme_lag", worker=1).value = -1
    step = registry.histogram("trireme_step_seconds", "", (0.1, 1.0), phase="push")
    for value in (0.05, 0.1, 0.5, 7.0):
        step.observe(value)
    assert samples_of(registry) == [
        ("trireme_sent_bytes_total", {}, 10),
        ("trireme_lag", {"worker": "1"}, -1),
        ("trireme_step_seconds_bucket", {"phase": "push", "le": "0.1"}, 2),
        ("trireme_step_seconds_bucket", {"phase": "push", "le": "1.0"}, 3),
        ("trireme_step_seconds_bucket", {"phase": "push", "le": "+Inf"}, 4),
        ("trireme_step_seconds_sum", {"phase": "push"}, 7.65),
        ("trireme_step_seconds_count", {"phase": "push"}, 4),
    ]
    assert registry.value("trireme_step_seconds", phase="push") == 4


@given(
    bounds=st.lists(st.floats(-10, 10), unique=True, max_size=6).map(sorted),
    values=st.lists(st.floats(-12, 12), max_size=30),
)
def test_a_bucket_holds_what_is_not_above_its_bound(
    bounds: list[float], values: list[float]
) -> None:
    registry = Registry()
    histogram = registry.histogram("trireme_things", "", bounds)
    for value in values[:7]:
        histogram.observe(value)
    histogram.observe_all(values[7:])
    assert histogram.sum == pytest.approx(sum(values))
    counts = [count for suffix, _, count in histogram.samples() if suffix == "_bucket"]
    assert counts == [sum(v <= bound for v in values) for bound in [*bounds, float("inf")]]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("pushes_total", "not a valid metric name"),
        ("trireme_Pushes_total", "not a valid metric name"),
        ("trireme_pushes-total", "not a valid metric name"),
        ("trireme_pushes", "_total"),
    ],
)
def test_names_that_break_the_conventions(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Registry().counter(name)


def test_a_gauge_is_no_total() -> None:
    with pytest.raises(ValueError, match="_total"):
        Registry().gauge("trireme_pushes_total")


def test_a_name_has_one_kind_one_set_of_labels_and_one_set_of_bounds() -> None:
    registry = Registry()
    registry.gauge("trireme_lag", worker=0)
    registry.histogram("trireme_step_seconds", "", (1.0, 2.0))
    with pytest.raises(ValueError, match="is a gauge, not a histogram"):
        registry.histogram("trireme_lag", worker=0)
    with pytest.raises(ValueError, match="is a gauge, not a histogram"):
        registry.histogram("trireme_lag", worker=1)
    with pytest.raises(ValueError, match=r"\['worker'\], not \['server'\]"):
        registry.gauge("trireme_lag", server=0)
    with pytest.raises(ValueError, match="other bounds"):
        registry.histogram("trireme_step_seconds", "", (1.0, 3.0))
    with pytest.raises(ValueError, match=r"\[\], not \['phase'\]"):
        registry.histogram("trireme_step_seconds", "", (1.0, 2.0), phase="push")
    with pytest.raises(ValueError, match="do not ascend"):
        registry.histogram("trireme_wait_seconds", "", (2.0, 1.0))
    assert ("trireme_lag", {"worker": "0"}, 0) in samples_of(registry)
    assert len(samples_of(registry)) == 1 + 5


def test_an_unknown_name_is_not_zero() -> None:
    with pytest.raises(KeyError, match="trireme_typo_total"):
        Registry().value("trireme_typo_total")


def test_reading_while_others_register_and_count() -> None:
    registry = Registry()
    stop = threading.Event()

    def count(worker: int) -> None:
        for i in range(300):
            registry.counter("trireme_pushes_total", worker=worker, shard=i).increment()
        stop.set()

    threads = [threading.Thread(target=count, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    while not stop.is_set():
        registry.families()
    for thread in threads:
        thread.join()
    assert sum(sample.value for sample in samples_of(registry)) == 1200


def test_counting_is_cheap() -> None:
    registry = Registry()
    counter = registry.counter("trireme_pushes_total")
    histogram = registry.histogram("trireme_step_seconds")
    best = min(timeit.repeat(counter.increment, number=10_000, repeat=20)) / 10_000
    assert best < 1e-6
    best = min(timeit.repeat(lambda: histogram.observe(0.01), number=10_000, repeat=20)) / 10_000
    assert best < 2e-6
