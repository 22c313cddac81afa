"""What `trireme graph` asks of a session: which pictures of the model's graph."""

from __future__ import annotations

import msgspec

DRAWN = 73
"""The exit status of a program that was ended when its graph was drawn, by which `trireme graph`
tells it from one that has ended by itself."""


class DrawRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which pictures to make of a model's graph, besides the text.

    Attributes:
        workers: the number of the job's processes. The mesh says how many of them share the graph.
        svg: the file to write the drawing into; None for none.
        html: the file to write the page into; None for none.
    """

    workers: int = 1
    svg: str | None = None
    html: str | None = None
