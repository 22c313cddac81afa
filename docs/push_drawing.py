"""Draws the path of a push as an SVG: a column each for the worker, the primary and its backup."""

from __future__ import annotations

from html import escape
from itertools import pairwise

from push_path import Hop, PushPath, Station

WIDTH, MARGIN, BOX, GAP = 1380, 20, 430, 26
LINE, HEAD, PADDING = 18, 26, 10
COLUMNS = {"worker:0": MARGIN, "ps:0": (WIDTH - BOX) // 2, "ps:1": WIDTH - MARGIN - BOX}
TITLES = {
    "worker:0": "worker",
    "ps:0": "a server: primary of the shard",
    "ps:1": "another server: its backup",
}
COLOURS = {
    "worker:0": ("#e8f0fb", "#2f5f9e"),
    "ps:0": ("#eaf5ea", "#3a7a3a"),
    "ps:1": ("#faf1e4", "#9a6a1f"),
}
STYLE = """
text { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: 12px; fill: #1f2328 }
.title { font-family: system-ui, sans-serif; font-weight: 600; font-size: 13px }
.column { font-family: system-ui, sans-serif; font-weight: 600; font-size: 15px }
.file { fill: #6a737d; font-size: 11px }
.arrow { fill: none; stroke: #57606a; stroke-width: 1.5; marker-end: url(#head) }
"""


def drawing(path: PushPath) -> str:
    """Returns the drawing of a path."""
    parts, places = [], []
    top = MARGIN + 34
    for number, (station, leg) in enumerate(path.legs.items(), 1):
        height = HEAD + LINE * len(leg) + PADDING
        parts += box(number, station, leg, top, height)
        places.append((station.task, top, height))
        top += height + GAP
    for (task, upper, height), (other, lower, _) in pairwise(places):
        parts.append(arrow(task, upper + height, other, lower))
    for task, left in COLUMNS.items():
        middle = left + BOX / 2
        title = f'<text class="column" x="{middle:g}" y="{MARGIN + 12}" text-anchor="middle">'
        parts.append(f"{title}{TITLES[task]}</text>")
    marker = (
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
        'markerHeight="8" orient="auto"><path d="M0 0L8 4L0 8z" fill="#57606a"/></marker></defs>'
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" '
            f'width="{WIDTH}" height="{top}">',
            f"<style>{STYLE}</style>{marker}",
            f'<rect width="{WIDTH}" height="{top}" fill="#ffffff"/>',
            *parts,
            "</svg>\n",
        ]
    )


def box(number: int, station: Station, leg: list[Hop], top: int, height: int) -> list[str]:
    """Returns a station with its hops."""
    left = COLUMNS[station.task]
    fill, stroke = COLOURS[station.task]
    parts = [
        f'<rect x="{left}" y="{top}" width="{BOX}" height="{height}" rx="6" fill="{fill}" '
        f'stroke="{stroke}"/>',
        f'<text class="title" x="{left + PADDING}" y="{top + 18}">'
        f"{number}. {escape(station.title)}</text>",
    ]
    for line, hop in enumerate(leg):
        y = top + HEAD + LINE * line + 13
        file = escape(hop.file.removesuffix(".py"))
        right = left + BOX - PADDING
        parts += [
            f'<text x="{left + PADDING}" y="{y}">{escape(hop.function)}</text>',
            f'<text class="file" x="{right}" y="{y}" text-anchor="end">{file}</text>',
        ]
    return parts


def arrow(task: str, bottom: int, other: str, top: int) -> str:
    """Returns an arrow from the bottom of one station to the top of the next."""
    start, end = COLUMNS[task] + BOX / 2, COLUMNS[other] + BOX / 2
    middle = (bottom + top) / 2
    return f'<path class="arrow" d="M{start:g} {bottom} V{middle:g} H{end:g} V{top}"/>'
