"""The placement while servers come, go, die and catch up in any order: what must always hold."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from trireme.cluster.placement import (
    Shards,
    balanced,
    caught_up,
    first_division,
    is_whole,
    step_towards,
    surviving,
)

SLOTS = 64
CHOICE = st.integers(0, 1_000)


class Placement(RuleBasedStateMachine):
    """Servers with the slots that each of them really holds, and the shards that are planned."""

    def __init__(self) -> None:
        super().__init__()
        self.hosts: dict[int, str] = {0: "a"}
        self.leaving: set[int] = set()
        self.replicas = 1
        self.shards: Shards = first_division(self.hosts, SLOTS, 1)
        self.data: dict[int, set[int]] = {0: set(range(SLOTS))}
        self.next_index = 1
        self.quiet_generations = 0  # since the servers have changed in number
        self.copied = 0

    @initialize(
        hosts=st.lists(st.sampled_from("aab"), min_size=1, max_size=6), replicas=st.integers(1, 3)
    )
    def begin(self, hosts: list[str], replicas: int) -> None:
        self.hosts = dict(enumerate(hosts))
        self.next_index = len(hosts)
        self.replicas = replicas
        self.shards = first_division(self.hosts, SLOTS, replicas)
        self.data = {server: set() for server in self.hosts}
        for shard in self.shards:
            for server in shard.copies:
                self.data[server] |= set(range(shard.start, shard.stop))
        assert self.plan() == (), "the first division is the wanted one"

    @rule(host=st.sampled_from("aab"))
    def come(self, host: str) -> None:
        if len(self.hosts) < 10:
            self.hosts[self.next_index] = host
            self.data[self.next_index] = set()
            self.next_index += 1
            self.quiet_generations = 0

    @precondition(lambda self: len(self.staying) > 1)
    @rule(which=CHOICE)
    def ask_to_leave(self, which: int) -> None:
        staying = sorted(self.staying)
        self.leaving.add(staying[which % len(staying)])
        self.quiet_generations = 0

    @precondition(lambda self: len(self.staying) > 1)
    @rule(which=CHOICE)
    def die(self, which: int) -> None:
        victim = sorted(self.hosts)[which % len(self.hosts)]
        if victim in self.hosts and len(self.staying - {victim}) > 0:
            del self.hosts[victim], self.data[victim]
            self.leaving.discard(victim)
            rest = surviving(self.shards, self.hosts)
            if rest is None:
                assert any(not set(shard.copies) & set(self.hosts) for shard in self.shards)
                self.roll_back()
            else:
                self.shards = rest
            self.quiet_generations = 0

    def roll_back(self) -> None:
        self.shards = first_division(self.staying_hosts, SLOTS, self.replicas)
        for server in self.data:
            self.data[server] = set()
        for shard in self.shards:
            for server in shard.copies:
                self.data[server] |= set(range(shard.start, shard.stop))

    @precondition(lambda self: any(shard.joining for shard in self.shards))
    @rule(which=CHOICE)
    def catch_up(self, which: int) -> None:
        filling = [
            (number, server) for number, shard in enumerate(self.shards) for server in shard.joining
        ]
        number, server = filling[which % len(filling)]
        shard = self.shards[number]
        self.data[server] |= set(range(shard.start, shard.stop))
        self.copied += shard.stop - shard.start
        self.shards = caught_up(self.shards, number, server)

    @precondition(lambda self: not any(shard.joining for shard in self.shards))
    @rule()
    def reconfigure(self) -> None:
        planned = self.plan()
        if planned:
            self.switch(planned)

    @property
    def staying(self) -> set[int]:
        return set(self.hosts) - self.leaving

    @property
    def staying_hosts(self) -> dict[int, str]:
        return {server: self.hosts[server] for server in self.staying}

    def plan(self) -> Shards:
        wanted = balanced(self.shards, self.staying_hosts, self.replicas)
        return step_towards(self.shards, wanted)

    def switch(self, planned: Shards) -> None:
        before = copies_of(self.shards)
        after = copies_of(planned)
        floor = min(self.replicas, len(self.staying))
        assert all(new >= min(old, floor) for old, new in zip(before, after, strict=True)), (
            "a switch lowers the number of copies"
        )
        self.shards = planned
        self.quiet_generations += 1
        held: dict[int, set[int]] = {server: set() for server in self.hosts}
        for shard in planned:
            for server in shard.copies:
                held[server] |= set(range(shard.start, shard.stop))
        for server, slots in held.items():
            assert slots <= self.data[server], f"ps:{server} serves what it does not hold"
            self.data[server] = slots

    # What must hold after each -------------------------------------------------------------------

    @invariant()
    def every_slot_has_one_primary_that_lives_and_holds_it(self) -> None:
        at = 0
        for shard in self.shards:
            assert shard.start == at < shard.stop
            at = shard.stop
            everyone = (*shard.copies, *shard.joining)
            assert len(set(everyone)) == len(everyone)
            assert set(everyone) <= set(self.hosts)
            for server in shard.copies:
                assert set(range(shard.start, shard.stop)) <= self.data[server]
        assert at == SLOTS

    def teardown(self) -> None:
        """Without further changes it comes to the wanted placement within a few generations."""
        self.quiet_generations = 0
        for _ in range(200):
            if any(shard.joining for shard in self.shards):
                self.catch_up(0)
            elif planned := self.plan():
                self.switch(planned)
            else:
                break
        assert self.quiet_generations <= 2
        self.check_placement()

    def check_placement(self) -> None:
        hosts = self.staying_hosts
        assert is_whole(self.shards, len(hosts), self.replicas)
        load, runs = Counter[int](), Counter[int]()
        for shard in self.shards:
            load[shard.primary] += shard.stop - shard.start
            runs[shard.primary] += 1
            assert len(shard.copies) == min(self.replicas, len(hosts))
            apart = {hosts[server] for server in shard.copies}
            assert len(apart) == min(len(shard.copies), len(set(hosts.values())))
        assert set(load) == set(hosts)
        assert max(load.values()) - min(load.values()) <= 1
        assert max(runs.values()) == 1


def copies_of(shards: Shards) -> list[int]:
    return [len(shard.copies) for shard in shards for _ in range(shard.start, shard.stop)]


TestPlacement = Placement.TestCase
TestPlacement.settings = settings(stateful_step_count=40, deadline=None)
