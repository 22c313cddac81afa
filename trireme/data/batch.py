"""A batch of examples, with their positions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

Span = tuple[int, int]  # positions [start, stop) of an `Order`


@final
@dataclass(slots=True, eq=False)
class Batch:
    """A batch of examples, with their positions.

    It unpacks as the items of the data set, `inputs, targets = batch`; `len(batch)` is the number
    of examples.

    Attributes:
        data: the collated examples: a tuple of tensors, or whatever the data set's items make.
        spans: the positions of the examples. A batch without any only takes part in a step that
            other processes make: it has the examples of another batch, and its gradient does not
            count.
        dataset: the name of the data set whose positions they are.
        epoch: the epoch of its first example; 0 is the first epoch.
        examples: the number of examples; None for that of the positions.
    """

    data: Any
    spans: tuple[Span, ...]
    dataset: str = ""
    epoch: int = 0
    examples: int | None = None

    def __len__(self) -> int:
        if self.examples is not None:
            return self.examples
        return sum(stop - start for start, stop in self.spans)

    def __bool__(self) -> bool:
        return True  # also without examples

    def __iter__(self) -> Iterator[Any]:
        """Iterates over the fields; a batch that is one tensor or one mapping is the only one."""
        return iter(self.data) if isinstance(self.data, tuple | list) else iter((self.data,))

    def __getitem__(self, key: Any) -> Any:
        return self.data[key]

    def __repr__(self) -> str:
        return f"Batch({len(self)} examples at {', '.join(map(str, self.spans))})"
