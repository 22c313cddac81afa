"""Writes results: JSON with every figure, a table in Markdown, a plot."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.results import Entry, Result

_COLOURS = {"trireme": "#0b5394", "peer": "#b45f06", "limit": "#666666", "information": "#a0a0a0"}
_MARKS = "osD^vPX*<>"
_NUMBER = re.compile(r"[-+\d.,e ]*")


def write(result: Result, machine: dict[str, Any], directory: Path) -> list[Path]:
    """Writes a result's files and returns them; without matplotlib there is no plot.

    Args:
        result: what was found.
        machine: see `benchmarks.machine.describe`.
        directory: where to.
    """
    directory.mkdir(parents=True, exist_ok=True)
    stem = directory / result.name
    stem.with_suffix(".json").write_text(to_json(result, machine) + "\n", encoding="utf-8")
    has_plot = plot(result, stem.with_suffix(".png"))
    picture = f"{result.name}.png" if has_plot else None
    stem.with_suffix(".md").write_text(markdown(result, machine, picture), encoding="utf-8")
    written = [stem.with_suffix(".json"), stem.with_suffix(".md")]
    return [*written, stem.with_suffix(".png")] if has_plot else written


def to_json(result: Result, machine: dict[str, Any]) -> str:
    """Returns everything, every single figure, as JSON."""
    data = {
        "benchmark": result.name,
        "title": result.title,
        "unit": result.unit,
        "higher_is_better": result.higher_is_better,
        "machine": machine,
        "entries": [_entry(result, entry) for entry in result.entries],
        "goals": [
            {**asdict(v.goal), "ratio": v.ratio, "by_start": v.by_start, "verdict": v.word}
            for v in result.verdicts()
        ],
        "notes": result.notes,
        "skipped": result.skipped,
        "failed": result.failed,
    }
    return json.dumps(_plain(data), indent=1)


def _entry(result: Result, entry: Entry) -> dict[str, Any]:
    spread = entry.spread
    return {
        "condition": entry.condition,
        "x": entry.x,
        "contender": entry.contender,
        "kind": entry.kind,
        "median": spread.median,
        "low": spread.low,
        "high": spread.high,
        "cpu_seconds": entry.cpu_seconds,
        "cpu_seconds_per_work": entry.cpu_per_work,
        "ratios": {name: result.ratio(entry, name) for name in result.references},
        "values": entry.values,
        "samples": [asdict(sample) for sample in entry.samples],
    }


def _plain(value: Any) -> Any:
    """Returns a value of which JSON can be made: it knows no NaN."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


# Tables ----------------------------------------------------------------------------------------


def rows(result: Result) -> tuple[list[str], list[list[str]]]:
    """Returns the head and the rows of the table of all entries."""
    conditions = any(entry.condition for entry in result.entries)
    head = ["condition"] if conditions else []
    head += ["", f"median, {result.unit}", "quartiles", "rounds"]
    head += [f"/ {name}" for name in result.references]
    head += [f"CPU ms / {result.work}"]
    body = []
    for entry in result.entries:
        spread = entry.spread
        ratios = [result.ratio(entry, name) for name in result.references]
        body.append(
            [
                *([entry.condition] if conditions else []),
                f"{entry.contender} ({entry.kind})" if entry.kind != "trireme" else entry.contender,
                figure(spread.median),
                f"{figure(spread.low)} - {figure(spread.high)}",
                str(len(entry.samples)),
                *("" if ratio is None else f"{ratio:.3g}" for ratio in ratios),
                figure(entry.cpu_per_work * 1000),
            ]
        )
    return head, body


def figure(value: float) -> str:
    """Returns a figure with about four digits that mean something; nothing for NaN."""
    if math.isnan(value):
        return ""
    if value == 0:
        return "0"
    digits = 3 - math.floor(math.log10(abs(value)))
    return f"{value:,.{min(max(digits, 0), 6)}f}"


