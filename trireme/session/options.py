"""The options of a session that come in groups, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass

from trireme.errors import ConfigurationError

__all__ = ["Checkpoint"]


@dataclass(frozen=True)
class Checkpoint:
    """When to write checkpoints and which to keep.

    Attributes:
        every_seconds: save when so many seconds have passed since the last; None: never for that.
        every_steps: save at each multiple of so many global steps; None: never for that. With
            neither, only the end of the run is saved.
        keep: how many of the newest to keep. The newest good one stays whatever this says.
        keep_every_steps: keep one for good for each so many global steps besides.

    Raises:
        ConfigurationError: a value is out of range.
    """

    every_seconds: float | None = 600
    every_steps: int | None = None
    keep: int = 5
    keep_every_steps: int | None = None

    def __post_init__(self) -> None:
        for name in ("every_seconds", "every_steps", "keep", "keep_every_steps"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigurationError(f"Checkpoint({name}={value}): it must be above 0")
