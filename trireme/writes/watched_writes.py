"""Finds what a program has written to its values, by the values themselves."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import torch

from trireme.errors import ConfigurationError
from trireme.ps.flat import FlatModel, as_bytes
from trireme.ps.snapshot import ModelState
from trireme.session.model.own_writes import OwnWrites
from trireme.session.model.trained import Trained
from trireme.session.model.training_setup import TrainingSetup
from trireme.tensors import to_local

_WHOLE = 2  # the number of steps in which all values are compared, and not a sample
_SAMPLE = 256  # the number of elements of each parameter that are compared in a step, at least
_SAME_PLACES = 8  # steps that compare the same elements: choosing others costs as much as comparing
_RARELY = 100  # sums are computed only where a step takes at least this many times as long
_SUM_SECONDS, _BYTE_SECONDS = 1e-5, 6e-10  # estimated seconds of a sum, and of each of its bytes
_PIECE = 1 << 24  # the number of elements on a device of which a checksum is taken at a time
_SPREAD = 0x1E3779B97F4A7C15  # odd, and with bits in no order
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Sample:
    """Some elements of each parameter in a vector; every few steps it chooses other elements."""

    def __init__(self, placed: Sequence[tuple[str, int, int]], device: torch.device) -> None:
        self._names = [name for name, _, _ in placed]
        # The parameters of which it has all elements.
        self.whole = {name for name, start, stop in placed if stop - start < 2 * _SAMPLE}
        steps = [max(1, (stop - start) // _SAMPLE) for _, start, stop in placed]
        each = [
            torch.arange(start, stop, step).clamp(max=max(start, stop - step))
            for (_, start, stop), step in zip(placed, steps, strict=True)
        ]
        self._counts = [len(places) for places in each]
        self._first = torch.cat(each).to(device)
        self._steps = torch.tensor(steps).repeat_interleave(torch.tensor(self._counts)).to(device)
        self._places, self._drawn = self._first, 0
        self._taken = torch.empty(0)

    def take(self, vector: torch.Tensor, step: int) -> None:
        """Takes the elements of a global step, the same in every process."""
        if (drawn := step // _SAME_PLACES) != self._drawn:
            self._drawn = drawn
            self._places = torch.remainder(drawn, self._steps).add_(self._first)
        self._taken = _bits(vector).index_select(0, self._places)

    def changed(self, vector: torch.Tensor) -> set[str]:
        """Returns the names of the parameters whose elements differ from those taken."""
        here = _bits(vector).index_select(0, self._places)
        if torch.equal(here, self._taken):
            return set()
        differ = here != self._taken
        parts = zip(self._names, torch.split(differ, self._counts), strict=True)
        return {name for name, part in parts if part.any()}


class ValueWatch:
    """Finds the parameters that were written to since `remember`.

    Autograd counts the writes to a tensor, but for those through `.data`, and a write may put back
    what was there. So values are compared: a sample of them at each step, and in the first steps,
    and once the program has written, checksums of all bits. Values that are `still`, as updates do
    not change them, have checksums from the beginning. Where others need not judge alike there is
    one checksum of each vector until the program has written, if steps take much longer than that.
    """

    def __init__(
        self,
        trained: Trained,
        *,
        still: bool = False,
        clock: Callable[[], float] | None = None,  # None where others must judge alike
    ) -> None:
        # The parameters whose writes autograd has counted, and of which no sum says whether they
        # have changed.
        self.unknown: list[str] = []
        self._clock = clock
        self._trained = trained
        self._still = still
        self._steps = self._step = 0
        self._often = False  # whether the program has written: then all values are compared
        self._whole = False  # whether they are in this step
        self._names: list[str] = []
        self._versions: list[tuple[int, int]] = []
        self._sums: list[int] = []
        self._totals: list[int] = []  # of the vectors, where there are no sums
        self._remembered = self._cost = 0.0  # when it last took values; seconds of all totals
        self._samples: list[_Sample] = []  # one for each vector
        self._uncertain: set[str] = set()  # unknown since before the package wrote itself
        self._found: set[str] = set()  # since then: other values may come over those written

    def remember(self, step: int | None = None) -> None:
        """Takes the present values, at a global step; at that of the last call without one."""
        self._step = self._step if step is None else step
        self._found, self._uncertain = set(), set()
        locals_ = self._locals()
        vectors = self._vectors(locals_)
        if (names := list(self._trained.parameters)) != self._names:
            self._names = names
            pairs = zip(vectors, self._placed(vectors), strict=True)
            self._samples = [_Sample(placed, vector.device) for vector, placed in pairs]
            self._cost = sum(map(_seconds_of_sum, vectors))
        versions = [(each._version, each.data_ptr()) for each in locals_]
        self._whole = self._often or self._steps < _WHOLE
        if not (self._still and self._sums and versions == self._versions):
            known = self._whole or self._still
            self._sums = [_sum(each) for each in locals_] if known else []
        again = step is None and bool(self._totals)  # at most a few times a step
        self._totals = [] if self._sums else self._affordable_totals(vectors, again)
        self._versions = versions
        for sample, vector in zip(self._samples, vectors, strict=True):
            sample.take(vector, self._step)
        self._steps += 1

    def _affordable_totals(self, vectors: Sequence[torch.Tensor], again: bool) -> list[int]:
        """Returns the sum of each vector; none where that takes more than a part of a step."""
        if self._clock is None:
            return []
        before, self._remembered = self._remembered, self._clock()
        affordable = again or self._remembered - before >= _RARELY * self._cost
        return [_sum(vector) for vector in vectors] if affordable else []

    def written(self) -> list[str]:
        """Returns the names of the parameters that were written to; none before `remember`."""
        if self._names != list(self._trained.parameters):
            return []
        locals_, found = self._locals(), self._found
        counted = set()
        for name, each, (version, place) in zip(self._names, locals_, self._versions, strict=True):
            if each._version != version:
                counted.add(name)
            if each.data_ptr() != place:
                found.add(name)
        self._often |= bool(counted)
        for sample, vector in zip(self._samples, self._vectors(locals_), strict=True):
            found |= sample.changed(vector)
        for name, each, before in zip(self._names, locals_, self._sums, strict=False):
            if (name in counted or self._whole) and _sum(each) != before:
                found.add(name)
        if counted and self._totals:
            if self._totals == [_sum(vector) for vector in self._vectors(locals_)]:
                counted.clear()
            else:
                found |= counted
        counted.difference_update(*(sample.whole for sample in self._samples))
        self._often |= bool(found)
        unknown = self._uncertain if self._sums else self._uncertain | counted
        self.unknown = sorted(unknown - found)
        return [name for name in self._names if name in found]

    def without(self, names: Collection[str]) -> tuple[set[str], set[str]]:
        """Returns the parameters that were written to, and the unknown, but for these names."""
        known = zip(self._names, self._locals(), self._versions, strict=False)
        own = {name for name, each, (_, at) in known if name in names and each.data_ptr() == at}
        return {*self.written()} - own, {*self.unknown} - own

    def keep(self, found: set[str], unknown: set[str]) -> None:
        self._found, self._uncertain = found, unknown

    def warning(self) -> str:
        return ""

    def values_of(self, names: Sequence[str]) -> int:
        chosen = [to_local(self._trained.parameters[name].detach()) for name in names]
        return zlib.crc32(repr([_sum(each) for each in chosen]).encode())

    def _locals(self) -> list[torch.Tensor]:
        parameters = self._trained.parameters.values()
        flat = isinstance(self._trained, FlatModel)
        return list(parameters) if flat else [to_local(each) for each in parameters]

    def _vectors(self, locals_: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if isinstance(self._trained, FlatModel):
            return self._trained.values
        return [each.detach().reshape(-1) for each in locals_]

    def _placed(self, vectors: Sequence[torch.Tensor]) -> list[list[tuple[str, int, int]]]:
        flat = self._trained
        if not isinstance(flat, FlatModel):
            sizes = zip(self._names, vectors, strict=True)
            return [[(name, 0, each.numel())] for name, each in sizes]
        known = {id(parameter): name for name, parameter in flat.parameters.items()}
        return [[(known[id(p)], start, stop) for p, start, stop in each] for each in flat.placed]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the elements as integers: NaN equals itself then, and 0 is not -0."""
    return tensor.detach().view(_INTEGERS[tensor.dtype.itemsize])


