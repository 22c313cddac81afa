"""`--metrics-port`: each task of a job serves its metrics, and Prometheus can read them."""

from __future__ import annotations

import re
import time
from urllib.request import urlopen

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.shell import PROGRAMS, Running, Shell

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

TRAIN = (PROGRAMS / "train.py", "--out", "out")


def scrape(job: Running, task: str) -> dict[str, Metric]:
    address = job.until(rf"{task} \| metrics: (http://127\.0\.0\.1:\d+/metrics)\n")[1]
    with urlopen(address, timeout=10) as answer:
        text = answer.read().decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def scrape_until(job: Running, task: str, name: str, least: float) -> dict[str, Metric]:
    """Scrapes a task until a value is there: a server's are those of its last half second."""
    deadline = time.monotonic() + 30.0
    while values(found := scrape(job, task), name)[0] < least:
        assert time.monotonic() < deadline, f"{name} stays below {least}"
        time.sleep(0.1)
    return found


def values(families: dict[str, Metric], name: str) -> list[float]:
    samples = [sample for family in families.values() for sample in family.samples]
    return [sample.value for sample in samples if sample.name == name]


@pytest.mark.thorough
def test_every_task_of_a_job_can_be_scraped(shell: Shell) -> None:
    job = shell.start(
        *("run", "--ps", 1, "--workers", 2, "--strategy", "sync", "--metrics-port", 0),
        *("--run-dir", "run", *TRAIN, "--max-steps", 10**9, "--pause", 0.01),
    )
    job.until(r"worker:1 \| step 20 ")
    worker = scrape(job, "worker:1")
    server = scrape_until(job, "ps:0", "trireme_apply_seconds_count", 20)
    coordinator = scrape(job, "coordinator:0")
    assert values(worker, "trireme_examples_total")[0] >= 20 * 16
    assert values(worker, "trireme_loss")[0] > 0
    phases = worker["trireme_phase_seconds"].samples
    assert {sample.labels["phase"] for sample in phases} == {"data", "compute", "push", "wait"}
    assert all(sample.value > 0 for sample in phases if sample.labels["phase"] != "data")
    assert {s.labels["task"] for s in server["trireme_pushes"].samples} == {"ps:0"}
    (live,) = [s for s in coordinator["trireme_tasks"].samples if s.labels["state"] == "live"]
    assert live.value == 3
    assert shell.run("stop", "run").status == 0
    assert job.ended().status == 130


@pytest.mark.thorough
def test_nothing_is_served_unless_it_is_asked_for(shell: Shell) -> None:
    ended = shell.run("run", *TRAIN, "--max-steps", 3)
    assert ended.status == 0
    assert not re.search("metrics:", ended.text)


def test_a_port_that_is_none_is_bad_usage(shell: Shell) -> None:
    ended = shell.run("run", "--metrics-port", "70000", *TRAIN)
    assert ended.status == 2
    assert "metrics-port is '70000' (command line): it must be a port, or 0" in ended.err
