"""The state of one shard, which its parts share, and the checks of requests against it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import torch

from trireme.errors import ConfigurationError, ModelMismatchError
from trireme.ps.extension import HeldExtension
from trireme.ps.extra import Extra, ShownExtension
from trireme.ps.flat import PartBuffer
from trireme.ps.layout import Layout
from trireme.ps.leader.leader import Leader
from trireme.ps.messages import Attach, GroupSpec, LayoutSpec, OptimizerSpec, Push
from trireme.ps.optimizers import mismatch
from trireme.ps.rule import Rule
from trireme.ps.shard.participants import Participants
from trireme.ps.shard.push_table import PushTable
from trireme.ps.shard.values.parameters import Values
from trireme.ps.shard.watch import Watch


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What one worker has shown; that of the first worker holds for all."""

    task: str  # the worker's name, such as `worker:0`
    layout: Layout
    optimizer: OptimizerSpec
    rule: Rule
    extension: ShownExtension | None = None  # its extra values

    def check_same(self, other: ModelDescription) -> None:
        self.layout.check_same(other.layout, whose=self.task, others=other.task)
        kind = next((each.kind for each in (self.extension, other.extension) if each), "")
        for what, mine, theirs in (
            ("strategies", _shown(self.rule), _shown(other.rule)),
            ("optimizers", self.optimizer.names, other.optimizer.names),
            (kind, _parts(self.extension), _parts(other.extension)),
        ):
            if mine != theirs:
                raise ModelMismatchError(
                    f"the {what} differ: {_besides(mine, theirs)} at {self.task}, "
                    f"{_besides(theirs, mine)} at {other.task}; start every task with the same "
                    "program and options"
                )

    def within(self, layout: Layout, groups: int) -> ModelDescription:
        """Returns the description of the parameters that are in a layout."""
        named = {each.name: each for each in self.layout.spec.parameters}
        own = tuple(
            msgspec.structs.replace(named[each.name], addition=each.addition)
            for each in layout.spec.parameters
            if each.name in named
        )
        optimizer = OptimizerSpec(self.optimizer.name, self.optimizer.groups[:groups])
        shown = Layout(LayoutSpec(own, self.layout.spec.bounds))
        return replace(self, layout=shown, optimizer=optimizer)


