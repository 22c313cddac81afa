"""How examples are loaded and made into batches: the arguments of torch's `DataLoader`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Self, TypedDict

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

from trireme.errors import ConfigurationError

Collate = Callable[[list[Any]], Any]  # makes a batch of a list of items of the data set


class LoadingValues(TypedDict, total=False):
    """The arguments of `Session.loader` and `Session.evaluate` that `Loading` describes."""

    collate_fn: Collate | None
    num_workers: int
    pin_memory: bool
    timeout: float
    worker_init_fn: Callable[[int], None] | None
    prefetch_factor: int | None
    persistent_workers: bool
    multiprocessing_context: Any


@dataclass(frozen=True, slots=True)
class Loading:
    """How examples are loaded; each field means what it means to `torch.utils.data.DataLoader`."""

    collate_fn: Collate | None = None
    num_workers: int = 0
    pin_memory: bool = False
    timeout: float = 0.0
    worker_init_fn: Callable[[int], None] | None = None
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    multiprocessing_context: Any = None

    def __post_init__(self) -> None:
        count: Any = self.num_workers
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ConfigurationError(f"num_workers={count!r}: it must be a whole number, 0 or more")
        if self.collate_fn is not None and not callable(self.collate_fn):
            raise ConfigurationError(
                f"collate_fn={self.collate_fn!r}: give a function of a list of items"
            )
        if count:
            return
        for name in ("prefetch_factor", "persistent_workers", "timeout"):
            if value := getattr(self, name):
                raise ConfigurationError(
                    f"{name}={value!r} is about the processes that load examples, and num_workers "
                    "is 0: set num_workers too, or leave it out"
                )

    @classmethod
    def of(cls, loader: DataLoader[Any]) -> Self:
        """Returns the loading of a `DataLoader`, except for its default collate function."""
        named = {each.name: getattr(loader, each.name) for each in fields(cls)}
        if named["collate_fn"] in (torch.utils.data.default_collate, _default_convert()):
            named["collate_fn"] = None
        return cls(**named)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of a `DataLoader`."""
        named = {each.name: getattr(self, each.name) for each in fields(self)}
        if not torch.cuda.is_available():  # torch would warn, and do the same
            named["pin_memory"] = False
        return named

    def pinned(self, data: Any) -> Any:
        """Returns a batch in pinned memory, where that is asked for and there is a GPU."""
        if not self.pin_memory or not torch.cuda.is_available():
            return data
        return pin_memory(data)  # type: ignore[no-untyped-call]


def _default_convert() -> Any:
    return torch.utils.data._utils.collate.default_convert  # a DataLoader's without batches
