"""What a job takes over from a checkpoint: is it of this model? Nothing is changed before."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

import msgspec
import torch

from trireme.errors import CheckpointError
from trireme.ps.messages import Span, WorkerProgress
from trireme.session.checkpoint import CheckpointData
from trireme.session.checkpoint.streamed import renamed, shapes_of
from trireme.wire.message import Index, Name, Number


class JobState(msgspec.Struct, frozen=True):
    """The part of a checkpoint's `state` from which a job continues."""

    lacks: tuple[str, ...] = ()  # the parts that the checkpoint lacks, in words
    applies: str = "gradients"  # what the servers applied
    workers: Index | None = None  # their number; None where it is unknown
    sizes: dict[Name, Number] = {}  # the number of examples of each data set
    orders: dict[Name, Number] = {}  # the fingerprint of each data set's order
    consumed: dict[Name, tuple[tuple[Number, Number], ...]] = {}  # examples in the parameters
    pushes: tuple[WorkerProgress, ...] = ()  # of the job's workers
    kept: dict[Name, str] = {}  # the states that the program keeps, in base64
    tables: dict[Name, Name] = {}  # what the checkpoint says of the extra values

    @property
    def states(self) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for name, text in self.kept.items():
            with suppress(ValueError):
                found[name] = base64.b64decode(text, validate=True)
        return found

    @property
    def spans(self) -> tuple[Span, ...]:
        return tuple(
            Span(name, start, stop)
            for name, ranges in self.consumed.items()
            for start, stop in ranges
        )


def converted(data: CheckpointData) -> CheckpointData:
    """Returns a checkpoint without the int8 values that an earlier version wrote."""
    kept = {name: name for name in data.optimizer if not name.endswith("/published")}
    return replace(data, optimizer=renamed(data.optimizer, kept))


def job_state(data: CheckpointData) -> JobState:
    """Returns the part of a checkpoint's `state` from which a job continues."""
    try:
        state = msgspec.convert(dict(data.state), JobState)
        for span in state.spans:
            if span.stop < span.start:
                raise ValueError(
                    f"[{span.start}, {span.stop}) of data set {span.dataset!r} is not a range"
                )
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"the state of the checkpoint of step {data.step} is not that of a job: {error}. "
            "Another program has written it; choose another checkpoint or run directory"
        ) from error
    return state


def check_model(
    data: CheckpointData,
    parameters: Mapping[str, torch.Tensor],
    everything: Mapping[str, torch.Tensor],
) -> None:
    """Checks that a checkpoint has each trained parameter, and each average if it has any."""
    known, averages = shapes_of(data.model), shapes_of(data.average)
    for what, found in (("parameter", known), ("moving average of", averages)):
        for name in parameters if found is known or averages else ():
            if name not in found:
                raise _of_another(data, f"has no {what} {name!r}")
            if not found[name].is_floating_point():
                raise _of_another(data, f"has {what} {name!r} of {found[name].dtype}")
            _check_shape(data, what, name, found[name], parameters[name])
    for name in everything.keys() & known.keys():
        _check_shape(data, "tensor", name, known[name], everything[name])


def _check_shape(
    data: CheckpointData, what: str, name: str, found: torch.Tensor, own: torch.Tensor
) -> None:
    then, now = tuple(found.shape), tuple(own.shape)
    if then != now:
        raise _of_another(data, f"has {what} {name!r} of shape {then}, and the model {now}")


def _of_another(data: CheckpointData, why: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint of step {data.step} {why}: it is of another model; choose another run "
        "directory"
    )
