"""The ledgers of all data sets: the examples that shard 0 leases, and those in the parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from trireme.data.ledger import MOST_DEALT, MOST_POSITIONS, EpochEnd, Ledger, LedgerState, parts_of
from trireme.data.order import SAME_ORDER
from trireme.ps.messages import Lease, Leased, Span

_MOST_DATASETS = 1024
_MANY = 64  # finished spans that are brought into the ledgers at once, at the latest


class ExamplesState(msgspec.Struct, frozen=True, array_like=True):
    """All that the ledgers of a job know; see `ExampleLedgers`."""

    ledgers: dict[str, LedgerState]
    restored: dict[str, list[tuple[int, int]]]
    sizes: dict[str, int]
    orders: dict[str, int]
    answered: dict[int, tuple[int, Leased]]


class ExampleLedgers:
    """One ledger a data set, by name."""

    def __init__(self) -> None:
        self.interleave = False  # how examples are leased; see `trireme.data.ledger.Ledger`
        # the worker whose process has these ledgers for itself, and hears of no examples that
        # others finish: what these hold counts as finished. None where all workers share them.
        self.own: int | None = None
        self._ledgers: dict[str, Ledger] = {}
        # the finished ranges of a checkpoint's data sets that no worker has asked for
        self._restored: dict[str, list[tuple[int, int]]] = {}
        self._sizes: dict[str, int] = {}  # of the data sets of the checkpoint
        # fingerprints of the orders of data sets, also of the checkpoint's, where one is known
        self._orders: dict[str, int] = {}
        self._members: Sequence[int] = ()
        # the last lease of each worker, and its number
        self._answered: dict[int, tuple[int, Leased]] = {}
        # What was finished and is not in the ledgers yet. Whatever looks at them settles first.
        self._finished: list[tuple[int, str, int, int]] = []

    def members(self, workers: Sequence[int]) -> None:
        """Sets the workers that take part; the examples that others hold go back."""
        self._settle()
        self._members = workers
        for ledger in self._ledgers.values():
            ledger.members(workers)

    def lease(self, worker: int, request: Lease) -> Leased:
        """Leases examples; a repeat of a worker's last request gets the same ones."""
        self._settle()
        last, answer = self._answered.get(worker, (0, Leased(())))
        if 0 < request.number < last:
            raise ValueError(
                f"worker:{worker} asks for its lease {request.number}, and had lease {last} "
                "already: the request came late"
            )
        if not request.number or last != request.number:
            answer = self._deal(worker, request)
            self._answered[worker] = (request.number, answer)
        return answer

    def _deal(self, worker: int, request: Lease) -> Leased:
        if not request.size:
            return Leased((), epoch=self.epoch(request.dataset))
        if request.left_out:
            self._leave_out(worker, request)
        if (epoch := self._left_behind(request)) is not None:
            return Leased((), finished=True, epoch=epoch)
        ledger = self._ledger(worker, request)
        for start, stop in request.lacks:
            ledger.lack(worker, start, stop)
        until, spans = request.until or None, []
        if request.count:
            end = EpochEnd(request.end)
            spans = ledger.lease(worker, request.batch, request.count, end, until)
        dealt = tuple(Span(request.dataset, start, stop) for start, stop in spans)
        return Leased(dealt, until is not None and ledger.finished(until), ledger.epoch())

    def _leave_out(self, worker: int, request: Lease) -> None:
        """Counts as finished what a worker's program was dealt and left out."""
        spans = [Span(request.dataset, start, stop) for start, stop in request.left_out]
        if self.why_invalid(spans):
            raise ValueError(
                f"worker:{worker} leaves out examples of {request.dataset!r} that were not dealt"
            )
        self.finish(worker, spans)
        self._settle()

    def epoch(self, dataset: str, worker: int | None = None) -> int:
        """Returns the first epoch of a data set of which some examples are not finished.

        Args:
            dataset: the name; 0 is returned where nobody knows it.
            worker: if given, what other workers hold counts as finished.
        """
        self._settle()
        ledger = self._ledgers.get(dataset)
        if ledger is None and dataset in self._restored and dataset in self._sizes:
            ledger = Ledger(self._sizes[dataset], interleave=False)
            ledger.restore(self._restored[dataset])
        return 0 if ledger is None else ledger.epoch(worker)

    def frontier(self, dataset: str) -> int:
        """Returns the position from which on nothing was dealt; 0 for an unknown data set."""
        ledger = self._ledgers.get(dataset)
        return 0 if ledger is None else ledger.frontier

    def _left_behind(self, request: Lease) -> int | None:
        """Returns the present epoch, if others are in it with another order or size.

        Nothing is left then of the epochs that the worker asks for. Returns None otherwise.
        """
        ledger = self._ledgers.get(request.dataset)
        if ledger is None or not request.until or not request.order:
            return None
        order = self._orders.get(request.dataset, request.order)
        if (ledger.size, order) == (request.size, request.order):
            return None
        begun = request.until // request.size * ledger.size
        return ledger.epoch(self.own) if ledger.finished(begun, self.own) else None

    def _ledger(self, worker: int, request: Lease) -> Ledger:
        """Returns the ledger of a data set, which may be new."""
        name = request.dataset
        ledger = self._ledgers.get(name)
        if ledger is None:
            ledger = self._restored_ledger(worker, request)
        elif ledger.size != request.size:
            if not request.resized or not ledger.between_epochs(self.own):
                raise ValueError(
                    f"worker:{worker} has {_said(request.size)} of {name!r} and others have "
                    f"{_said(ledger.size)}: every worker must load the same data. A program that "
                    "trains on several data sets gives their loaders different names (name=); one "
                    "that changes the size does so between epochs, with resized=True"
                )
            done = [(0, ledger.frontier)] if ledger.frontier else []
            ledger = self._new_ledger(request, resized(worker, request, done, ledger.size))
            self._orders.pop(name, None)
        self._ledgers[name] = ledger
        if request.order:
            order = self._orders.setdefault(name, request.order)
            if order != request.order and not ledger.between_epochs(self.own):
                raise ValueError(
                    f"worker:{worker} and others deal the examples of {name!r} in different "
                    f"orders within an epoch: {SAME_ORDER}. A program that changes the order "
                    "itself does so between epochs, or gives the loaders different names (name=)"
                )
            self._orders[name] = request.order
        return ledger

    def _restored_ledger(self, worker: int, request: Lease) -> Ledger:
        """Returns the ledger of a data set that nobody has asked for, with the checkpoint's."""
        name = request.dataset
        if len(self._ledgers) >= _MOST_DATASETS:
            raise ValueError(f"a job deals the examples of at most {_MOST_DATASETS} data sets")
        before = self._sizes.get(name)
        done = resized(worker, request, self._restored.get(name, []), before)
        if before == request.size:
            done = reordered(worker, request, done, self._orders.get(name, 0))
        self._orders.pop(name, None)
        self._restored.pop(name, None)
        return self._new_ledger(request, done)

    def _new_ledger(self, request: Lease, done: Iterable[tuple[int, int]]) -> Ledger:
        ledger = Ledger(request.size, interleave=self.interleave)
        ledger.members(self._members)
        ledger.restore(done)
        return ledger

    def why_invalid(self, spans: Iterable[Span]) -> str | None:
        """Returns why examples cannot be those of an update; None where they can.

        Only what was dealt can be finished. Of data sets that nobody has asked for, nothing was.
        """
        for span in spans:
            ledger = self._ledgers.get(span.dataset)
            if span.stop < span.start or (ledger is not None and span.stop > ledger.frontier):
                return (
                    f"a push names the examples {span.start} to {span.stop} of {span.dataset!r}, "
                    "which were not dealt"
                )
        return None

    def finish(self, worker: int, spans: Iterable[Span]) -> None:
        """Notes that examples are in the parameters.

        This is called at every push, so the ledgers take many spans at once, later.
        """
        for span in spans:
            self._finished.append((worker, span.dataset, span.start, span.stop))
        if len(self._finished) >= _MANY:
            self._settle()

    def _settle(self) -> None:
        finished, self._finished = self._finished, []
        by_dataset: dict[str, list[tuple[int, int, int]]] = {}
        for worker, dataset, start, stop in finished:
            by_dataset.setdefault(dataset, []).append((worker, start, stop))
        for dataset, spans in by_dataset.items():
            if dataset in self._ledgers:
                self._ledgers[dataset].finish(spans)

    def give_back(self, worker: int, spans: Iterable[Span]) -> None:
        """Takes back examples whose update was not applied; they are leased again."""
        self._settle()
        for span in spans:
            if span.dataset in self._ledgers:
                self._ledgers[span.dataset].give_back(worker, span.start, span.stop)

    def release(self, worker: int) -> None:
        self._settle()
        self._answered.pop(worker, None)
        for ledger in self._ledgers.values():
            ledger.release(worker)

    def consumed(self) -> tuple[Span, ...]:
        """Returns the examples that are in the parameters, data set by data set."""
        self._settle()
        known = [(name, ledger.consumed) for name, ledger in self._ledgers.items()]
        known += [(name, tuple(ranges)) for name, ranges in self._restored.items()]
        return tuple(
            Span(name, start, stop) for name, ranges in sorted(known) for start, stop in ranges
        )

    def sizes(self) -> dict[str, int]:
        """Returns how many examples each data set has, the checkpoint's among them."""
        return self._sizes | {name: ledger.size for name, ledger in self._ledgers.items()}

    def orders(self) -> dict[str, int]:
        """Returns the fingerprints of the data sets' orders, where they are known."""
        return dict(self._orders)

    def export(self) -> ExamplesState:
        self._settle()
        ledgers = {name: ledger.export() for name, ledger in self._ledgers.items()}
        return ExamplesState(
            ledgers,
            dict(self._restored),
            dict(self._sizes),
            dict(self._orders),
            dict(self._answered),
        )

    def resume(self, state: ExamplesState) -> None:
        self._ledgers = {name: Ledger.resumed(ledger) for name, ledger in state.ledgers.items()}
        self._restored, self._sizes = dict(state.restored), dict(state.sizes)
        self._orders, self._answered = dict(state.orders), dict(state.answered)

    def restore(
        self,
        consumed: Iterable[Span],
        sizes: Mapping[str, int] | None = None,
        orders: Mapping[str, int] | None = None,
    ) -> None:
        """Goes on from a snapshot's `consumed`, `sizes` and `orders`."""
        self._settle()
        self._orders = dict(orders or {})
        self._sizes = {name: size for name, size in (sizes or {}).items() if size > 0}
        self._restored = {}
        for span in consumed:
            self._restored.setdefault(span.dataset, []).append((span.start, span.stop))
        for name, ledger in self._ledgers.items():
            ledger.restore(self._restored.pop(name, []))


