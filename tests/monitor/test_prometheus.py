from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterable
from pathlib import Path
from urllib.request import urlopen

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from trireme.cluster.messages import ClusterStatus, TaskStatus
from trireme.cluster.view import ShardEntry
from trireme.metrics import COUNT_BUCKETS, Registry
from trireme.monitor.prometheus import MembershipMetrics, expose
from trireme.ps.server.metrics import ShardMetrics
from trireme.ps.shard.shard import Shard
from trireme.session.observers.phases import SERVED, Phases

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"


def scrape(address: str) -> dict[str, Metric]:
    with urlopen(address, timeout=10) as answer:
        assert answer.status == 200
        text = answer.read().decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(families: dict[str, Metric], name: str, **labels: str) -> float:
    found = [
        sample.value
        for family in families.values()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    (only,) = found
    return float(only)


def test_what_is_counted_is_scraped_and_parsed() -> None:
    registry = Registry()
    registry.counter("trireme_pushes_total", "Pushes by verdict", verdict='sta"le\\').increment(3)
    registry.gauge("trireme_loss").value = 0.25
    staleness = registry.histogram("trireme_push_staleness", "Updates between", COUNT_BUCKETS)
    for each in (0, 1, 1, 200):
        staleness.observe(each)
    looked = []
    exposition = expose(registry, "worker:1", "127.0.0.1", 0, lambda: looked.append(1))
    assert exposition is not None
    with exposition:
        families = scrape(exposition.address)
        registry.gauge("trireme_loss").value = 0.125
        assert value(scrape(exposition.address), "trireme_loss") == 0.125
    assert len(looked) == 2
    assert families["trireme_pushes"].type == "counter"
    assert families["trireme_pushes"].documentation == "Pushes by verdict"
    assert value(families, "trireme_pushes_total", verdict='sta"le\\', task="worker:1") == 3
    assert value(families, "trireme_loss", task="worker:1") == 0.25
    assert families["trireme_push_staleness"].type == "histogram"
    assert value(families, "trireme_push_staleness_bucket", le="1.0") == 3
    assert value(families, "trireme_push_staleness_bucket", le="+Inf") == 4
    assert value(families, "trireme_push_staleness_count") == 4
    assert value(families, "trireme_push_staleness_sum") == 202


def test_the_door_is_closed_when_it_is_closed() -> None:
    exposition = expose(Registry(), "ps:0", "127.0.0.1", 0)
    assert exposition is not None
    with exposition:
        port = int(exposition.address.rpartition(":")[2].partition("/")[0])
    exposition.close()  # once more does nothing
    with socket.socket() as again:
        assert again.connect_ex(("127.0.0.1", port)) != 0


def test_a_taken_port_is_said_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        assert expose(Registry(), "ps:0", "127.0.0.1", port) is None
    assert f"ps:0 cannot serve metrics at 127.0.0.1:{port}: " in caplog.text
    assert "Choose another --metrics-port" in caplog.text
    assert expose(Registry(), "ps:0", "127.0.0.1", None) is None


def test_the_coordinator_counts_its_tasks_by_state() -> None:
    metrics = MembershipMetrics()
    tasks = (
        TaskStatus("ps", 0, "live", "", 1, "here", 1, "", 0.5, {}),
        TaskStatus("worker", 0, "lost", "", 1, "here", 2, "", 12.0, {}),
        TaskStatus("worker", 1, "expected", "", 0, "", 0, "", -1.0, {}),
    )
    shards = (ShardEntry(0, 128, 0, (1,)), ShardEntry(128, 256, 1, (), (0,)))
    metrics.take(
        ClusterStatus(
            *("running", "", 3, (), tasks),
            replicas=2,
            servers=2,
            shards=shards,
            generation=4,
            life=1,
        )
    )
    registry = metrics.registry
    assert registry.value("trireme_missing_copies") == 1
    assert (registry.value("trireme_generation"), registry.value("trireme_life")) == (4, 1)
    assert registry.value("trireme_view") == 3
    assert registry.value("trireme_tasks", state="live") == 1
    assert registry.value("trireme_tasks", state="left") == 0
    assert registry.value("trireme_task_quiet_seconds", member="worker:0") == 12.0
    assert registry.value("trireme_task_quiet_seconds", member="worker:1") == 0


def names_on(dashboard: Iterable[str]) -> set[str]:
    return {name for query in dashboard for name in re.findall(r"trireme_\w+", query)}


def test_the_dashboard_asks_for_what_there_is() -> None:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    asked = names_on(target["expr"] for panel in panels for target in panel["targets"])
    registry = Registry()
    Phases(SERVED, registry)
    ShardMetrics(registry, lambda status: None).look(0.0, Shard(0))
    registry.histogram("trireme_push_staleness", "", COUNT_BUCKETS)
    registry.gauge("trireme_worker_lag", worker=0)
    registry.counter("trireme_examples_total")
    for way in ("pushed", "pulled"):
        registry.counter(f"trireme_bytes_{way}_total")
    for name in ("loss", "examples_per_second"):
        registry.gauge(f"trireme_{name}")
    families = registry.families()
    known = {sample.name for family in families for sample in family.samples}
    known |= {family.name for family in [*families, *MembershipMetrics().registry.families()]}
    known.add("trireme_task_quiet_seconds")
    assert asked <= known, asked - known
    assert len(asked) >= 12
