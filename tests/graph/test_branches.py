"""A stem and two branches, one of them at another place: the branches compute at the same time."""

from __future__ import annotations

from collections import defaultdict
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch import nn

from tests.graph.standing_group import standing_group
from trireme.graph.capture.capture import capture
from trireme.graph.execute.cut import Cut, cut
from trireme.graph.execute.executor import Executor, Microbatch
from trireme.graph.execute.plan import Event, Message, plan
from trireme.graph.execute.transfers import TaskDevice

CPU = torch.device("cpu")
Step = tuple[str, int, int]
"""(forward or backward, position of the segment, micro-batch)"""
Times = dict[Step, tuple[float, float]]


class Branches(nn.Module):
    """A stem, whose value two branches read; their sum. Between its layers a branch can meet."""

    def __init__(self, meeting: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.a = nn.Sequential(nn.Linear(4, 4), meeting, nn.Linear(4, 4))
        self.b = nn.Sequential(nn.Linear(4, 4), meeting, nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        stem = self.stem(x)
        total: torch.Tensor = self.a(stem) + self.b(stem)
        return total


def branches(meeting: nn.Module) -> Cut:
    """Branch b is at place 1, all else at place 0."""
    module = capture(Branches(meeting), (torch.ones(2, 4),), verify=False).module
    operations = [node for node in module.graph.nodes if node.op == "call_function"]
    stacks = {node.name: str(node.meta.get("nn_module_stack")) for node in operations}
    return cut(module, {name: int("'b'" in stack) for name, stack in stacks.items()})


STEM, A, B = 0, 1, 2  # the positions of the segments


def test_the_stem_is_a_segment_of_its_own() -> None:
    parts = branches(nn.Tanh())
    found = [(each.depth, each.place, each.part) for each in parts.segments]
    assert found == [(0, 0, 0), (0, 0, 1), (1, 1, 0), (2, 0, 1), (2, 0, 1)]
    stem, a, b = parts.segments[:3]
    assert stem.outputs == a.receives == b.receives
    assert parts.values[stem.outputs[0]].readers == (1,)
    assert parts.values[a.outputs[0]].readers == ()
    assert parts.transfers == 2


def before(events: tuple[Event, ...], event: Event) -> set[Step]:
    """Returns what has been computed at all places, at least, when an event begins."""
    senders = {message: each for each in events for message in each.sends}
    above: dict[Event, Event] = {}
    last: dict[int, Event] = {}
    for each in events:
        if each.place in last:
            above[each] = last[each.place]
        last[each.place] = each
    found, open_ = set[Event](), [event]
    while open_:
        each = open_.pop()
        messages: tuple[Message, ...] = each.receives
        for one in [*(senders[message] for message in messages), *filter(None, [above.get(each)])]:
            if one not in found:
                found.add(one)
                open_.append(one)
    return {(each.kind, each.segment, each.microbatch) for each in found}


def test_no_branch_waits_for_the_other_one() -> None:
    events = plan(branches(nn.Tanh()), [True] * 4)
    for event in events:
        for this, other in ((A, B), (B, A)):
            if event.segment == this:
                waited = before(events, event)
                assert (event.kind, other, event.microbatch) not in waited
                assert event.kind == "backward" or ("forward", STEM, event.microbatch) in waited


def met(rank: int) -> Times:
    """Computes with branches that wait for each other in their midst, forward and backward.

    Returns when this task has computed each branch of each micro-batch.
    """
    group = dist.new_group(timeout=timedelta(seconds=20))

    @torch.library.custom_op("trireme_tests::meet", mutates_args=())
    def meet(x: torch.Tensor) -> torch.Tensor:
        dist.barrier(group)
        return x.clone()

    meet.register_fake(torch.empty_like)
    meet.register_autograd(lambda _, gradient: meet(gradient))

    class Meeting(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return cast("torch.Tensor", meet(x))

    parts = branches(Meeting())
    told = defaultdict[tuple[str, int, int], list[tuple[float, float]]](list)

    def record(kind: str, depth: int, place: int, number: int, began: float, ended: float) -> None:
        told[kind, depth, number].append((began, ended))

    executor = Executor(parts, rank, [TaskDevice(0, CPU), TaskDevice(1, CPU)])
    executor.record = record
    executor.run([Microbatch([torch.ones(2, 4)], torch.sum) for _ in range(2)])
    # Of depth 0 there are the stem and branch a: the latter is last forward, first backward.
    of_branch = ("forward", A, -1), ("backward", A, 0)
    if rank == 1:
        of_branch = ("forward", B, 0), ("backward", B, 0)
    return {
        (kind, branch, number): told[kind, parts.segments[branch].depth, number][which]
        for kind, branch, which in of_branch
        for number in range(2)
    }


def test_the_branches_compute_at_the_same_time() -> None:
    with standing_group(2) as group:
        one, other = group(met)
    assert len(one) == len(other) == 4
    for (kind, _, number), (began, ended) in one.items():
        its_began, its_ended = other[kind, B, number]
        assert max(began, its_began) <= min(ended, its_ended), (kind, number)
