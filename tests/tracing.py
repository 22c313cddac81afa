"""Checks that a trace is what Chrome's trace-event format wants."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Event = dict[str, Any]

_SLACK = 0.002  # microseconds: times are rounded


def read_trace(path: Path) -> list[Event]:
    """Returns the events of a trace after checking each by itself, and the nesting of slices."""
    trace = json.loads(gzip.decompress(path.read_bytes()))
    events: list[Event] = trace["traceEvents"]
    assert events
    for event in events:
        assert event["ph"] in ("X", "M", "b", "e"), event
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name")
            assert list(event["args"]) == [
                "sort_index" if event["name"] == "process_sort_index" else "name"
            ]
            continue
        assert event["ts"] >= 0
        assert isinstance(event["cat"], str)
        if event["ph"] == "X":
            assert event["dur"] >= 0
    check_nesting(events)
    return events


def check_nesting(events: list[Event]) -> None:
    """On one track a slice lies in another, or beside it; viewers cannot draw anything else."""
    tracks: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    for slices in tracks.values():
        open_until: list[float] = []
        for event in sorted(slices, key=lambda event: (event["ts"], -event["dur"])):
            while open_until and open_until[-1] <= event["ts"] + _SLACK:
                open_until.pop()
            end = event["ts"] + event["dur"]
            assert not open_until or end <= open_until[-1] + _SLACK, event
            open_until.append(end)


def tasks_of(events: list[Event]) -> dict[str, int]:
    """Returns the number of each task's process in the trace."""
    return {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
