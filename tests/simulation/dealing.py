"""What server 0's ledger should do: each example in the parameters once, holes dealt first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trireme.ps.messages import Lease, Span


class Violation(AssertionError):
    """Something happened that must never happen."""


Who = tuple[int, int]
"""A worker and its incarnation."""


class Dealing:
    """Where every position is, by what server 0 has said.

    Args:
        consumed: the examples that were in the parameters when the job began.

    Attributes:
        before: the positions of those.
        applied: positions that are in the parameters.
        frontier: nothing from here on was ever dealt.
    """

    def __init__(self, consumed: Iterable[Span]) -> None:
        self.applied: set[int] = set()
        self.frontier = 0
        self._held: dict[int, Who] = {}
        self._returned: set[int] = set()
        self._answers: dict[tuple[Who, int], tuple[Span, ...]] = {}
        for span in consumed:
            self.applied.update(range(span.start, span.stop))
            self.frontier = max(self.frontier, span.stop)
        self._returned = set(range(self.frontier)) - self.applied
        self.before = set(self.applied)

    def copy(self) -> Dealing:
        """Returns the same for another copy of shard 0, or for the shard 0 that follows."""
        other = Dealing(())
        other.before, other.applied, other.frontier = self.before, set(self.applied), self.frontier
        other._held, other._returned = dict(self._held), set(self._returned)
        other._answers = dict(self._answers)
        return other

    def deal(self, who: Who, request: Lease, spans: Sequence[Span]) -> None:
        """Server 0 answers a lease."""
        before = self._answers.get((who, request.number))
        if before is not None:
            if before != tuple(spans):
                raise Violation(f"lease {request.number} of {who} had {before}, now {spans}")
            return
        self._answers[who, request.number] = tuple(spans)
        fresh = False
        for span in spans:
            for position in range(span.start, span.stop):
                if position in self.applied:
                    raise Violation(f"example {position} was dealt to {who} and is applied already")
                if position in self._held:
                    holder = self._held[position]
                    raise Violation(f"example {position} was dealt to {who}; {holder} holds it")
                self._held[position] = who
                self._returned.discard(position)
            fresh = fresh or span.start >= self.frontier
        self.frontier = max([self.frontier, *(span.stop for span in spans)])
        if fresh and self._returned:
            raise Violation(f"fresh examples were dealt before {sorted(self._returned)}")

    def is_late(self, who: Who, request: Lease) -> bool:
        """Returns whether a worker has had a later lease already."""
        return any(each == who and number > request.number for each, number in self._answers)

    def apply(self, spans: Sequence[Span]) -> None:
        """An update is in the parameters of server 0."""
        for span in spans:
            for position in range(span.start, span.stop):
                if position in self.applied:
                    raise Violation(f"example {position} is in the parameters twice")
                self.applied.add(position)
                self._held.pop(position, None)
                self._returned.discard(position)

    def give_back(self, who: Who, spans: Sequence[Span]) -> None:
        """An update was dropped as stale."""
        for span in spans:
            for position in range(span.start, span.stop):
                if self._held.get(position) == who:
                    del self._held[position]
                    self._returned.add(position)

    def check_held(self, who: Who, spans: Sequence[Span]) -> None:
        """Checks that a worker knows of all that it was dealt and has not pushed."""
        known = {position for span in spans for position in range(span.start, span.stop)}
        held = {position for position, holder in self._held.items() if holder == who}
        if held - known:
            raise Violation(f"{who} holds {sorted(held - known)} and does not know of it")

    def release(self, gone: Who) -> None:
        """Server 0 has learned that a worker is gone."""
        for position in [p for p, who in self._held.items() if who == gone]:
            del self._held[position]
            self._returned.add(position)

    def check_consumed(self, told: Iterable[Span], applied: set[int]) -> None:
        """Checks what a copy says of the examples in it.

        Args:
            told: the copy's list.
            applied: the positions whose updates are in its values.
        """
        listed = [p for span in told for p in range(span.start, span.stop)]
        if sorted(listed) != sorted(applied):
            wrong = sorted(set(listed) ^ applied)
            raise Violation(f"a copy is wrong about the examples in its values: {wrong}")

    def check_rest(self, dealt: Sequence[Span]) -> None:
        """Checks what a newcomer gets once all others are gone: first all that is missing."""
        listed = [p for span in dealt for p in range(span.start, span.stop)]
        missing = [p for p in range(self.frontier) if p not in self.applied]
        fresh = list(range(self.frontier, self.frontier + len(listed)))
        if listed != (missing + fresh)[: len(listed)]:
            raise Violation(f"at the end {listed} were dealt, and {missing} were missing")
