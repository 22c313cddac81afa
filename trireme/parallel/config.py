"""The configuration of pipelines and tensor parallelism.

The module does not import `torch.distributed`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from trireme.errors import ConfigurationError
from trireme.mesh import SCHEDULES
from trireme.session.settings import Settings

Plan = Mapping[str, str]  # pattern of a module's name -> how its matrix is split over the axis tp


@dataclass(frozen=True)
class PipelineConfig:
    """How a model is split into pipeline stages, and in which order they compute.

    Attributes:
        schedule: one of `SCHEDULES`.
        microbatches: the number of micro-batches of each batch; None for twice the number of
            stages. A batch that is not divisible by it uses the next smaller number that divides
            it.
        split: the names of the layers at which stages begin, without the first stage's; None
            balances the stages by their numbers of parameters.

    Raises:
        ConfigurationError: the schedule is unknown, or `microbatches` below 1.
    """

    schedule: str = "1f1b"
    microbatches: int | None = None
    split: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ConfigurationError(
                f"pipeline schedule {self.schedule!r}: there are {', '.join(SCHEDULES)}"
            )
        if self.microbatches is not None and self.microbatches < 1:
            raise ConfigurationError(f"microbatches={self.microbatches}: it must be 1 or more")

    @property
    def stages_per_process(self) -> int:
        """The number of stages that each process holds; interleaved schedules have two."""
        return 2 if self.schedule == "interleaved" else 1

    def pieces(self, examples: int, stages: int) -> int:
        """Returns the number of micro-batches of a batch, for `stages` processes.

        Raises:
            ConfigurationError: the schedule cannot run with any possible number.
        """
        wanted = 2 * stages if self.microbatches is None else self.microbatches
        unit = stages if self.schedule == "interleaved" else 1
        for count in range(min(wanted, examples), 0, -1):
            if examples % count == 0 and count % unit == 0:
                return count
        raise ConfigurationError(
            f"a batch of {examples} examples cannot be cut into equal micro-batches, {stages} or a "
            f"multiple of it but at most {wanted}, as the interleaved schedule needs them: use a "
            f"batch size that is a multiple of {stages}, or --schedule 1f1b"
        )


def pipeline_config(settings: Settings) -> PipelineConfig:
    """Returns how a model is split into stages, by the program and by the launch."""
    given = settings.options.pipeline or PipelineConfig()
    if not isinstance(given, PipelineConfig):
        raise ConfigurationError(f"pipeline={given!r}: it must be a trireme.PipelineConfig")
    return replace(given, **settings.task.config.model.given(PipelineConfig))