def _seconds_of_sum(vector: torch.Tensor) -> float:
    """Estimates the seconds of a sum; infinite on a device, whose queue it would wait for."""
    if vector.device.type != "cpu":
        return math.inf
    return _SUM_SECONDS + _BYTE_SECONDS * vector.nbytes


def _sum(tensor: torch.Tensor) -> int:
    """Returns a checksum of the elements, which depends on their places too."""
    bits = _bits(tensor).contiguous().reshape(-1)
    if bits.device.type == "cpu":
        return zlib.crc32(as_bytes(bits))
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), _PIECE):  # each element times an odd number of its place
        piece = bits[start : start + _PIECE].long()
        places = torch.arange(start, start + len(piece), device=bits.device).mul_(_SPREAD)
        total += places.bitwise_xor_(places >> 29).mul_(_SPREAD).bitwise_or_(1).mul_(piece).sum()
    return int(total)


class WatchedWrites(OwnWrites):
    """Judges what a program has written to its values since the last update of the job.

    Values of `lost` come from elsewhere, those of `sent` are sent to the servers.
    """

    def __init__(self, lost: Sequence[ValueWatch], *, sent: FlatModel | None = None) -> None:
        self._flat = sent
        self._sent = None if sent is None else ValueWatch(sent)
        self._lost = list(lost)
        self.watches = [*self._lost, *([] if self._sent is None else [self._sent])]

    def remember(self, step: int) -> None:
        for watch in self.watches:
            watch.remember(step)

    @contextmanager
    def ours(self, names: Collection[str] = ()) -> Iterator[None]:
        kept = [watch.without(names) for watch in self.watches]
        yield
        for watch, (found, unknown) in zip(self.watches, kept, strict=True):
            watch.remember()
            watch.keep(found, unknown)

    def check(self) -> str:
        unknown: list[str] = []
        for watch in self._lost:
            if names := watch.written():
                raise ConfigurationError(
                    f"the program has written to {named(names)} itself since the last step, and "
                    "the change would be lost: the values come from parameter servers, or from "
                    "the parts of the model that processes train. Call "
                    "session.write_values({name: tensor}) instead (optimizer.write_values in a "
                    "loop of your own), on one worker under async. An optimizer that the job was "
                    "not given writes too: give the job all of them. To put back what was there "
                    "to the bit is no change: by copy_ of a clone, as sub_ of what was added rounds"
                )
            unknown += watch.unknown
        if not unknown:
            return next(filter(None, (watch.warning() for watch in self.watches)), "")
        return (
            f"the program has written to {named(unknown)} itself since the last step. If a value "
            "is another now, the change is LOST: the values come from parameter servers. Call "
            "write_values({name: tensor}) instead. From now on such a change is an error"
        )

    def to_send(self, held: Callable[[], ModelState]) -> tuple[dict[str, torch.Tensor], int] | None:
        if self._sent is None or self._flat is None:
            return None
        parameters = self._flat.parameters
        if not self._sent.written():
            if not (unknown := self._sent.unknown):
                return None
            there = held()  # with what other workers have written to it since
            pairs = [(parameters[name], there.values[name]) for name in unknown]
            given = [(one, other.to(one.dtype).reshape(one.shape)) for one, other in pairs]
            same = all(torch.equal(_bits(a).cpu(), _bits(b).cpu()) for a, b in given)
            if same and not there.written:
                return None
        self._flat.take_back_values()
        values = {name: parameter.detach().cpu() for name, parameter in parameters.items()}
        return values, self._sent.values_of(list(values)) | 1


def named(names: Sequence[str]) -> str:
    """Returns the names of parameters, shortly."""
    if len(names) == 1:
        return f"parameter {names[0]!r}"
    return f"parameters {names[0]!r} and {len(names) - 1} more"


def watched_writes(setup: TrainingSetup) -> WatchedWrites:
    """Returns what watches the values of a model in its job."""
    task, rule = setup.settings.task, setup.settings.rule
    copies = [] if setup.part is None or setup.lean else [ValueWatch(setup.flat, still=True)]
    if task.servers and setup.outer is not None:  # a part of the worker's delta
        return WatchedWrites(())
    if task.servers:
        rounds_of_all = rule.synchronous and not rule.aggregate
        if rounds_of_all and setup.process_group is None and not setup.settings.prefetches:
            return WatchedWrites((), sent=setup.flat)
        return WatchedWrites([ValueWatch(setup.trained, clock=time.perf_counter), *copies])
    return WatchedWrites(copies)
