"""`trireme run --profile`: one timeline of processes that share nothing but the machine's clock."""

from __future__ import annotations

import pytest

from tests.integration.shell import PROGRAMS, Shell
from tests.tracing import read_trace, tasks_of

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


@pytest.mark.thorough
def test_two_workers_and_a_server_on_one_timeline(shell: Shell) -> None:
    ended = shell.run(
        *("run", "--ps", 1, "--workers", 2, "--strategy", "sync", "--run-dir", "run"),
        *("--profile", "5:8", PROGRAMS / "train.py", "--out", "out", "--max-steps", 20),
    )
    assert ended.status == 0, ended.text
    assert "traces/steps-5-8.json.gz (https://ui.perfetto.dev opens it)" in ended.out
    events = read_trace(shell.directory / "run" / "traces" / "steps-5-8.json.gz")
    tasks = tasks_of(events)
    assert tasks == {"ps:0": 1, "worker:0": 2, "worker:1": 3}
    for worker in ("worker:0", "worker:1"):
        computed = [e for e in events if e["pid"] == tasks[worker] and e.get("cat") == "cpu_op"]
        assert sum(event["name"] == "aten::addmm" for event in computed) == 2 * 3


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["allreduce", "pipeline"])
def test_two_workers_without_servers_on_one_timeline(strategy: str, shell: Shell) -> None:
    ended = shell.run(
        *("run", "--workers", 2, "--strategy", strategy, "--run-dir", "run"),
        *("--profile", "5:8", PROGRAMS / "train.py", "--out", "out", "--max-steps", 20),
    )
    assert ended.status == 0, ended.text
    assert ended.out.count("traces/steps-5-8.json.gz (https://ui.perfetto.dev opens it)") == 1
    traces = shell.directory / "run" / "traces"
    assert [path.name for path in traces.iterdir()] == ["steps-5-8.json.gz"]
    events = read_trace(traces / "steps-5-8.json.gz")
    tasks = tasks_of(events)
    assert tasks == {"worker:0": 1, "worker:1": 2}
    for place, worker in enumerate(tasks):
        own = [event for event in events if event["pid"] == tasks[worker]]
        steps = [event["name"] for event in own if event.get("cat") == "step"]
        assert steps == ["step 5", "step 6", "step 7"]
        assert any(event["name"] == "aten::addmm" for event in own)
        messages = [event["name"] for event in own if event.get("cat") == "message"]
        assert any(name.startswith("gloo:") for name in messages)
        stages = [event["name"] for event in own if event.get("cat") == "stage"]
        wanted = 3 if strategy == "pipeline" else 0
        assert stages.count(f"forward {place}, micro-batch 1") == wanted
        assert stages.count(f"backward {place}, micro-batch 1") == wanted


def test_steps_that_are_none_are_bad_usage(shell: Shell) -> None:
    ended = shell.run("run", "--profile", "8", PROGRAMS / "train.py", "--out", "out")
    assert ended.status == 2
    assert "profile is '8' (command line): it must be FIRST:END, such as 10:15" in ended.err