def text_table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Returns a table for a terminal, which is Markdown too."""
    widths = [max(len(row[i]) for row in [head, *body]) for i in range(len(head))]
    numbers = [
        bool(body) and all(_NUMBER.fullmatch(row[i]) for row in body) for i in range(len(head))
    ]

    def line(cells: Sequence[str]) -> str:
        shown = [
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(cells, widths, numbers, strict=True)
        ]
        return f"| {' | '.join(shown)} |"

    rule = [
        "-" * (width - 1) + (":" if number else "-")
        for width, number in zip(widths, numbers, strict=True)
    ]
    return "\n".join([line(head), line(rule), *map(line, body)])


def goal_rows(result: Result) -> tuple[list[str], list[list[str]]]:
    """Returns the head and the rows of the table of goals."""
    verdicts = result.verdicts()
    several = any(len(verdict.by_start) > 1 for verdict in verdicts)
    body = [
        [
            verdict.goal.text,
            verdict.goal.bound,
            "" if verdict.ratio is None else f"{verdict.ratio:.3g}",
            verdict.word,
            *([", ".join(f"{ratio:.3g}" for ratio in verdict.by_start)] if several else []),
        ]
        for verdict in verdicts
    ]
    return ["goal", "bound", "measured", "", *(["by start"] if several else [])], body


def summary(result: Result) -> str:
    """Returns what a terminal is shown: the tables, and what is missing."""
    parts = [result.title]
    if result.entries:
        parts.append(text_table(*rows(result)))
    if result.goals:
        parts.append(text_table(*goal_rows(result)))
    parts += [f"not measured: {line}" for line in result.skipped]
    parts += [f"FAILED: {line}" for line in result.failed]
    return "\n".join(parts)


def markdown(result: Result, machine: dict[str, Any], picture: str | None) -> str:
    """Returns the page of a result."""
    better = {True: "; higher is better", False: "; lower is better", None: ""}
    parts = [f"# {result.title}", f"Unit: {result.unit}{better[result.higher_is_better]}."]
    parts += [text_table(*rows(result))] if result.entries else ["Nothing was measured."]
    if result.goals:
        parts += ["## Goals", text_table(*goal_rows(result))]
    for title, lines in (
        ("Notes", result.notes),
        ("Not measured", result.skipped),
        ("Failed", result.failed),
    ):
        if lines:
            parts += [f"## {title}", "\n".join(f"- {line}" for line in lines)]
    if picture:
        parts.append(f"![{result.title}]({picture})")
    described = [f"- {key}: {_described(value)}" for key, value in machine.items()]
    parts += ["## Machine and versions", "\n".join(described)]
    return "\n\n".join(parts) + "\n"


def _described(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return str(value)


# Plots -----------------------------------------------------------------------------------------


def plot(result: Result, path: Path) -> bool:
    """Draws a result; returns False where matplotlib is missing or there is nothing to draw."""
    try:
        import matplotlib
    except ImportError:
        return False
    if not result.entries:
        return False
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    lines = any(not math.isnan(entry.x) for entry in result.entries)
    size = (9, 6) if lines else (9, 1.5 + 0.32 * len(result.entries))
    drawing, axes = plt.subplots(figsize=size, layout="constrained")
    (_draw_lines if lines else _draw_bars)(result, axes)
    axes.set_title(result.title, fontsize=11)
    drawing.savefig(path, dpi=120)
    plt.close(drawing)
    return True


def _draw_bars(result: Result, axes: Any) -> None:
    labels, last = [], None
    for place, entry in enumerate(result.entries):
        spread = entry.spread
        error = [[spread.median - spread.low], [spread.high - spread.median]]
        axes.barh(place, spread.median, xerr=error, color=_COLOURS[entry.kind], capsize=2)
        axes.text(spread.high, place, f"  {figure(spread.median)}", va="center", fontsize=8)
        condition = f"{entry.condition}: " if entry.condition else ""
        labels.append(f"{condition}{entry.contender}")
        if last is not None and entry.condition != last:
            axes.axhline(place - 0.5, color="#dddddd", linewidth=1)
        last = entry.condition
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel(result.unit)


def _draw_lines(result: Result, axes: Any) -> None:
    for number, contender in enumerate(result.contenders):
        entries = [e for e in result.entries if e.contender == contender and not math.isnan(e.x)]
        # Several conditions may have the same x: one line for each way of going on from there.
        for group in _runs(entries):
            label = contender + (f", {group[0][0]}" if group[0][0] else "")
            kind = group[0][1].kind
            axes.plot(
                [entry.x for _, entry in group],
                [entry.spread.median for _, entry in group],
                marker=_MARKS[number % len(_MARKS)],
                color=None if kind in ("peer", "trireme") else _COLOURS[kind],
                linestyle="--" if kind in ("limit", "information") else "-",
                linewidth=2.2 if kind == "trireme" else 1.2,
                markersize=4,
                label=label,
            )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = {e.x: e.condition.partition(",")[0] for e in result.entries if not math.isnan(e.x)}
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.minorticks_off()
    axes.set_xlabel(result.x_label)
    axes.set_ylabel(result.unit)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)


def _runs(entries: Sequence[Entry]) -> list[list[tuple[str, Entry]]]:
    """Groups entries by what their condition says besides the x: after the last comma."""
    groups: dict[str, list[tuple[str, Entry]]] = {}
    for entry in entries:
        rest = entry.condition.partition(", ")[2]
        groups.setdefault(rest, []).append((rest, entry))
    return list(groups.values())
