"""The shard: one server's whole behaviour, without sockets, threads, or a clock of its own.

Events come in as method calls, each with the time it happens at; instructions go out as a list.
The server, the simulator, the tests and a lone process all drive this same object.

    event                      what it is
    view                       the coordinator's newest view
    attach, load, pull, push   what workers ask
    lease, stop, set_end       what workers ask of server 0: examples, and when to end
    freeze, cut, thaw          a consistent cut over all servers, for checkpoints and evaluation
    round_ready, round_close   what servers tell each other when server 0 decides the rounds
    tick                       time passes

A request is answered once, by one `Reply` to the route it came with. A push is decided once, by
(worker, incarnation, sequence); its verdict is written down together with the change of the
values, and a repeat gets the same verdict.
"""

from __future__ import annotations

from collections import Counter

import torch

from trireme.cluster.view import View
from trireme.errors import (
    ConfigurationError,
    ModelMismatchError,
    TriremeError,
    UnsupportedOptimizerError,
)
from trireme.ps.dense import PartBuffer
from trireme.ps.examples import ExampleBook
from trireme.ps.hold import Hold
from trireme.ps.instructions import Instruction, Reply
from trireme.ps.layout import Layout
from trireme.ps.messages import (
    Applied,
    Attach,
    Attached,
    Collect,
    Collected,
    Cut,
    Drain,
    Duplicate,
    FencedVerdict,
    Freeze,
    Frozen,
    Lease,
    Leased,
    Load,
    Loaded,
    Pull,
    PullReply,
    Push,
    PushReply,
    Refused,
    RejectedVerdict,
    Retire,
    Retired,
    RoundClose,
    RoundReady,
    ServerStatus,
    SetEnd,
    Share,
    Shared,
    Snapshot,
    Stale,
    Status,
    StopJob,
    Stopping,
    Thaw,
    Thawed,
    Verdict,
    Waiting,
)
from trireme.ps.push_table import Pending, PushTable, WorkerRecord
from trireme.ps.round import Decision, Follower, Judge, Leader, Round
from trireme.ps.rule import Rule
from trireme.ps.values import Tensors, Values, ValuesFactory, make_values

__all__ = ["FREEZE_SECONDS", "NOTICE_SECONDS", "Shard"]

NOTICE_SECONDS = 5.0
"""How often a worker whose answer is withheld is told for whom it waits."""

FREEZE_SECONDS = 60.0
"""After this long a cut that was not completed is given up, and training goes on."""


