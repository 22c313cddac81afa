"""The instructions of a shard to its driver. The shard itself sends nothing."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from trireme.errors import ModelMismatchError, UnsupportedOptimizerError
from trireme.ps.messages import Refused
from trireme.wire.message import Message

_CODES: dict[type[Exception], str] = {
    ModelMismatchError: "mismatch",
    UnsupportedOptimizerError: "optimizer",
}


class Reply(msgspec.Struct, frozen=True):
    """Send an answer where a request came from."""

    route: object  # the request's, as the driver gave it
    message: Message
    # tensors whose memory follows it. They may be live values, which the next event can change: a
    # driver that cannot send them at once copies them first.
    payload: Sequence[torch.Tensor] = ()


class Send(msgspec.Struct, frozen=True):
    """Send a message to another shard."""

    shard: int
    message: Message


Instruction = Reply | Send


def refusal(route: object, error: Exception, view: int) -> Reply:
    """Returns the answer to a request that has raised an error."""
    return Reply(route, Refused(_CODES.get(type(error), "rejected"), str(error), view))
