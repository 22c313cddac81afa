"""Which of several copies is wrong. Pure: digests go in, a verdict comes out.

Copies that were changed by themselves hardly agree with each other: that two of them do says that
they are right. A copy whose memory has changed between two updates, by its own digests, is wrong
where it differs. Without either nobody can tell.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

_NAMES = 3
"""So many tensors are named."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What differs, and who is wrong."""

    tensors: tuple[int, ...]  # those that differ, by their places
    good: tuple[str, ...]  # the tasks whose copies are right; none where nothing decides
    wrong: tuple[str, ...]  # all others

    def said(self, what: str, step: int, names: Sequence[str]) -> str:
        """Returns it in words; `names` are those of the tensors."""
        found = [names[place] for place in self.tensors if place < len(names)]
        more = f" and {len(found) - _NAMES} more" if len(found) > _NAMES else ""
        where = f"at step {step}" + (f", in {', '.join(found[:_NAMES])}{more}" if found else "")
        if not self.good:
            both = " and ".join(self.wrong)
            return f"{both} have different values of {what} {where}; nothing says who is right"
        wrong, good = ", ".join(self.wrong), ", ".join(self.good)
        return f"{wrong} has other values of {what} than {good} {where}"


def judge(copies: Mapping[str, Sequence[int]], suspects: Collection[str] = ()) -> Verdict | None:
    """Returns which copies are wrong; None where all are the same.

    Args:
        copies: by task the digests of its tensors, in an order that all have.
        suspects: the tasks whose own digests say that their memory has changed by itself.
    """
    groups: dict[tuple[int, ...], list[str]] = {}
    for task, digests in copies.items():
        groups.setdefault(tuple(digests), []).append(task)
    if len(groups) < 2:
        return None
    differing = zip(*copies.values(), strict=False)
    tensors = tuple(place for place, found in enumerate(differing) if len(set(found)) > 1)
    trusted = [tasks for tasks in groups.values() if not set(tasks) <= set(suspects)]
    largest = sorted(trusted or groups.values(), key=len, reverse=True)
    decided = len(largest) == 1 or len(largest[0]) > len(largest[1])
    good = tuple(largest[0]) if decided else ()
    return Verdict(tensors, good, tuple(task for task in copies if task not in good))
