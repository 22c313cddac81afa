"""Makes batches of a stream, for spans of positions that a source provides."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import Any

from torch.utils.data import default_collate

from trireme.data.batch import Batch, Span
from trireme.data.draws import collated, draws_of
from trireme.data.loader import BatchTransform, Source, SpanLoader, transform_generator
from trireme.data.loading import Loading
from trireme.data.seeds import derive
from trireme.streams.stream import Stream

Lack = Callable[[int, int], None]  # told of positions that have no example


class StreamLoader(SpanLoader):
    """Iterates over the batches of a stream, which is read when its examples are needed.

    A batch is made of the examples of one span, or, where the source deals whole parts, of as many
    parts of one epoch as it takes. It is shorter where a part or an epoch ends before.
    """

    def __init__(
        self,
        stream: Stream,
        source: Source,
        lack: Lack,
        *,
        batch_size: int,
        loading: Loading,
        seed: int = 0,
        transform: BatchTransform | None = None,
        drop_last: bool = False,
        ahead: int = 16,
    ) -> None:
        super().__init__(source, batch_size, loading, transform)
        self.stream = stream
        self._lack = lack
        self._collate = loading.collate_fn or default_collate
        self._seed = seed
        self._drop_last = drop_last
        self._ahead = ahead
        self._last: Any = None  # the examples of the last batch, for a step without any

    def stand_in(self) -> Batch:
        examples = self._last
        if examples is None:
            examples, _ = self.stream.take(0, self.batch_size)
        return Batch(self._made(examples, 0), (), examples=0)

    def _batches(self) -> Generator[Batch]:
        while self._next() is not None:
            spans: list[Span] = []
            examples: list[Any] = []
            whole = ended = False
            while len(examples) < self.batch_size:
                start, stop = self._waiting[0]
                epoch = self.stream.epoch(spans[0][0] if spans else start)
                if start == stop or self.stream.epoch(start) != epoch:
                    break
                whole = whole or stop - start > self.batch_size
                stop = min(stop, start + self.batch_size - len(examples))
                found, end = self.stream.take(start, stop)
                _, end_of_span = self._waiting.popleft()
                if (reached := start + len(found)) < end_of_span:
                    self._waiting.appendleft((reached, end_of_span))
                if found:
                    spans.append((start, reached))
                    examples += found
                if end is not None:
                    ended = True
                    self._ended(end)
                if not whole or (len(examples) < self.batch_size and self._next() is None):
                    break
            if self._drop_last and ended and 0 < len(examples) < self.batch_size:
                for span in spans:
                    self._lack(*span)
            elif examples:
                self._last, epoch = examples, self.stream.epoch(spans[0][0])
                try:
                    data = self._made(examples, spans[0][0])
                except BaseException:  # the program may catch it, and iterate again
                    self._waiting.extendleft(reversed(spans))
                    raise
                yield Batch(data, tuple(spans), epoch=epoch)

    def _made(self, examples: list[Any], start: int) -> Any:
        data = collated(self._collate, examples, derive(draws_of(self._seed), start))
        if self._transform is not None:
            data = self._transform(data, transform_generator(self._seed, start))
        return self._loading.pinned(data)

    def _ended(self, end: int) -> None:
        """Notes that a part has ended: positions after that have no examples."""
        part = end // self.stream.size
        stop = (part + 1) * self.stream.size
        if end == stop:
            return
        kept = [span for span in self._waiting if span[0] == span[1] or not (end <= span[0] < stop)]
        self._waiting = deque(kept)
        self._lack(end, stop)

    def _next(self) -> Span | None:
        if not self._waiting:
            self._waiting.extend(self._source(self._ahead))
        if not self._waiting or self._paused:
            return None
        return self._waiting[0]
