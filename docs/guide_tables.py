"""The tables of the guides, made from the results of the benchmarks (benchmarks/results/*.json)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"


def result(name: str) -> dict[str, Any]:
    """Returns what one benchmark has found."""
    read: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return read


def number(value: float) -> str:
    """Returns a number with three significant digits, as people write it."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], name: str) -> str:
    """Returns a table of Markdown, and below it where its numbers come from.

    Args:
        header: the titles of the columns; the first column is text, the others are numbers.
        rows: the cells.
        name: the benchmark.
    """
    lines = [f"| {' | '.join(header)} |", f"| --- |{' ---: |' * (len(header) - 1)}"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    machine = result(name)["machine"]
    source = (
        f"Measured on {machine['cores']} cores ({machine['processor']}), torch "
        f"{machine['versions']['torch']}: [{name}](../../benchmarks/results/{name}.md)."
    )
    return "\n".join([*lines, "", source])


def medians(name: str, *, of: Sequence[str] = (), condition: str = "", to: str = "") -> str:
    """Returns the medians of a benchmark's contenders.

    Args:
        name: the benchmark.
        of: the contenders, in order; all by default.
        condition: of this condition only; of all where it is empty.
        to: a contender to divide by, under the same condition.
    """
    read = result(name)
    rows = []
    for entry in read["entries"]:
        if (of and entry["contender"] not in of) or condition not in ("", entry["condition"]):
            continue
        where = "" if condition else entry["condition"]
        title = ", ".join(part for part in (where, entry["contender"]) if part)
        ratio = [number(entry["ratios"][to])] if to else []
        rows.append([title, number(entry["median"]), *ratio])
    return table(["", f"median, {read['unit']}", *([f"of {to}"] if to else [])], rows, name)


def averaging() -> str:
    """Returns bytes and accuracy of each way to average, of the MLP."""
    ways: dict[str, list[dict[str, Any]]] = {}
    for run in result("averaging")["trained"]:
        if run["model"] == "mlp":
            ways.setdefault(run["way"], []).append(run)
    steps = result("averaging")["steps"]
    rows = [
        [
            way,
            number(fmean(run["pushed"] for run in runs) / steps),
            f"{fmean(run['loss'] for run in runs):.4f}",
            f"{fmean(run['accuracy'] for run in runs):.4f}",
        ]
        for way, runs in ways.items()
    ]
    return table(["way", "bytes pushed a step", "test loss", "test accuracy"], rows, "averaging")


def compression() -> str:
    """Returns bytes and accuracy of each `--compress`."""
    rows = [
        [f"`{run['codec']}`", f"{run['pushed']:,}", f"{run['accuracy']:.4f}"]
        for run in result("convergence")["trained"]
    ]
    return table(["`--compress`", "bytes a push", "test accuracy"], rows, "convergence")


def scaling() -> str:
    """Returns the steps a second of one to sixteen workers."""
    entries = result("scaling")["entries"]
    rows = []
    for workers in sorted({entry["x"] for entry in entries}):
        found = {entry["contender"]: entry for entry in entries if entry["x"] == workers}
        names = ("Trireme async", "Trireme sync", "no communication")
        rows.append([f"{workers}", *(number(found[name]["median"]) for name in names)])
    return table(["workers", "async", "sync", "no communication"], rows, "scaling")


def placements() -> str:
    """Returns the measured step of each model with branches, by who has placed it."""
    found: dict[str, dict[str, float]] = {}
    for entry in result("graph_placement")["entries"]:
        model, _, what = entry["condition"].partition(", ")
        if what == "measured":
            found.setdefault(model, {})[entry["contender"]] = entry["median"]
    ways = ("all on one", "expert's", "automatic")
    rows = [[model, *(number(of[way]) for way in ways)] for model, of in found.items()]
    return table(["model, ms a step", *ways], rows, "graph_placement")


def architectures() -> str:
    """Returns the examples per second of each architecture, by the number of features."""
    found: dict[str, dict[str, float]] = {}
    for entry in result("architectures")["entries"]:
        found.setdefault(entry["condition"], {})[entry["contender"]] = entry["median"]
    names = ("Spark", "TensorFlow", "Trireme")
    rows = [[what, *(number(of[name]) for name in names)] for what, of in found.items()]
    return table(["examples/s", *names], rows, "architectures")


GUIDES: tuple[tuple[str, str, Callable[[], str]], ...] = (
    ("sparse_models", "architectures", architectures),
    ("parameter_servers", "stragglers", lambda: medians("stragglers", to="sync, four equal")),
    (
        "collectives",
        "replica",
        lambda: medians(
            "replica",
            of=("two loops", "Trireme async", "Trireme sync", "Trireme allreduce", "DDP over gloo"),
            to="two loops",
        ),
    ),
    (
        "collectives",
        "networks",
        lambda: medians(
            "networks", of=("Trireme async", "Trireme sync", "Trireme allreduce", "DDP over gloo")
        ),
    ),
    ("averaging", "averaging", averaging),
    ("pipelines_and_graphs", "graph_placement", placements),
    ("pipelines_and_graphs", "graph_pipeline", lambda: medians("graph_pipeline")),
    ("failures", "replication", lambda: medians("replication")),
    ("monitoring", "summaries", lambda: medians("summaries", condition="CIFAR network on 24x24")),
    ("clusters", "scaling", scaling),
    ("security", "tls", lambda: medians("tls", to="Trireme tcp")),
    ("performance", "convergence", compression),
)
"""Guide, benchmark, and what writes its table."""

REGIONS = tuple(
    (f"docs/guides/{guide}.md", f"numbers {name}", write) for guide, name, write in GUIDES
)
"""Page, region, and what writes it, as in build.py."""
