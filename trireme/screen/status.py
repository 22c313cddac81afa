"""`trireme status RUN`: the status of a job."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from trireme.cli.runs import query
from trireme.cluster.messages import ClusterStatus
from trireme.cluster.placement import missing_copies
from trireme.cluster.progress import EXCUSE, LOCATION, STUCK
from trireme.errors import CheckpointError, TriremeError
from trireme.launch.run_directory import JobRecord, is_running, read_record
from trireme.location import RemotePath, local_directory, location
from trireme.monitor.recording import UNSAVED
from trireme.printable import printable
from trireme.records.records import read_starts
from trireme.screen.entry import STATUS
from trireme.screen.job_state import findings, from_cluster
from trireme.screen.placement import lines, summary

_EVENTS = 8  # how many of the newest events are shown

_RECORDED = ("state", "status", "job", "command", "host", "launcher", "coordinator", "started")


def main(arguments: Sequence[str]) -> int:
    """Prints the status of the job and returns 0."""
    given = STATUS.parser().read(arguments)
    path = local_directory(given.run)
    status = _status(path, read_record(path), is_running(path), location(given.run))
    print(json.dumps(status, indent=2) if given.json else "\n".join(map(printable, _lines(status))))
    return 0


def _status(path: Path, record: JobRecord, running: bool, run: Path | RemotePath) -> dict[str, Any]:
    until = time.time() if running else record.ended
    status: dict[str, Any] = {
        **{name: getattr(record, name) for name in _RECORDED},
        "seconds": None if until is None else round(until - record.started, 1),
        "options": {
            name: {"value": value, "origin": record.origins.get(name, "")}
            for name, value in record.options.items()
        },
        "events": [{"seconds": seconds, "text": text} for seconds, text in record.events],
        "failure": list(record.failure),
        "newest_checkpoint": None if running else _newest_checkpoint(run),
        "tasks": [{"name": name, "pid": pid} for name, pid in record.pids.items()],
    }
    if running and record.coordinator:
        return status | _ask_coordinator(record)
    recorded = {
        start.begin.task: start.records[-1].status
        for start in read_starts(path, record.job)
        if start.records
    }
    for task in status["tasks"]:
        task["status"] = recorded.get(task["name"], {})
    return status


def _newest_checkpoint(run: Path | RemotePath) -> int | None:
    from trireme.session.checkpoint.history import list_checkpoints, step_of  # imports torch

    with suppress(CheckpointError):
        return max((step_of(each) for each in list_checkpoints(run)), default=None)
    return None


def _ask_coordinator(record: JobRecord) -> dict[str, Any]:
    try:
        cluster = query(record)
    except TriremeError as error:
        return {"coordinator_error": str(error)}
    tasks = [{"name": task.name} | msgspec.structs.asdict(task) for task in cluster.tasks]
    return {
        "findings": findings(from_cluster("", cluster, 0.0)),
        "placement": _placement(cluster),
        "phase": cluster.phase,
        "reason": cluster.reason,
        "view": cluster.view,
        "missing": list(cluster.missing),
        "tasks": tasks,
    }


def _placement(status: ClusterStatus) -> dict[str, Any] | None:
    if not status.shards:
        return None
    missing = missing_copies(status.shards, status.servers, status.replicas)
    return {
        "text": [summary(status), *lines(status)],
        "generation": status.generation,
        "life": status.life,
        "replicas": status.replicas,
        "moving": bool(status.next_shards),
        "shards": [
            {
                "slots": [entry.start, entry.stop],
                "primary": f"ps:{entry.primary}",
                "backups": [f"ps:{server}" for server in entry.backups],
                "joining": [f"ps:{server}" for server in entry.joining],
                "missing": lacks,
            }
            for entry, lacks in zip(status.shards, missing, strict=True)
        ],
    }


def _lines(status: dict[str, Any]) -> list[str]:
    over = status["state"] != "running"
    took = "after" if over else "for"
    seconds = "" if status["seconds"] is None else f" {took} {status['seconds']} s"
    lines = [
        f"{' '.join(status['command'])}",
        f"  {status['state']}{seconds} on {status['host']} (process {status['launcher']})",
    ]
    lines += [f"  {text}" for text in status["failure"]]
    if over and status["newest_checkpoint"] is not None:
        lines.append(f"  the newest checkpoint is of step {status['newest_checkpoint']}")
    events = status["events"]
    if len(events) > _EVENTS:
        lines.append(f"  {len(events) - _EVENTS} older events: see --json")
    lines += [f"  after {each['seconds']} s: {each['text']}" for each in events[-_EVENTS:]]
    if "phase" in status:
        missing = ", ".join(status["missing"])
        waiting = f", waiting for {missing}" if missing else ""
        lines.append(f"  {status['phase']}, view {status['view']}{waiting}: {status['reason']}")
    placement = status.get("placement")
    if placement and (len(placement["shards"]) > 1 or placement["replicas"] > 1):
        first, *others = placement["text"]
        lines += [f"  {first}", *(f"    {text}" for text in others)]
    lines += [f"  {text}" for text in status.get("findings", ())]
    if "coordinator_error" in status:
        lines.append(f"  the coordinator does not answer: {status['coordinator_error']}")
    for task in status["tasks"]:
        values = {
            n: v
            for n, v in task.get("status", {}).items()
            if (v not in ("", 0) or n == "step") and (over or n != UNSAVED)  # a finding
            # What a task waited for when it was last heard of says nothing once it is gone, and the
            # state that it recorded last is that of its last step.
            if n not in ("state", EXCUSE, LOCATION, STUCK) or task.get("state", "live") == "live"
            if not (over and n == "state")
        }
        report = ", ".join(f"{name} {_shown(value)}" for name, value in values.items())
        report = report.replace(f"{EXCUSE} ", "makes no step now: ")
        if over and report:
            report = f"last recorded: {report}"
        lines.append(
            f"  {task['name']:<10} process {task['pid']:<8} {task.get('state', '')}  {report}"
        )
    return [line.rstrip() for line in lines]


def _shown(value: float | int | str) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
