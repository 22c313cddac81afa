"""The configuration of dataflow graphs. The module does not import `torch.distributed`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from trireme.errors import ConfigurationError, suggestion
from trireme.graph.place.placement import ALGORITHMS
from trireme.job_config import size_in_bytes
from trireme.session.settings import Settings


@dataclass(frozen=True)
class GraphConfig:
    """How the operations of a dataflow graph are placed on tasks, and in how many micro-batches.

    A device is named as in `trireme.device`: `worker:1`, `worker:0/cuda:1`, and for parameters
    only, `ps:0`. Scopes in the model take precedence over patterns.

    Attributes:
        placement: pattern of the name of a module, parameter or operator -> device, such as
            `{"encoder.*": "worker:0"}`; the first pattern that matches decides. `*` stands for any
            characters.
        algorithm: how operations without a requested device are placed: one of
            `placement.ALGORITHMS`. `best` compares them by predicted step time, and improves the
            best one.
        microbatches: the number of micro-batches of each batch; None for 1.
        soft: whether an operation whose device does not exist is placed elsewhere, with a warning.
        log_placement: whether the chief prints which device computes each operation.
        memory_limit: the bytes, or a size such as `2GiB`, that the operations of each task may
            take, with their parameters, gradients and optimizer state; None for no limit.
        example: inputs of the model: a tensor, or a tuple or dict of arguments. With it no process
            needs memory for the whole model; None captures the model at the first step.

    Raises:
        ConfigurationError: the algorithm is unknown, or a number is below 1.
    """

    placement: Mapping[str, str] = field(default_factory=dict)
    algorithm: str = "best"
    microbatches: int | None = None
    soft: bool = True
    log_placement: bool = False
    memory_limit: int | str | None = None
    example: Any = None

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            close = suggestion(self.algorithm, ALGORITHMS)
            raise ConfigurationError(
                f"GraphConfig(algorithm={self.algorithm!r}){close}: there are "
                f"{', '.join(ALGORITHMS)}"
            )
        given: object = self.placement
        texts = isinstance(given, Mapping) and all(isinstance(it, str) for it in given.values())
        if not texts:
            raise ConfigurationError(
                f"GraphConfig(placement={given!r}): give a mapping from patterns to devices, such "
                'as {"encoder": "worker:0"}'
            )
        numbers = {"microbatches": self.microbatches, "memory_limit": self.memory_bytes}
        for name, value in numbers.items():
            if value is not None and value < 1:
                raise ConfigurationError(f"GraphConfig({name}={value}): it must be 1 or more")

    @property
    def pieces(self) -> int:
        """The number of micro-batches."""
        return self.microbatches or 1

    @property
    def memory_bytes(self) -> int | None:
        """The memory limit in bytes; None for none.

        Raises:
            ConfigurationError: it is a text that is no size.
        """
        if not isinstance(self.memory_limit, str):
            return self.memory_limit
        try:
            return size_in_bytes(self.memory_limit)
        except (ValueError, IndexError):
            raise ConfigurationError(
                f"GraphConfig(memory_limit={self.memory_limit!r}): give bytes, or a size such as "
                "'2GiB'"
            ) from None


def graph_config(settings: Settings) -> GraphConfig:
    """Returns how a model is placed as a graph, by the program and by the launch."""
    given = settings.options.graph or GraphConfig()
    if not isinstance(given, GraphConfig):
        raise ConfigurationError(f"graph={given!r}: it must be a trireme.GraphConfig")
    launched = settings.task.config.model
    if launched.schedule is not None:
        raise ConfigurationError(
            f"schedule is {launched.schedule}, and the strategy is graph, which has one schedule: "
            "leave out --schedule"
        )
    return replace(given, **launched.given(GraphConfig))
