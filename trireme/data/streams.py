"""The interface of streams, data sets that can only be read from the beginning.

A plug-in deals their examples, which is loaded where a loop has one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch.utils.data import IterableDataset

from trireme.errors import ConfigurationError
from trireme.plugins import Plugins


@dataclass(frozen=True, slots=True)
class StreamType:
    """What deals the examples of streams. Its module should import fast."""

    # the function that returns the loader and the dealer of a stream, as
    # `package.module:function`; see `trireme.session.data.feed`
    open: str


STREAMS = Plugins("trireme.streams", "reading of", StreamType)  # `streams` is used


def is_stream(dataset: object) -> bool:
    """Returns whether a data set can only be read from the beginning."""
    if isinstance(dataset, Iterator) and not hasattr(dataset, "load_state_dict"):
        raise ConfigurationError(
            f"a {type(dataset).__name__} can be read only once: give an object that begins anew "
            "each time it is iterated over, such as a torch.utils.data.IterableDataset"
        )
    if isinstance(dataset, IterableDataset):
        return True
    return isinstance(dataset, Iterable) and not hasattr(dataset, "__getitem__")


def check_one_reader(dataset: object, num_workers: int) -> None:
    """Checks that at most one process reads a stream."""
    if num_workers > 1:
        raise ConfigurationError(
            f"num_workers={num_workers} with a {type(dataset).__name__}: several processes would "
            "read a stream in an order of their own, or each example several times. Use "
            "num_workers=1, which reads ahead in one process"
        )
