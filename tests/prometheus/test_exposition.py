from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from urllib.request import urlopen

import pytest
import torch
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from torch import nn
from torch.utils.data import TensorDataset

import trireme
from tests.ps.bench import Bench
from trireme.cluster.messages import ClusterStatus, TaskStatus
from trireme.cluster.view import ShardEntry, View
from trireme.prometheus.exposition import expose, families, membership
from trireme.screen.server_status import ServerStatus

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
    numbers = {'pushes/sta"le\\': 3.0, "loss": 0.25, "apply_seconds/count": 2.0}
    numbers["apply_seconds/sum"] = 0.5
    exposition = expose([lambda: numbers], "worker:1", "127.0.0.1", 0)
    assert exposition is not None
    with exposition:
        assert value(scrape(exposition.address), "trireme_apply_seconds_count") == 2
        numbers |= {"apply_seconds/count": 4.0, "apply_seconds/sum": 202.0}
        families = scrape(exposition.address)
    assert families["trireme_pushes"].type == "counter"
    assert families["trireme_pushes"].documentation == "Pushes"
    assert value(families, "trireme_pushes_total", verdict='sta"le\\', task="worker:1") == 3
    assert value(families, "trireme_loss", task="worker:1") == 0.25
    assert families["trireme_apply_seconds"].type == "summary"
    assert value(families, "trireme_apply_seconds_count") == 4
    assert value(families, "trireme_apply_seconds_sum") == 202


def test_the_door_is_closed_when_it_is_closed() -> None:
    exposition = expose([], "ps:0", "127.0.0.1", 0)
    assert exposition is not None
    with exposition:
        port = int(exposition.address.rpartition(":")[2].partition("/")[0])
    exposition.close()  # once more does nothing
    with socket.socket() as again:
        assert again.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.thorough
def test_a_job_that_nobody_scrapes_does_not_import_the_client() -> None:
    code = (
        "import sys, trireme, trireme.session.session, trireme.ps.server.service\n"
        "assert 'prometheus_client' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_taken_port_is_said_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        assert expose([], "ps:0", "127.0.0.1", port) is None
    assert f"ps:0 cannot serve metrics at 127.0.0.1:{port}: " in caplog.text
    assert "Choose another --metrics-port" in caplog.text


def test_the_coordinator_counts_its_tasks_by_state() -> None:
    tasks = (
        TaskStatus("ps", 0, "live", "", 1, "here", 1, "", 0.5, {}),
        TaskStatus("worker", 0, "lost", "", 1, "here", 2, "", 12.0, {}),
        TaskStatus("worker", 1, "expected", "", 0, "", 0, "", -1.0, {}),
    )
    shards = (ShardEntry(0, 128, 0, (1,)), ShardEntry(128, 256, 1, (), (0,)))
    status = ClusterStatus(
        *("running", "", 3, (), tasks), replicas=2, servers=2, shards=shards, generation=4, life=1
    )
    families = {metric.name: metric for metric in membership(status)}
    assert value(families, "trireme_missing_copies") == 1
    assert (value(families, "trireme_generation"), value(families, "trireme_life")) == (4, 1)
    assert value(families, "trireme_view") == 3
    assert value(families, "trireme_tasks", state="live") == 1
    assert value(families, "trireme_tasks", state="left") == 0
    quiet = families["trireme_task_quiet_seconds"].samples
    assert [(each.labels["member"], each.value) for each in quiet] == [
        ("ps:0", 0.5),
        ("worker:0", 12.0),
    ]


def names_on(dashboard: Iterable[str]) -> set[str]:
    return {name for query in dashboard for name in re.findall(r"trireme_\w+", query)}


def test_the_dashboard_asks_for_what_there_is() -> None:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    asked = names_on(target["expr"] for panel in panels for target in panel["targets"])
    data = TensorDataset(torch.rand(4, 2), torch.rand(4, 1))
    session = trireme.Session(
        nn.Linear(2, 1),
        nn.MSELoss(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        max_steps=1,
    )
    with session:
        for batch in session.loader(data, 4):
            session.step(batch)
    task = TaskStatus("ps", 0, "live", "", 1, "here", 1, "", 0.5, {})
    servers, status = ServerStatus(), ClusterStatus("running", "", 1, (), (task,))
    servers.view(0.0, View(1, (), (), (ShardEntry(0, 128, 0, ()),)))
    servers.status(0.0, Bench().shard)
    counted = families({**session.recorder.numbers(), **servers.numbers})
    found = [*counted, *membership(status)]
    known = {sample.name for family in found for sample in family.samples}
    known |= {family.name for family in found}
    assert asked <= known, asked - known
    assert len(asked) >= 12