class ShardState:
    """The state of one shard."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.step = 0  # the global step of the values
        self.written_at = -1  # the last step at which a program has written to them
        self.loaded_in = 0  # the number of the view in which values were loaded; 0 before
        self.shown: ModelDescription | None = None  # what the first worker has shown; None before
        self.rule = Rule()  # the rule of what was shown
        self.synchronous = False  # whether the rule is synchronous; read several times a push
        self.values: Values | None = None  # the values; None before a worker has shown its model
        self.watch = Watch()  # looks at the values
        self.extension: HeldExtension | None = None  # the extra values; None where there are none
        # whether answers have the extra values that are wanted: not at a backup, whose answers
        # nobody hears
        self.shows_extra = True
        # the optimizer's hyper-parameters, where they have changed since it was shown
        self.hyper: Sequence[GroupSpec] | None = None
        # how many pushes had each verdict, and other counts
        self.counters: Counter[str] = Counter()
        self.over = False  # whether training has ended, by the leader's decision
        self.attached: set[int] = set()  # the workers that have shown their model, also the lost
        self._behind: dict[int, Layout] = {}  # of the workers that lack what others have added
        self.participants = Participants()  # the workers of the newest view
        self.table = PushTable()  # the exactly-once table
        # decides for all shards, at shard 0; None at any other
        self.leader = None if number else Leader()

    @property
    def loaded(self) -> bool:
        return self.loaded_in > 0

    @property
    def layout(self) -> Layout | None:
        """The model's layout; None before the first worker has shown it."""
        return None if self.shown is None else self.shown.layout

    def layout_of(self, worker: int, newest: Layout | None = None) -> Layout | None:
        """Returns the layout of a worker's pushes and of the values that it is sent."""
        return self._behind.get(worker, newest or self.layout)

    def values_for(self, worker: int) -> Sequence[torch.Tensor]:
        """Returns the values of the parameters that a worker has."""
        assert self.values is not None
        behind = self._behind.get(worker)
        return self.values.buffer.vectors[: None if behind is None else len(behind.vectors)]

    def know(self, worker: int, layout: Layout | None) -> None:
        """Notes the layout that a worker has."""
        self.attached.add(worker)
        self._behind.pop(worker, None)
        if layout is not None and layout is not self.layout:
            self._behind[worker] = layout

    def check_known(self, shown: ModelDescription, *, adds: bool = False) -> Layout:
        """Checks that a worker's model is the job's, but for what others have added; returns that.

        Args:
            adds: whether the worker may have more than the job.
        """
        mine = self.shown
        assert mine is not None
        known = mine.layout.known_to(shown.layout)
        if not adds and known is mine.layout:
            mine.check_same(shown)
            return known
        groups = min(len(mine.optimizer.groups), len(shown.optimizer.groups))
        theirs = shown.within(known, groups) if adds else shown
        mine.within(known, groups).check_same(theirs)
        same = (each for each in self._behind.values() if each.spec == known.spec)
        return next(same, known)

    def extended(self, push: Push, gradients: PartBuffer) -> tuple[Push, PartBuffer]:
        """Returns an update without gradients for the parameters that its worker lacks."""
        layout, count = self.layout, len(gradients.vectors)
        if layout is None or count == len(layout.vectors):
            return push, gradients
        first = layout.vectors[count].placed[0].position
        absent = (*push.absent, *range(first, len(layout.spec.parameters)))
        hyper = push.hyper
        if hyper is not None:
            hyper = (*hyper, *self.present[len(hyper) :])
        push = msgspec.structs.replace(push, absent=absent, hyper=hyper)
        return push, gradients.extended(layout)

    @property
    def present(self) -> Sequence[GroupSpec]:
        return self.hyper or (self.shown.optimizer.groups if self.shown is not None else ())

    def shown_by(self, task: str, request: Attach) -> ModelDescription:
        """Returns the model that a worker shows, if it is laid out over the job's shards."""
        layout, view = Layout(request.layout), self.participants.view
        bounds = view.bounds if view.shards else layout.spec.bounds
        servers = layout.spec.shards if view.shards else len(view.servers) or layout.spec.shards
        wrong = layout.spec.bounds != bounds or layout.spec.shards != servers
        if wrong or not self.number < layout.spec.shards:
            raise ConfigurationError(
                f"{task} lays its model out in {layout.spec.shards} shards that begin at the slots "
                f"{layout.spec.bounds[:-1]}, and the job has {len(bounds) - 1}, at {bounds[:-1]}"
            )
        return ModelDescription(task, layout, request.optimizer, request.rule, request.extension)

    def why_invalid(self, worker: int, push: Push) -> str | None:
        """Returns why a push of a worker makes no sense; None when it does."""
        last, period = self.table.records[worker].sequence, self.rule.period
        if not self.loaded or self.shown is None:
            return "a push came before the values were loaded"
        if push.sequence > last + 1:
            return (
                f"push {push.sequence} of worker:{worker} came after push {last}: the ones between "
                "are missing"
            )
        if not 0 <= push.weight < float("inf"):
            return f"a push weighs {push.weight}: it must be finite and 0 or more"
        least = 1 if self.synchronous or push.weight else 0
        if not least <= push.steps <= period:
            return f"a push is of {push.steps} steps, and may be of {least} to {period}"
        if self.synchronous and push.pulled > self.step:
            here = self.participants.view.primary_name(self.number)
            return (
                f"a push for step {push.pulled}, and {here} is at {self.step}: pull the values of "
                "one step from all servers"
            )
        reason = None
        if push.absent:
            reason = _nowhere(self.shown.layout, push.absent)
        if reason is None and push.examples and self.leader is not None:
            reason = self.leader.examples.why_invalid(push.examples)
        if reason is None and push.extra:
            reason = self.extra_mismatch(push.extra)
        if reason is None and push.hyper is not None:
            reason = mismatch(self.shown.optimizer, push.hyper)
        return reason

    def overfull(self, worker: int, push: Push) -> str | None:
        """Returns why there is no room for the extra values of a new push; None where there is.

        A primary asks before it writes the push to its log: a replica that is being filled has too
        few of them to tell.
        """
        record = self.table.records.get(worker)
        if not push.extra or self.extension is None or record is None:
            return None
        if push.sequence <= record.sequence or self.why_invalid(worker, push) is not None:
            return None
        return self.extension.overfull(push.extra)

    def extra_mismatch(self, extra: Extra) -> str | None:
        if self.extension is None:
            return "a request names values besides the parameters, and the model has none"
        return self.extension.mismatch(extra)


def _nowhere(layout: Layout, absent: tuple[int, ...]) -> str | None:
    """Returns why these are no positions of parameters; None when they are."""
    count = len(layout.spec.parameters)
    if absent[0] < 0 or absent[-1] >= count or list(absent) != sorted(set(absent)):
        return f"a push names absent parameters that are not, ascending, among the {count}"
    return None


def _parts(shown: ShownExtension | None) -> tuple[str, ...]:
    return () if shown is None else (shown.kind, *shown.parts)


def _shown(rule: Rule) -> tuple[str, ...]:
    fields = ((name, getattr(rule, name)) for name in rule.__struct_fields__)
    return tuple(f"{name} {value}" for name, value in fields if value is not None)


def _besides(names: Sequence[str], others: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(n for n in names if n not in others) or names) or "none"