class Shard:
    """One server's part of the parameters and all that is decided about it.

    Args:
        server: this server's index; server 0 also deals examples and decides when the job ends.
        factory: how to make the values once the first worker has shown its model.
    """

    def __init__(self, server: int, factory: ValuesFactory = make_values) -> None:
        self.server = server
        self.step = 0
        self.loaded = False
        self.layout: Layout | None = None
        self.rule = Rule()
        self.counters: Counter[str] = Counter()
        self._factory = factory
        self._values: Values | None = None
        self._scratch: PartBuffer | None = None
        self._view = View(0, (), ())
        self._incarnations: dict[int, int] = {}
        self._table = PushTable()
        self._round = Round(0, lambda: self._spare)
        self._judge: Judge = Leader(self.rule, 1)
        self._withheld: dict[int, tuple[Pending, Verdict, int]] = {}
        self._unloaded: list[tuple[object, Pull, float]] = []
        self._lagging: list[tuple[object, Pull]] = []
        self._training: set[int] = set()  # workers with an update under way
        self._retired: set[int] = set()
        self._draining: list[tuple[object, float]] = []
        self._end: int | None = None
        self._examples = ExampleBook()
        self._hold = Hold()
        self._noticed = 0.0
        self._shared: dict[str, dict[int, torch.Tensor]] = {}

    # -- membership -----------------------------------------------------------------------------

    def view(self, now: float, view: View) -> list[Instruction]:
        """Takes the coordinator's newest view: who lives, and who must be waited for no longer."""
        if view.number <= self._view.number:
            return []
        staying = [
            entry.index
            for entry in view.workers
            if self._incarnations.get(entry.index) == entry.incarnation
        ]
        clock = self._table.slowest(w for w in staying if w not in self._retired)
        self._view = view
        self._incarnations = {entry.index: entry.incarnation for entry in view.workers}
        out: list[Instruction] = []
        for worker in sorted(self._table.records.keys() - set(staying)):
            out += self._drop(worker)
        for worker, incarnation in self._incarnations.items():
            self._table.admit(worker, incarnation, clock)
        self._examples.members(tuple(self._incarnations))
        out += self._fence_pulls()
        return [*out, *self._abandon_cut("the view has changed"), *self._proceed(now)]

    def _drop(self, worker: int) -> list[Reply]:
        """A worker left or was started anew: nothing it had begun counts any longer.

        An update that is in an open round stays there, and is answered when the round closes:
        server 0 may have counted on it.
        """
        record = self._table.records[worker]
        begun = [record.pending] if record.pending is not None else []
        begun += (
            [pending for pending, _, _ in [self._withheld.pop(worker)]]
            if (worker in self._withheld)
            else []
        )
        record.pending = None
        self._training.discard(worker)
        self._retired.discard(worker)
        self._examples.release(worker)
        in_round = self._round.pending
        return [self._fenced(p) for p in begun if in_round.get(p.member) is not p]

    def _fenced(self, pending: Pending) -> Reply:
        """Answers a push of a worker that is out of the job."""
        self.counters["fenced"] += 1
        push = pending.push
        reason = self._fence(push.worker, push.incarnation, push.view) or "it was taken for lost"
        verdict = FencedVerdict(self._view.number, reason)
        return Reply(pending.route, PushReply(verdict, self.step, 0, False))

    def _fence_pulls(self) -> list[Reply]:
        """Sends back those who wait for values: the chief may be another, or they may be out."""
        reason = "the view has changed"
        routes = [route for route, _, _ in self._unloaded]
        gone = [
            (route, pull)
            for route, pull in self._lagging
            if self._incarnations.get(pull.worker) != pull.incarnation
        ]
        self._unloaded = []
        self._lagging = [entry for entry in self._lagging if entry not in gone]
        routes += [route for route, _ in gone]
        return [Reply(route, Refused("fenced", reason, self._view.number)) for route in routes]

    @property
    def _live(self) -> dict[int, int]:
        """The workers that still train, with their incarnations."""
        return {w: i for w, i in self._incarnations.items() if w not in self._retired}

    def _fence(self, worker: int, incarnation: int, view: int) -> str | None:
        """Returns why a request is fenced off; None when it is not."""
        current = self._incarnations.get(worker)
        if current is None:
            return f"worker:{worker} is not in view {self._view.number}"
        if incarnation != current:
            return f"worker:{worker} was started anew: {current} has replaced {incarnation}"
        if view != self._view.number:
            return f"view {view} is not the present one, {self._view.number}"
        return None

    # -- what workers ask -----------------------------------------------------------------------

    def attach(self, now: float, route: object, request: Attach) -> list[Instruction]:
        """A worker shows its model. The first creates the shard, the others must agree."""
        reason = self._fence(request.worker, request.incarnation, request.view)
        if reason is not None:
            return [Reply(route, Refused("fenced", reason, self._view.number))]
        try:
            self._agree(request)
        except ModelMismatchError as error:
            return [Reply(route, Refused("mismatch", str(error), self._view.number))]
        except UnsupportedOptimizerError as error:
            return [Reply(route, Refused("optimizer", str(error), self._view.number))]
        except ConfigurationError as error:
            return [Reply(route, Refused("rejected", str(error), self._view.number))]
        return [Reply(route, Attached(self.loaded, self.step))]

    def _agree(self, request: Attach) -> None:
        task = f"worker:{request.worker}"
        layout = Layout(request.layout)
        if self.layout is None:
            request.rule.check()
            rule = request.rule
            self._values = self._factory(layout, self.server, request.optimizer, rule.average)
            self.layout, self.rule = layout, rule
            self._optimizer_name, self._shown_by = request.optimizer.name, task
            if self._end is None:  # it may have been asked to stop already
                self._end = rule.max_steps
            servers = layout.spec.servers
            first = self.server == 0
            self._judge = Leader(rule, servers) if first else Follower(rule, self.server)
            self._examples.interleave = self.rule.synchronous and self.rule.aggregate == 0
            return
        self.layout.check_same(layout, whose=self._shown_by, others=task)
        if request.rule != self.rule:
            raise ModelMismatchError(
                f"the strategies differ: {self._shown_by} trains by {_shown(self.rule)}, {task} by "
                f"{_shown(request.rule)}; start every task with the same options"
            )
        if request.optimizer.name != self._optimizer_name:
            raise ModelMismatchError(
                f"the optimizers differ: {self._optimizer_name} at {self._shown_by}, "
                f"{request.optimizer.name} at {task}"
            )

    def load(self, now: float, route: object, request: Load, tensors: Tensors) -> list[Instruction]:
        """The chief's first values, or a checkpoint's."""
        reason = self._fence(request.worker, request.incarnation, request.view)
        if reason is not None:
            return [Reply(route, Refused("fenced", reason, self._view.number))]
        if self._values is None:
            reason = "nothing was attached yet, so there is nothing to load values into"
            return [Reply(route, Refused("rejected", reason, self._view.number))]
        if self.loaded:  # a repeat, or a chief that took over too late
            return [Reply(route, Loaded(self.step))]
        try:
            self._values.load(tensors)
        except (TriremeError, RuntimeError) as error:
            return [Reply(route, Refused("rejected", str(error), self._view.number))]
        self.step, self.loaded = request.step, True
        self._round = Round(self.step, lambda: self._spare)
        self._table.restore(request.workers)
        for worker, incarnation in self._incarnations.items():
            self._table.admit(worker, incarnation, 0)
        self._examples.restore(request.consumed)
        waiting, self._unloaded = self._unloaded, []
        answers = [self._pulled(waiter, pull) for waiter, pull, _ in waiting]
        return [Reply(route, Loaded(self.step)), *answers]

    def pull(self, now: float, route: object, request: Pull) -> list[Instruction]:
        """Asks for the values; withheld until they are loaded."""
        reason = self._fence(request.worker, request.incarnation, request.view)
        if reason is not None:
            return [Reply(route, Refused("fenced", reason, self._view.number))]
        if not self.loaded:
            self._unloaded.append((route, request, now))
            return []
        if self.step < request.at_least:
            self._lagging.append((route, request))
            return []
        return [self._pulled(route, request)]

    def _pulled(self, route: object, request: Pull) -> Reply:
        assert self._values is not None
        me = request.worker, request.incarnation
        stop = not self._grant(*me) if request.train else self._ended()
        return Reply(route, PullReply(self.step, stop), self._values.buffer.vectors)

    def push(
        self, now: float, route: object, push: Push, gradients: PartBuffer
    ) -> list[Instruction]:
        """A worker's update. `gradients` must stay as they are until the answer is out."""
        refusal = self._refuse(push)
        if refusal is not None:
            self.counters[_counter(refusal)] += 1
            return [Reply(route, PushReply(refusal, self.step, 0, False))]
        record = self._table.records[push.worker]
        self._table.forget_acknowledged(push)
        if push.sequence <= record.sequence:
            return self._repeat(route, push, record)
        if record.pending is not None:  # the worker came back while its answer is withheld
            record.pending.route = route
            return []
        record.pending = Pending(push, route, gradients, now)
        if self._hold.holds(push):
            pending = record.pending
            self._hold.later.append((pending, lambda: self._consider(now, pending)))
            return []
        return self._consider(now, record.pending)

    def _refuse(self, push: Push) -> Verdict | None:
        reason = self._fence(push.worker, push.incarnation, push.view)
        if reason is not None:
            return FencedVerdict(self._view.number, reason)
        record = self._table.records[push.worker]
        if not self.loaded:
            return RejectedVerdict("a push came before the values were loaded")
        if push.sequence > record.sequence + 1:
            return RejectedVerdict(
                f"push {push.sequence} of worker:{push.worker} came after push {record.sequence}: "
                "the ones between are missing"
            )
        if not 0 <= push.weight < float("inf"):
            return RejectedVerdict(f"a push weighs {push.weight}: it must be finite and 0 or more")
        if self.rule.synchronous and push.pulled > self.step:
            return RejectedVerdict(
                f"a push for step {push.pulled}, and ps:{self.server} is at {self.step}: pull the "
                "values of one step from all servers"
            )
        return None

    def _repeat(self, route: object, push: Push, record: WorkerRecord) -> list[Instruction]:
        self.counters["duplicate"] += 1
        withheld = self._withheld.get(push.worker)
        if withheld is not None and withheld[0].push.sequence == push.sequence:
            withheld[0].route = route
            return []
        original = record.verdicts.get(push.sequence)
        if original is None:
            reason = f"push {push.sequence} was decided, and the worker said it knew how"
            return [Reply(route, PushReply(RejectedVerdict(reason), self.step, 0, False))]
        pending = Pending(push, route, self._buffer, 0.0)
        return [self._answer(pending, Duplicate(original), 0)]

    # -- deciding -------------------------------------------------------------------------------

    def _consider(self, now: float, pending: Pending) -> list[Instruction]:
        """Decides a push at once, or puts it into its round."""
        push = pending.push
        if self._table.records[push.worker].pending is not pending:  # dropped while it was held
            return []
        if self.server == 0 and self._ended():
            return [self._decide_stale(pending), *self._proceed(now)]
        if not self.rule.synchronous:
            return self._apply_one(now, pending)
        if push.pulled < self.step:
            return [self._decide_stale(pending), *self._proceed(now)]
        self._round.add(pending)
        return self._proceed(now)

    def _apply_one(self, now: float, pending: Pending) -> list[Instruction]:
        assert self._values is not None
        push = pending.push
        staleness = self.step - push.pulled
        if push.weight > 0:
            self._values.apply(pending.gradients, push.hyper, self.step + 1)
        self.step += 1
        verdict = Applied(self.step)
        self._decide(pending, verdict)
        self.counters["staleness"] += staleness
        self._withheld[push.worker] = (pending, verdict, staleness)
        return self._proceed(now)

    def _decide(self, pending: Pending, verdict: Applied | Stale) -> None:
        push = pending.push
        if self._table.records[push.worker].incarnation == push.incarnation:
            self._table.decide(push, verdict)
            self._training.discard(push.worker)
        self.counters[_counter(verdict)] += 1
        if isinstance(verdict, Applied):
            self._examples.finish(push.worker, push.examples)
        else:
            self._examples.give_back(push.worker, push.examples)

    def _decide_stale(self, pending: Pending) -> Reply:
        verdict = Stale(self.step)
        self._decide(pending, verdict)
        return self._answer(pending, verdict, self.step - pending.push.pulled)

    def _answer(self, pending: Pending, verdict: Verdict, staleness: int) -> Reply:
        stop = not self._grant(*pending.member)
        payload = self._buffer.vectors if pending.push.pull else ()
        return Reply(pending.route, PushReply(verdict, self.step, staleness, stop), payload)

    def _proceed(self, now: float) -> list[Instruction]:
        """Does all that has become possible: closes rounds, releases answers, completes a cut."""
        out: list[Instruction] = []
        while True:
            more = self._close_round(now) if self.rule.synchronous else []
            if not more:
                break
            out += more
        out += self._release()
        out += self._catch_up()
        out += self._drained()
        out += self._complete_cut(now)
        return out

    def _release(self) -> list[Instruction]:
        """Answers those that are no longer too far ahead of the slowest live worker."""
        bound = self.rule.staleness
        slowest = self._table.slowest(self._live)
        ready = [
            worker
            for worker in self._withheld
            if bound is None
            or self._ended()
            or self._table.records[worker].clock - slowest <= bound
        ]
        return [self._answer(*self._withheld.pop(worker)) for worker in ready]

    def _catch_up(self) -> list[Instruction]:
        """Answers pulls for a step that this server has now reached."""
        ready = [(route, pull) for route, pull in self._lagging if self.step >= pull.at_least]
        self._lagging = [entry for entry in self._lagging if entry not in ready]
        return [self._pulled(route, pull) for route, pull in ready]

    # -- synchronous rounds ---------------------------------------------------------------------

    def _close_round(self, now: float) -> list[Instruction]:
        """Takes the open round as far as it goes; an empty list when it must wait."""
        if self._hold.stops_round(self.step):
            return []
        told, decision = self._judge.judge(self._round, self._live)
        if decision is None:
            return list(told)
        return [*told, *self._apply_round(decision)]

    def _apply_round(self, decision: Decision) -> list[Instruction]:
        """Applies the round and answers all who are in it, and all who came too late for it."""
        assert self._values is not None
        current = self._round
        mean = current.scaled_mean(decision)
        members = [current.pending.pop(member) for member in decision.members]
        if mean is not None:
            hyper = next((p.push.hyper for p in members if p.push.hyper is not None), None)
            self._values.apply(mean, hyper, self.step + 1)
        self.step += 1
        self.counters["rounds"] += 1
        self._round = Round(self.step, lambda: self._spare)
        self._judge.begin()
        for pending in members:
            self._decide(pending, Applied(self.step))
        out: list[Instruction] = [self._answer(p, Applied(self.step), 0) for p in members]
        for _, pending in sorted(current.pending.items()):
            late = self._table.records[pending.push.worker].pending is pending
            out.append(self._decide_stale(pending) if late else self._fenced(pending))
        return out

    def round_ready(self, now: float, message: RoundReady) -> list[Instruction]:
        """At server 0: what another server holds."""
        assert isinstance(self._judge, Leader)
        return [*self._judge.hear(self.step, message), *self._proceed(now)]

    def round_close(self, now: float, message: RoundClose) -> list[Instruction]:
        """At the others: what server 0 has proposed or decided."""
        assert isinstance(self._judge, Follower)
        self._judge.hear(self.step, message)
        return self._proceed(now)

    # -- the end --------------------------------------------------------------------------------

    def _ended(self) -> bool:
        return self.server == 0 and self._end is not None and self.step >= self._end

    def _grant(self, worker: int, incarnation: int) -> bool:
        """Returns whether the worker may compute one more update, and notes that it does.

        In asynchronous modes the updates under way are counted, so that the job ends at exactly
        its last step.
        """
        if self._incarnations.get(worker) != incarnation:
            return False  # it left when its update had been decided, and hears of it too late
        if self.server != 0 or self._end is None:
            self._training.add(worker)
            return True
        under_way = 0 if self.rule.synchronous else len(self._training - {worker})
        if self.step + under_way >= self._end:
            self._training.discard(worker)
            return False
        self._training.add(worker)
        return True

    def stop(self, now: float, route: object, request: StopJob) -> list[Instruction]:
        """Ends the job at the next step at which every worker can."""
        if self._end is None or self._end > self.step:
            self._end = self._soonest if self._end is None else min(self._end, self._soonest)
        return [Reply(route, Stopping(self._end)), *self._proceed(now)]

    @property
    def _soonest(self) -> int:
        """The first step at which no worker has an update under way that would be lost."""
        under_way = min(1, len(self._training)) if self.rule.synchronous else len(self._training)
        return self.step + under_way

    def drain(self, now: float, route: object, request: Drain) -> list[Instruction]:
        """Waits until no worker has an update under way, so that the last step is in."""
        self._draining.append((route, now))
        return self._drained()

    def _drained(self) -> list[Instruction]:
        if self._training or not self._draining:
            return []
        routes, self._draining = [route for route, _ in self._draining], []
        return [Reply(route, Stopping(self.step)) for route in routes]

    def retire(self, now: float, route: object, request: Retire) -> list[Instruction]:
        """A worker trains no more, though it stays: nobody shall wait for its updates."""
        if self._incarnations.get(request.worker) == request.incarnation:
            self._retired.add(request.worker)
            self._training.discard(request.worker)
        return [Reply(route, Retired()), *self._proceed(now)]

    def set_end(self, now: float, route: object, request: SetEnd) -> list[Instruction]:
        """Sets the job's last step where none was known; a later call changes nothing."""
        if self._end is None:
            self._end = max(request.max_steps, self._soonest)
        return [Reply(route, Stopping(self._end)), *self._proceed(now)]

    def lease(self, now: float, route: object, request: Lease) -> list[Instruction]:
        """Deals examples."""
        reason = self._fence(request.worker, request.incarnation, request.view)
        if reason is not None:
            return [Reply(route, Refused("fenced", reason, self._view.number))]
        try:
            spans = self._examples.lease(request)
        except ValueError as error:
            return [Reply(route, Refused("rejected", str(error), self._view.number))]
        return [Reply(route, Leased(spans))]

    # -- what workers tell each other -----------------------------------------------------------

    def share(
        self, now: float, route: object, request: Share, payload: torch.Tensor
    ) -> list[Instruction]:
        """Keeps what a worker leaves for the others."""
        if self._incarnations.get(request.worker) == request.incarnation:
            self._shared.setdefault(request.topic, {})[request.worker] = payload
        return [Reply(route, Shared())]

    def collect(self, now: float, route: object, request: Collect) -> list[Instruction]:
        """Answers what workers have left under a topic, by worker."""
        left = sorted(self._shared.get(request.topic, {}).items())
        sizes = tuple(tensor.numel() for _, tensor in left)
        message = Collected(tuple(worker for worker, _ in left), sizes)
        return [Reply(route, message, [tensor for _, tensor in left])]

    # -- a consistent cut -----------------------------------------------------------------------

    def freeze(self, now: float, route: object, request: Freeze) -> list[Instruction]:
        """Decides nothing more until `cut` is complete, or `thaw`."""
        if not self.loaded:
            return [Reply(route, Refused("rejected", "no values are loaded", self._view.number))]
        if self._hold.token is not None and self._hold.token != request.token:
            reason = "another cut is under way"
            return [Reply(route, Refused("busy", reason, self._view.number))]
        self._hold.begin(request.token, now)
        return [Reply(route, Frozen(self.step, self._table.decided(self._incarnations)))]

    def cut(self, now: float, route: object, request: Cut) -> list[Instruction]:
        """Decides what other servers have already decided, answers a copy, and goes on."""
        if self._hold.token != request.token:
            reason = "the cut was given up: it took too long, or its view has changed"
            return [Reply(route, Refused("busy", reason, self._view.number))]
        self._hold.cut, self._hold.route = request, route
        return [*self._replay(), *self._proceed(now)]

    def thaw(self, now: float, route: object, request: Thaw) -> list[Instruction]:
        """Gives up a cut."""
        out: list[Instruction] = [Reply(route, Thawed())]
        if self._hold.token == request.token:
            out += [*self._abandon_cut("it was taken back"), *self._proceed(now)]
        return out

    def _replay(self) -> list[Instruction]:
        """Lets those events happen that were held back and no longer are."""
        out: list[Instruction] = []
        events, self._hold.later = self._hold.later, []
        for pending, event in events:
            if self._hold.holds(pending.push):
                self._hold.later.append((pending, event))
            else:
                out += event()
        return out

    def _abandon_cut(self, reason: str) -> list[Instruction]:
        """Gives up a cut under way; who asked for it may ask again."""
        if self._hold.token is None:
            return []
        out: list[Instruction] = []
        if self._hold.cut is not None:
            reason = f"the cut was given up: {reason}"
            out.append(Reply(self._hold.route, Refused("busy", reason, self._view.number)))
        self._hold.end()
        return [*out, *self._replay()]

    def _complete_cut(self, now: float) -> list[Instruction]:
        cut, route = self._hold.cut, self._hold.route
        if cut is None or (self.rule.synchronous and self.step < cut.step):
            return []  # asynchronous, a worker that died between two pushes leaves steps unequal
        decided = dict(self._table.decided(self._incarnations))
        if any(decided[w] < sequence for w, sequence in cut.decided if w in decided):
            return []
        assert self._values is not None
        tensors = self._values.copy(state=cut.state)
        snapshot = Snapshot(
            self.step,
            tuple(spec for spec, _ in tensors),
            self._table.export(),
            self._examples.consumed(),
        )
        self._hold.end()
        reply = Reply(route, snapshot, [tensor for _, tensor in tensors])
        return [reply, *self._replay(), *self._proceed(now)]

    # -- time, and how things are ---------------------------------------------------------------

    def tick(self, now: float) -> list[Instruction]:
        """Tells those who wait for whom; gives up a cut that takes too long."""
        out: list[Instruction] = []
        if self._hold.token is not None and now - self._hold.since > FREEZE_SECONDS:
            out += self._abandon_cut(f"it took more than {FREEZE_SECONDS:.0f} s")
            out += self._proceed(now)
        if now - self._noticed >= NOTICE_SECONDS:
            self._noticed = now
            out += self._notices(now)
        return out

    def _notices(self, now: float) -> list[Instruction]:
        chief = self._view.chief
        initialiser = () if chief is None else (f"worker:{chief}",)
        out: list[Instruction] = [
            Reply(route, Waiting("its first values", initialiser, now - since))
            for route, _, since in self._unloaded
        ]
        missing = self._judge.missing(self._round, self._live)
        for pending in self._round.pending.values():
            reason = f"round {self._round.step + 1}"
            out.append(Reply(pending.route, Waiting(reason, missing, now - pending.since)))
        training = tuple(f"worker:{worker}" for worker in sorted(self._training))
        out += [
            Reply(route, Waiting("the last updates", training, now - since))
            for route, since in self._draining
        ]
        slowest = self._table.slowest(self._live)
        behind = tuple(f"worker:{w}" for w in self._live if self._table.records[w].clock == slowest)
        for pending, _, _ in self._withheld.values():
            reason = f"staleness bound {self.rule.staleness}"
            out.append(Reply(pending.route, Waiting(reason, behind, now - pending.since)))
        return out

    def status(self, now: float, route: object, request: Status) -> list[Instruction]:
        """Tells how things are."""
        counters = {name: float(value) for name, value in sorted(self.counters.items())}
        return [
            Reply(
                route,
                ServerStatus(
                    self.step, self.loaded, self._view.number, self._table.export(), counters
                ),
            )
        ]

    @property
    def _buffer(self) -> PartBuffer:
        assert self._values is not None
        return self._values.buffer

    @property
    def _spare(self) -> PartBuffer:
        """Memory for the mean of a round: made when the first round needs it."""
        if self._scratch is None:
            assert self.layout is not None
            self._scratch = PartBuffer(self.layout, self.server)
        return self._scratch


def _counter(verdict: Verdict) -> str:
    return type(verdict).__name__.removesuffix("Verdict").lower()


def _shown(rule: Rule) -> str:
    return ", ".join(
        f"{name} {value}"
        for name in ("aggregate", "staleness", "clip_norm", "max_steps", "average", "deterministic")
        if (value := getattr(rule, name)) is not None
    )
