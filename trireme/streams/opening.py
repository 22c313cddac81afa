"""Opens a stream for a worker: its loader and its dealer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trireme.data.batch import Span
from trireme.data.ledger import EpochEnd
from trireme.data.request import Request
from trireme.errors import ConfigurationError
from trireme.session.backends.local import Local
from trireme.session.data.dealer import Dealer
from trireme.session.worker.worker import Worker
from trireme.streams.loader import StreamLoader
from trireme.streams.stream import Stream, shards_of


def open_stream(
    worker: Worker,
    request: Request,
    name: str,
    transform: Callable[[Any, torch.Generator], Any] | None,
    *,
    resized: bool,
) -> tuple[StreamLoader, Dealer]:
    """Returns the loader of a stream's batches, and the dealer of its positions."""
    backend, kind = worker.backend, type(request.dataset).__name__
    given = {"sampler": request.sampler, "weights": request.weights, "resized": resized or None}
    for argument, value in given.items():
        if value is not None:
            raise ConfigurationError(
                f"a {kind} can only be read in its own order, and has no length: {argument} is "
                "for data sets with __getitem__"
            )
    group = backend.group
    if group is not None and group.mesh.replicas > 1 and not backend.together:
        raise ConfigurationError(
            f"a {kind} in workers of several replicas with parameter servers: where it ends "
            "cannot be agreed on within a step. Let each worker have one replica, or train "
            "without servers"
        )
    compared = worker.task.trial is not None  # then the order must not depend on the workers
    by_position = request.by == "position" or (request.by == "auto" and compared)
    shards = 1 if by_position else shards_of(request.dataset)
    if request.by == "shard" and shards == 1:
        raise ConfigurationError(
            f"by='shard': the {kind} has no num_shards above 1 and shard(num_shards=, index=)"
        )
    batch_size, drop_last = int(request.batch_size), request.drop_last
    seed = worker.setup.settings.options.seed if request.seed is None else request.seed
    stream = Stream(
        request.dataset, shards, loading=request.loading, seed=seed, shuffle=request.shuffle is True
    )
    together = group.mesh.replicas if backend.together and group is not None else 0
    dealer = Dealer(
        backend,
        name,
        stream.size,
        batch_size,
        end=EpochEnd.SHORT,
        whole=shards > 1 and group is None,
    )

    def source(count: int) -> list[Span]:
        if not together:
            return dealer.spans(count)
        return _spans_together(dealer, backend, stream, together * batch_size, drop_last=drop_last)

    loader = StreamLoader(
        stream,
        source,
        dealer.lack,
        batch_size=batch_size,
        loading=request.loading,
        seed=seed,
        transform=transform,
        drop_last=drop_last,
        ahead=1 if together else 16,
    )
    return loader, dealer


def _spans_together(
    dealer: Dealer, backend: Any, stream: Stream, count: int, *, drop_last: bool
) -> list[Span]:
    """Returns the span of the next step, of `count` examples, in processes that step together.

    Each of them reads ahead all examples of the step, so that all know where a part ends, and
    deal what is left alike.
    """
    limit = dealer.until
    assert isinstance(backend, Local), "only processes without servers have the whole ledger"
    if dealer.left:
        return dealer.spans(1)
    dealer.ask(0)  # makes the ledger known
    while True:
        start = backend.frontier(dealer.name)
        # What was dealt before and came back, or is left of a part whose end is known.
        if start and (back := dealer.taken(dealer.ask(1, min(start, limit or start)))):
            return back
        if limit and start >= limit:
            return []
        stop = (start // dealer.size + 1) * dealer.size
        end = stream.look_ahead(start, count)
        if end is None:
            return dealer.taken(dealer.ask(1, stop))
        dealer.lack(start if drop_last else end, stop)
