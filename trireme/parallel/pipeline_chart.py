"""A picture of a pipeline's schedule: a row for each process, time from left to right."""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

from trireme.monitor.stage_operation import StageOperation, bubble_fraction

COLOURS = {"forward": "#4c78a8", "backward": "#e07b39", "weight": "#8aa34b"}
"""The colours of operations by kind. The remaining time is a bubble: the process waits."""

_PAPER, _IDLE, _INK, _PALE = "#ffffff", "#eceef1", "#22262b", "#6b7280"
_LEFT, _TOP, _ROW, _BAR, _BOTTOM, _RIGHT = 108, 66, 54, 40, 46, 24


def draw(operations: Sequence[StageOperation], title: str, width: int = 1200) -> Image.Image:
    """Returns a picture of the operations of all processes in one step.

    Raises:
        ValueError: there are no operations.
    """
    idle = bubble_fraction(operations)
    first, last = min(one.start for one in operations), max(one.stop for one in operations)
    processes = sorted({one.process for one in operations})
    height = _TOP + _ROW * len(processes) + _BOTTOM
    image = Image.new("RGB", (width, height), _PAPER)
    pen = ImageDraw.Draw(image)
    scale = (width - _LEFT - _RIGHT) / max(last - first, 1e-9)
    large, small = ImageFont.load_default(18), ImageFont.load_default(13)

    pen.text((16, 12), title, _INK, large)
    caption = f"{(last - first) * 1e3:.1f} ms; {idle:.0%} of the processes' time is bubble"
    pen.text((16, 38), caption, _PALE, small)
    kinds, right = {one.kind for one in operations}, float(width - _RIGHT)
    for kind, colour in reversed([*COLOURS.items(), ("bubble", _IDLE)]):
        if kind in kinds or kind == "bubble":
            right -= pen.textlength(kind, small)
            pen.text((right, 38), kind, _INK, small)
            pen.rectangle((right - 18, 40, right - 6, 52), colour)
            right -= 32
    rows = {process: _TOP + _ROW * row for row, process in enumerate(processes)}
    for process, top in rows.items():
        pen.text((16, top + _BAR // 2), f"process {process}", _INK, small, anchor="lm")
        pen.rectangle((_LEFT, top, width - _RIGHT, top + _BAR), _IDLE)
    for one in sorted(operations, key=lambda one: one.start):
        left = _LEFT + (one.start - first) * scale
        right = _LEFT + (one.stop - first) * scale
        right = right - 1 if right - left > 3 else max(left + 1, right)  # a gap, where it can be
        top = rows[one.process]
        box = (left, top, right, top + _BAR)
        pen.rectangle(box, COLOURS.get(one.kind, _PALE))
        label = str(one.microbatch)
        if right - left > pen.textlength(label, small) + 4:
            centre = ((left + right) / 2, top + _BAR / 2)
            pen.text(centre, label, _PAPER, small, anchor="mm")
    below = rows[processes[-1]] + _BAR + 8
    for part, anchor in enumerate(("la", "ma", "ma", "ma", "ra")):
        x = _LEFT + (width - _LEFT - _RIGHT) * part / 4
        text = f"{(last - first) * part / 4 * 1e3:.1f} ms"
        pen.text((x, below), text, _PALE, small, anchor=anchor)
    return image
