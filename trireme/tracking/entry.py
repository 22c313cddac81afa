"""The option `--profile`, as its entry point declares it."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from trireme.job_config import Option
from trireme.launch.hooks import LaunchHook


def _first_before_end(steps: str) -> None:
    first, _, end = steps.partition(":")
    if int(first) >= int(end):
        raise ValueError(steps)


PROFILE = LaunchHook(
    Option(
        "STEPS",
        "trace these steps of each worker, such as 10:15, into RUN/traces",
        expects="FIRST:END, such as 10:15",
        check=_first_before_end,
        type=Annotated[str, Meta(pattern="^[0-9]+:[0-9]+$")],
    ),
    "trireme.tracking.profile:Profile",
)
