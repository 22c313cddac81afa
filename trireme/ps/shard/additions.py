"""Parameters that workers add while training goes on: every shard adds them at the same point."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from trireme.errors import ConfigurationError, ModelMismatchError, Rejected, TriremeError
from trireme.ps.messages import Push
from trireme.ps.shard.answers import Asked, Wait, wait
from trireme.ps.shard.instructions import Reply, refusal
from trireme.ps.shard.participants import Participant
from trireme.ps.shard.push_table import Pending
from trireme.ps.shard.state import ModelDescription, ShardState
from trireme.ps.shard.values.parameters import Values, ValuesFactory
from trireme.ps.shard.values.snapshot_tensors import Tensors
from trireme.ps.snapshot_messages import AddParameters, ParametersAdded


class _Wanted(msgspec.Struct, frozen=True):
    shown: ModelDescription
    message: AddParameters
    tensors: Tensors


class Additions:
    """Holds the requests to add parameters until the leader has decided on one of them.

    A request stays when its worker is lost: the leader may have decided on it already.
    """

    def __init__(
        self, state: ShardState, factory: ValuesFactory, pushes: Mapping[Participant, Pending]
    ) -> None:
        self._state, self._factory, self._pushes = state, factory, pushes
        self._held: dict[tuple[int, int], Asked] = {}  # by worker and token

    @property
    def tokens(self) -> tuple[tuple[int, int], ...]:
        """The requests that are held: pairs (worker, token)."""
        return tuple(self._held)

    def ask(
        self, now: float, route: object, who: Participant, message: AddParameters, tensors: Tensors
    ) -> list[Reply]:
        """Holds a request; or answers it, where the job trains these parameters already.

        Raises:
            TriremeError: they cannot be added.
        """
        state, task = self._state, f"worker:{who.worker}"
        if not state.loaded or state.shown is None:
            raise Rejected("no values are loaded yet, so there is nothing to add to")
        shown, newest = state.shown_by(task, message.shown), state.shown.layout
        known = state.check_known(shown, adds=True)
        has = {each.name for each in known.spec.parameters}
        more = [each.name for each in shown.layout.spec.parameters if each.name not in has]
        if more and known is not newest:
            lacks = next(each.name for each in newest.spec.parameters if each.name not in has)
            raise ModelMismatchError(
                f"{task} has added parameter {more[0]!r} to its optimizer, and not {lacks!r}, "
                "which the job trains: every worker adds the same, in the same order"
            )
        if not more or shown.layout.spec != newest.grown(shown.layout.spec.parameters).spec:
            state.know(who.worker, known)
            return [Reply(route, ParametersAdded(known.spec.parameters))]
        if state.extension is not None:
            raise ConfigurationError(
                f"{task} has added parameter {more[0]!r} to its optimizer: a model that has values "
                "besides parameters gets none later; give the optimizer all from the start"
            )
        if state.synchronous:
            for other, pending in self._pushes.items():
                if pending.push.weight and not pending.answered:
                    raise ConfigurationError(_apart(task, more[0], f"worker:{other.worker}"))
        self._values(shown, tensors)  # raises what makes no sense
        wanted = _Wanted(shown, message, tensors)
        self._held[who.worker, message.token] = Asked(who, route, now, wanted)
        return []

    def unlike(self, worker: int, push: Push) -> str | None:
        """Returns why an update cannot make a round, as its worker lacks parameters; or None."""
        state = self._state
        if not (state.synchronous and push.weight) or push.pulled < state.step:
            return None
        task, layout = f"worker:{worker}", state.layout_of(worker)
        if layout is not None and state.shown is not None and layout is not state.layout:
            later = state.shown.layout.spec.parameters[len(layout.spec.parameters)]
            return _apart(state.shown.task, later.name, task)
        for held in self._held.values():
            if held.owner.worker != worker and state.participants.holds(held.owner):
                added = held.request.shown.layout.spec.parameters[-1]
                return _apart(f"worker:{held.owner.worker}", added.name, task)
        return None

    def make(self, worker: int, token: int) -> list[Reply]:
        """Adds the parameters of a request; returns the answers to all."""
        state, held = self._state, self._held
        before, self._held = state.layout, {}
        wanted: _Wanted = held[worker, token].request
        assert before is not None
        groups = state.present  # others may have changed them
        state.hyper = (*groups, *wanted.shown.optimizer.groups[len(groups) :])
        state.values, state.shown = self._values(wanted.shown, wanted.tensors), wanted.shown
        state.values.optimizer.set_hyper(state.hyper)
        for each in state.attached:  # a lost worker may come back without showing its model again
            state.know(each, state.layout_of(each, before))
        for pending in self._pushes.values():
            pending.push, pending.gradients = state.extended(pending.push, pending.gradients)
        out = list[Reply]()
        for asked in held.values():
            route, message = asked.route, asked.request.message
            if route is None:  # its worker is another one by now
                continue
            try:
                out += self.ask(asked.since, route, asked.owner, message, asked.request.tensors)
            except TriremeError as error:
                out.append(refusal(route, error, state.participants.view.number))
        return out

    def take_routes(self, *, absent: bool = False) -> list[object]:
        """Returns the routes of all requests, or of workers that are out; none is answered then."""
        holds = self._state.participants.holds
        gone = {
            key: held
            for key, held in self._held.items()
            if held.route is not None and not (absent and holds(held.owner))
        }
        for key, held in gone.items():
            self._held[key] = msgspec.structs.replace(held, route=None)
        return [held.route for held in gone.values()]

    def waits(self, now: float) -> Iterator[Wait]:
        view = self._state.participants.view
        for held in self._held.values():
            if held.route is not None:
                chief = view.chief if self._state.synchronous else None
                name = view.primary_name(0) if chief is None else f"worker:{chief}"
                yield wait(now, held, "the parameters that it has added", (name,))

    def _values(self, shown: ModelDescription, tensors: Tensors) -> Values:
        state = self._state
        assert state.values is not None
        values = self._factory(shown.layout, state.number, shown.optimizer, shown.rule)
        means = [
            (msgspec.structs.replace(spec, key="average"), tensor)
            for spec, tensor in tensors
            if spec.key == "values" and shown.rule.average is not None
        ]
        values.load(state.step, [*state.values.live(state=True), *tensors, *means])
        return values


def _apart(one: str, name: str, other: str) -> str:
    return (
        f"{one} has added or unfrozen parameter {name!r}, and {other} makes an update without it: "
        "in synchronous training every worker does so before the same step, by loop_steps and not "
        "by the epoch, and one that comes back before its first"
    )