def resized(
    worker: int, request: Lease, done: Sequence[tuple[int, int]], before: int | None
) -> list[tuple[int, int]]:
    """Returns what is finished of a data set that may be of another size than it was.

    Where that is meant, the epochs that had begun count as finished, and the next one begins.

    Args:
        before: how many examples it had; None where that is not known.
    """
    if before is None or before == request.size:
        return list(done)
    stream = any(
        parts_of(size) > 1 or size >= MOST_POSITIONS - 1 for size in (before, request.size)
    )
    epochs = -(-max((stop for _, stop in done), default=0) // before)
    if stream or not request.resized or epochs * request.size > MOST_DEALT:
        raise ValueError(
            f"the data set {request.dataset!r} had {_said(before)} in the checkpoint, and worker:"
            f"{worker} has {_said(request.size)}: load the same data; or, where it is no stream, "
            "say that this is meant, session.loader(..., resized=True), to go on with the next "
            "epoch"
        )
    return [(0, epochs * request.size)] if epochs else []


def reordered(
    worker: int, request: Lease, done: Sequence[tuple[int, int]], before: int
) -> list[tuple[int, int]]:
    """Returns what is finished of a data set whose order may be another one than it was.

    Between epochs an order may change. Within one, positions would mean other examples: where that
    is meant, the epochs that had begun count as finished.

    Args:
        before: the fingerprint in the checkpoint; 0 where it is not known.
    """
    dealt = max((stop for _, stop in done), default=0)
    whole = not dealt % request.size and sum(stop - start for start, stop in done) == dealt
    if whole or not before or not request.order or before == request.order:
        return list(done)
    if not request.resized:
        raise ValueError(
            f"the checkpoint was saved within an epoch of the data set {request.dataset!r}, and "
            f"worker:{worker} deals its examples in another order: the seed or the sampler has "
            f"changed, or {SAME_ORDER}. Or say that this is meant, "
            "session.loader(..., resized=True), to go on with the next epoch"
        )
    return [(0, -(-dealt // request.size) * request.size)]


def _said(size: int) -> str:
    shards = MOST_POSITIONS - size
    if shards == 1:
        return "a stream"
    return f"a stream of {shards} shards" if parts_of(size) > 1 else f"{size} examples"
