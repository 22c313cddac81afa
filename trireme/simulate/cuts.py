"""How a consistent cut over all servers is asked for."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

from trireme.ps.messages import Cut, Freeze, Frozen, Snapshot, TensorSpec, Thaw
from trireme.simulate.client import Answer, Client, Request
from trireme.simulate.loop import Start
from trireme.wire.message import Message

__all__ = ["Copy", "freeze", "take_cut"]

Copy = list[tuple[Snapshot, list[tuple[TensorSpec, torch.Tensor]]]]
"""What the servers answered to one cut, in their order."""


def take_cut(client: Client, rng: random.Random) -> Generator[Start, Any, Copy | None]:
    """Tries once to copy all servers' state; returns None when something came in between."""
    token = rng.getrandbits(53)
    frozen = yield from freeze(client, token)
    if frozen is None:
        return None
    decided: dict[int, int] = {}
    for answer in frozen:
        for worker, sequence in answer.decided:
            decided[worker] = max(sequence, decided.get(worker, 0))
    step = max(answer.step for answer in frozen)
    cut = Cut(token, step, tuple(sorted(decided.items())), True)
    answers: dict[int, Answer] = yield client.ask(_all(client, lambda: cut))
    copies: Copy = []
    for server in sorted(answers):
        message, payload = answers[server]
        if isinstance(message, Snapshot):
            copies.append((message, list(zip(message.tensors, payload, strict=True))))
    return copies if len(copies) == len(answers) else None


def freeze(client: Client, token: int) -> Generator[Start, Any, Sequence[Frozen] | None]:
    """Freezes one server after the other; thaws them again if one of them is busy."""
    frozen: list[Frozen] = []
    for server in range(len(client.lanes)):
        answers = yield client.ask({server: Request(lambda view: Freeze(token))})
        message = answers[server][0]
        if not isinstance(message, Frozen):
            yield from _thaw(client, token, server)
            return None
        frozen.append(message)
    if len({answer.view for answer in frozen}) > 1:
        yield from _thaw(client, token, len(frozen))
        return None
    return frozen


def _thaw(client: Client, token: int, count: int) -> Generator[Start, Any, None]:
    for server in range(count):
        yield client.ask({server: Request(lambda view: Thaw(token))})


def _all(client: Client, build: Callable[[], Message]) -> dict[int, Request]:
    return {server: Request(lambda view: build()) for server in range(len(client.lanes))}
