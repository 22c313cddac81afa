"""How gradients are packed on their way to the servers, for `--compress`: a plug-in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from trireme.plugins import Plugins

if TYPE_CHECKING:
    import torch


class Packed(Protocol):
    """The packed form of one server's part of the gradients, at the server."""

    nbytes: int  # its size, or the most that it can have

    def fits(self, length: int) -> bool:
        """Returns whether a packed form can have so many bytes."""

    def place(self, length: int) -> Sequence[memoryview]:
        """Returns memory for a packed form of so many bytes, which fits."""

    def unpack(self) -> None:
        """Unpacks what was received; raises `FrameError` where that makes no sense."""


class Packer(Protocol):
    """Packs one worker's gradients for one server."""

    views: Sequence[memoryview]  # what is sent of them

    def pack(self, absent: Sequence[tuple[int, int, int]] = ()) -> None:
        """Packs the gradients, with what packing has lost before, and sets `views`.

        Args:
            absent: elements of this part that have no gradient: nothing is packed there.
        """

    def take_back(self) -> None:
        """Takes back the last `pack`, as nothing was sent."""


class Residuals(Protocol):
    """What packing has lost so far, by parameter."""

    def export(self) -> dict[str, torch.Tensor]:
        """Returns copies, by parameter, in the parameters' shapes."""

    def restore(self, named: Mapping[str, torch.Tensor]) -> None:
        """Replaces the residuals; those of parameters that are not named become zero."""


@dataclass(frozen=True, slots=True)
class Packing:
    """A way of packing, by the codec that a rule names."""

    check: Callable[[str], object]  # raises `ConfigurationError` where there is no such codec
    # The next two take the codec, a `PartBuffer`, and whether the packed form is deflated too.
    packer: Callable[[str, Any, bool], Packer]
    packed: Callable[[str, Any, bool], Packed]
    residuals: Callable[[Any, Sequence[Any]], Residuals]  # of a layout and the packers by shard


PACKING = Plugins("trireme.packing", "packing by", Packing)  # the one that is used is `codecs`
