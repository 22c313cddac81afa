"""Holds what is to be decided at one shard, and carries out the leader's decisions in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trireme.ps.leader.decisions import Apply, Cut, Decided, Decision, Divide, Held, PushId, Stop
from trireme.ps.leader.leader import needed_for
from trireme.ps.messages import FromServer
from trireme.ps.shard.answers import Answers, Wait, wait
from trireme.ps.shard.copies import Copies
from trireme.ps.shard.follower import Follower
from trireme.ps.shard.instructions import Instruction, Send
from trireme.ps.shard.participants import Participant
from trireme.ps.shard.push_table import Pending
from trireme.ps.shard.state import ShardState
from trireme.ps.shard.updates import Updates


class Execution:
    """One shard's part in the sequence of decisions."""

    def __init__(self, state: ShardState) -> None:
        self.answers = Answers(state)
        self.updates = Updates(state, self.answers)
        self.follower = Follower()
        self.copies = Copies(state)
        self.due = False  # whether `proceed` is to be called before the next event
        self._state = state
        self._stopped_in = 0  # the number of the view for which it has stopped last

    @property
    def stopped(self) -> bool:
        return 0 < self._stopped_in == self._state.participants.view.number

    # -- what is to be decided -------------------------------------------------------------------

    def take(self, pending: Pending) -> Sequence[Instruction]:
        """Takes a push: decides it at once where no other push or shard must be there for that."""
        state, push, leader = self._state, pending.push, self._state.leader
        if leader is not None and leader.alone and not state.synchronous and not self.stopped:
            if state.over:
                answer = self.updates.stale(pending)
            else:
                answer = self.updates.apply(pending, state.step + push.steps)
            return [*self.answers.give(answer), *self.proceed()]
        if state.over or (state.synchronous and push.pulled < state.step):
            self.answers.due.append(self.updates.stale(pending))
        else:
            self.follower.hold(pending)
            self.updates.note(pending)
            if leader is not None:
                leader.hold(pending.id, push.steps)
        return self.proceed()

    def drop(self, who: Participant) -> list[Pending]:
        """Drops what a worker that is out had begun, unless the leader may apply it.

        Returns:
            Its pushes that are not answered.
        """
        unanswered, leader = list[Pending](), self._state.leader
        if (answer := self.answers.withheld.pop(who.worker, None)) is not None:
            unanswered.append(answer.pending)
        pending = self.follower.held.get(who)
        if pending is not None and not pending.answered:
            unanswered.append(pending)
            view = self._state.participants.view.number
            self.follower.drop(pending, view, leads=leader is not None)
            self.updates.mean.forget()  # it may lie in the worker's memory
            if leader is not None:
                leader.drop(pending.id)
        return unanswered

    def unanswered(self) -> Iterator[Pending]:
        yield from (answer.pending for answer in self.answers.withheld.values())
        yield from (pending for pending in self.follower.held.values() if not pending.answered)

    def awaits(self, who: Participant) -> bool:
        """Returns whether a round has updates of others, and waits for one of a participant."""
        held = self.follower.held
        return self._state.synchronous and bool(held) and who not in held

    def hear(self, shard: int, message: FromServer) -> None:
        """Takes what another shard holds, or the leader's decisions; of others it takes nothing."""
        leader = self._state.leader
        if isinstance(message, Held) and leader is not None:
            leader.hear(shard, message)
        elif isinstance(message, Decided) and leader is None:
            self.follower.hear(message)

    # -- decisions -------------------------------------------------------------------------------

    def proceed(self) -> list[Instruction]:
        """Carries out all decisions that have come, then makes the answers that can go out.

        The answers come last: the values that they carry are of the step that they name.
        """
        self.due, state, leader = False, self._state, self._state.leader
        out = self._follow()
        if leader is None:
            if (held := self._report()) is not None:
                out.append(Send(0, held))
            return [*out, *self.answers.proceed()]
        while not self.follower.decided:
            live, copies = state.participants.live, self.copies.tokens
            decision = leader.decide(state.step, live, copies, self._square)
            if decision is None:
                break
            self.follower.decided.append(decision)
            if not leader.alone:  # the others are told first, and carry it out when this shard does
                self.due = True
                break
            out += self._follow()
        if not leader.alone:
            told = leader.tell(state.participants.view.number)
            out += [Send(shard, message) for shard, message in told]
        return [*out, *self.answers.proceed()]

    def _follow(self) -> list[Instruction]:
        out, follower, view = list[Instruction](), self.follower, self._state.participants.view
        while follower.decided:
            decision = follower.decided[0]
            if isinstance(decision, Divide) and decision.view >= view.number:
                # Another view lets the shard go on; one that is behind has to take this one first.
                if decision.view == view.number:
                    self._stopped_in = view.number
                break
            follower.decided.popleft()
            out += self._carry_out(decision)
        return out

    def _carry_out(self, decision: Decision) -> Sequence[Instruction]:
        follower = self.follower
        if isinstance(decision, Apply):
            self._apply(decision)
        elif isinstance(decision, Cut):
            return self.copies.make(decision.worker, decision.token)
        elif isinstance(decision, Stop):
            self._state.over = True
            self.updates.drop_stale(follower.take_all())
        elif not isinstance(decision, Divide):
            follower.propose(decision.pushes)
        return ()

    def _apply(self, decision: Apply) -> None:
        members = [self.follower.take(push) for push in decision.pushes]
        if self._state.synchronous:
            late = self.follower.take_all()
            self.updates.apply_round(members, decision.scale, decision.step, late)
            return
        for pending in members:
            answer = self.updates.apply(pending, decision.step)
            if not pending.answered:
                self.answers.withheld[pending.owner.worker] = answer

    def _report(self) -> Held | None:
        rule, live = self._state.rule, self._state.participants.live
        square = self._square if rule.clip_norm is not None else None
        copies = self.copies.tokens.items()
        return self.follower.report(needed_for(rule, live), live, copies, square)

    def _square(self, pushes: Sequence[PushId]) -> float:
        held = self.follower.held
        return self.updates.mean.square([held[Participant(*push[:2])] for push in pushes])

    # -- what is waited for ----------------------------------------------------------------------

    def waits(self, now: float) -> Iterator[Wait]:
        for pending in self.follower.held.values():
            if not pending.answered:
                yield wait(now, pending, *self._missing(pending))
        yield from self.copies.waits(now)
        yield from self.answers.waits(now)

    def _missing(self, pending: Pending) -> tuple[str, tuple[str, ...]]:
        state, held = self._state, self.follower.held
        participants = state.participants
        reason, pushes = "a push to reach every server", [pending.id]
        if state.synchronous:
            reason = f"round {state.step + 1}"
            absent = [w for w, i in sorted(participants.live.items()) if (w, i) not in held]
            if absent:
                return reason, tuple(f"worker:{worker}" for worker in absent)
            pushes = [each.id for each in held.values()]
        if state.leader is None:
            return reason, (participants.view.primary_name(0),)
        return reason, state.leader.missing(pushes, participants.view)
