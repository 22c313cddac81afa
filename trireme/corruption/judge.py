"""Which of several copies is wrong. Pure: digests go in, a verdict comes out.

Copies that were changed by themselves hardly agree with each other: that two of them do says that
they are right. A copy whose memory has changed between two updates, by its own digests, is wrong
where it differs. Without either nobody can tell.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

Digests = Sequence[int]
"""Of the tensors of one copy, in an order that all copies have."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What differs, and who is wrong."""

    tensors: tuple[int, ...]  # those that differ, by their places
    good: tuple[str, ...]  # the tasks whose copies are right; none where nothing decides
    wrong: tuple[str, ...]  # the tasks whose copies are wrong; none where nothing decides

    @property
    def decided(self) -> bool:
        """Whether it is known who is wrong."""
        return bool(self.wrong)


def judge(copies: Mapping[str, Digests], suspects: Collection[str] = ()) -> Verdict | None:
    """Returns which copies are wrong; None where all are the same.

    Args:
        copies: the digests by task.
        suspects: the tasks whose own digests say that their memory has changed by itself.
    """
    alike = _alike(copies)
    if len(alike) < 2:
        return None
    differing = zip(*copies.values(), strict=False)
    tensors = tuple(place for place, found in enumerate(differing) if len(set(found)) > 1)
    right = _right(alike, suspects)
    wrong = [task for task in copies if task not in right] if right else []
    return Verdict(tensors, tuple(right), tuple(wrong))


def _right(alike: Sequence[Sequence[str]], suspects: Collection[str]) -> Sequence[str]:
    """Returns the tasks whose copy is right; none where nothing decides."""
    trusted = [tasks for tasks in alike if not set(tasks) <= set(suspects)]
    if len(trusted) == 1:
        return trusted[0]
    most = max(map(len, trusted or alike))
    largest = [tasks for tasks in trusted or alike if len(tasks) == most]
    return largest[0] if most > 1 and len(largest) == 1 else ()


def _alike(copies: Mapping[str, Digests]) -> list[list[str]]:
    """Returns the tasks in groups whose copies are the same."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for task, digests in copies.items():
        groups.setdefault(tuple(digests), []).append(task)
    return list(groups.values())
