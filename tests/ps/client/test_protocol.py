"""A worker's requests while the shards are divided anew, without a network."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.ps.bench import PARAMETER, SGD, SYNC
from trireme.errors import Rejected
from trireme.ps.client.lanes import Answer, Divided
from trireme.ps.client.operations import AWAIT, DIVIDE, PUBLISH, PUSH, Ask, Operation, Pause
from trireme.ps.client.protocol import ClientProtocol
from trireme.ps.extra import Extra, ExtraParts, ExtraRequest, Space, bytes_in
from trireme.ps.layout import Layout
from trireme.ps.messages import (
    Applied,
    Attach,
    Attached,
    GroupSpec,
    Lease,
    Leased,
    Pull,
    PullReply,
    PushReply,
    Refused,
    ServerStatus,
    Status,
)
from trireme.ps.snapshot import ModelState
from trireme.ps.snapshot_messages import Load, Loaded, Snapshot, TakeSnapshot
from trireme.wire.message import Message


def attached(servers: int, *found: tuple[bool, int]) -> ClientProtocol:
    """Returns the protocol of a worker that has found values or not, in a view, at each shard."""
    protocol = ClientProtocol(0, servers, patience_seconds=1.0, rng=random.Random(1))
    attach = protocol.attach(Layout.of([PARAMETER], servers=servers).spec, SGD, SYNC)
    next(attach)
    with pytest.raises(StopIteration):
        attach.send(answers(*[Attached(loaded, 0, view) for loaded, view in found]))
    return protocol


def pushed(servers: int) -> ClientProtocol:
    """Returns the protocol of a worker with a push under way."""
    protocol = attached(servers, *[(True, 1)] * servers)
    protocol.push(protocol.next_push(1.0))
    return protocol


def answers(*messages: Message) -> Mapping[int, Answer]:
    return {server: (message, ()) for server, message in enumerate(messages)}


def applied(*steps: int) -> Mapping[int, Answer]:
    """Returns the answers of shards to a push, at these steps."""
    return answers(*[PushReply(Applied(1), step, 0, False) for step in steps])


def asked(operation: Operation[Any], result: Any = None) -> dict[int, Message]:
    """Returns what an operation asks next, by shard."""
    wanted = operation.send(result)
    assert isinstance(wanted, Ask)
    return {shard: request.message for shard, request in wanted.requests.items()}


def divide(operation: Operation[Any], servers: int) -> None:
    """Has an operation find other shards, to which it shows the model."""
    assert operation.throw(Divided()) == DIVIDE
    shown = asked(operation, Layout.of([PARAMETER], servers=servers).spec)
    assert [*shown] == [*range(servers)] and isinstance(shown[0], Attach)


def test_values_are_brought_to_one_step_before_the_next_request_may_find_other_shards() -> None:
    protocol = pushed(3)
    lease = protocol.lease("examples", 50, 1, 1)
    assert next(lease) == AWAIT
    assert asked(lease, applied(2, 2, 1)) == {2: Pull(0, False, 2)}
    behind = {2: (PullReply(2, False), ())}
    assert asked(lease, behind) == {0: Lease(0, "examples", 50, 1, 1, 1)}
    divide(lease, 2)  # the lease has found two shards, which are at step 5 now
    again = lease.send(answers(Attached(True, 5, 2), Attached(True, 5, 2)))
    assert isinstance(again, Ask)
    with pytest.raises(StopIteration):
        lease.send(answers(Leased(())))
    wait = protocol.wait()
    assert next(wait) == PUBLISH
    with pytest.raises(StopIteration) as ended:
        next(wait)
    assert ended.value.value.step == protocol.step == 2


def test_a_chief_loads_in_the_view_in_which_it_has_attached_and_shard_0_last() -> None:
    protocol = attached(3, (False, 4), (True, 3), (False, 4))
    load = protocol.load(ModelState(0, {}), [((), ())] * 3)
    first = next(load)
    assert isinstance(first, Ask)
    assert list(first.requests) == [1, 2]
    assert all(request.pinned for request in first.requests.values())
    loads = [request.message for request in first.requests.values()]
    assert [load.view for load in loads if isinstance(load, Load)] == [3, 3]
    assert list(asked(load, {1: (Loaded(0), ()), 2: (Loaded(0), ())})) == [0]
    with pytest.raises(StopIteration):
        load.send(answers(Loaded(0)))


def test_a_worker_that_has_found_no_values_waits_for_those_of_shard_0_first() -> None:
    protocol = attached(3, (False, 1), (True, 1), (False, 1))
    pull = protocol.pull()
    assert list(asked(pull)) == [0]
    assert list(asked(pull, answers(PullReply(0, False)))) == [1, 2], "each shard is asked once"
    assert pull.send({shard: (PullReply(0, False), ()) for shard in (1, 2)}) == PUBLISH
    assert list(asked(protocol.pull())) == [0, 1, 2]


def test_a_worker_that_has_found_no_values_pulls_them_once_from_one_shard() -> None:
    pull = attached(1, (False, 1)).pull()
    assert list(asked(pull)) == [0]
    assert pull.send(answers(PullReply(0, False))) == PUBLISH


def test_a_worker_that_waits_for_first_values_pulls_from_the_shards_that_come_meanwhile() -> None:
    protocol = attached(2, (False, 1), (False, 1))
    pull = protocol.pull()
    assert list(asked(pull)) == [0]
    assert list(asked(pull, answers(PullReply(0, False)))) == [1]
    divide(pull, 3)
    again = pull.send(answers(*[Attached(True, 0, 2)] * 3))
    assert isinstance(again, Ask)
    assert list(again.requests) == [0, 1, 2]


@pytest.mark.parametrize("shards", [1, 3])
def test_a_request_is_made_for_the_shards_that_a_push_has_found_meanwhile(shards: int) -> None:
    protocol = pushed(2)
    status = protocol.status()
    assert next(status) == AWAIT
    divide(status, shards)
    assert status.send(answers(*[Attached(True, 1, 2)] * shards)) == PUSH
    assert next(status) == AWAIT
    assert asked(status, applied(*[1] * shards)) == dict.fromkeys(range(shards), Status())
    with pytest.raises(StopIteration) as ended:
        status.send(answers(*[ServerStatus(1, True, 1, (), {})] * shards))
    assert len(ended.value.value) == shards


def copied(step: int = 7) -> Snapshot:
    return Snapshot(step, (), (), ())


def test_a_copy_is_asked_for_at_all_servers_at_once() -> None:
    operation = attached(2, (True, 3), (True, 3)).snapshot(state=True)
    assert next(operation) == Pause(0.0)
    requests = operation.send(0.0)
    assert isinstance(requests, Ask)
    messages = [request.message for request in requests.requests.values()]
    assert isinstance(messages[0], TakeSnapshot) and messages == [messages[0]] * 2
    with pytest.raises(StopIteration) as ended:
        operation.send({0: (copied(), ()), 1: (copied(), ())})
    assert [message for message, _ in ended.value.value] == [copied()] * 2


def test_a_copy_is_asked_for_again_where_an_answer_was_lost() -> None:
    operation = attached(2, (True, 3), (True, 3)).snapshot(state=True)
    next(operation)
    first = operation.send(0.0)
    assert isinstance(first, Ask)
    lost = {0: (copied(), ()), 1: (Refused("busy", "", 3), ())}
    assert isinstance(operation.send(lost), Pause)
    second = operation.send(0.1)
    assert isinstance(second, Ask)
    before, after = first.requests[0].message, second.requests[0].message
    assert isinstance(before, TakeSnapshot) and isinstance(after, TakeSnapshot)
    assert before.token != after.token


def test_hyper_parameters_are_sent_with_the_next_update_that_has_examples() -> None:
    protocol, faster = attached(1, (True, 1)), (GroupSpec({"lr": 2.0}),)
    slower = (GroupSpec({"lr": 0.5}),)
    sent = []
    # In the step at the slower rate only others have examples: the servers have theirs after it.
    for weight, hyper in [(0.0, faster), *[(3.0, faster)] * 2, (0.0, slower), (3.0, faster)]:
        push = protocol.next_push(weight, hyper=hyper)
        sent.append(push.hyper)
        protocol.push(push)
        wait = protocol.wait()
        next(wait)
        with pytest.raises(StopIteration):
            wait.send(applied(1))
            wait.send(None)
    assert sent == [None, faster, None, None, faster]


class Parts(ExtraParts):
    """The bytes of a request, of which each shard gets its letter."""

    def __init__(self, data: bytes, shards: int) -> None:
        self.data, self.shards = data, shards

    def of_shard(self, shard: int, space: Space | None = None) -> Extra:
        assert space is not None
        memory = space(shard, 2)
        memory[:] = self.data[shard : shard + 1] + bytes([self.shards])
        return (memory,)  # type: ignore[return-value]

    def united(self, answers: Sequence[Extra]) -> Any:
        return b"".join(bytes(data) for answer in answers for data in bytes_in(answer))


class Letters(ExtraRequest):
    def __init__(self, data: bytes) -> None:
        self.data = data

    def divided(self, bounds: Sequence[int]) -> ExtraParts:
        return Parts(self.data, len(bounds) - 1)


def with_memory() -> tuple[ClientProtocol, list[bytearray]]:
    memory = [bytearray(2) for _ in range(3)]
    protocol = ClientProtocol(
        0,
        2,
        patience_seconds=1.0,
        rng=random.Random(0),
        space=lambda shard, nbytes: memoryview(memory[shard])[:nbytes],
    )
    protocol.divide(2, (0, 128, 256))
    return protocol, memory


def test_lent_memory_is_used_again_when_the_push_before_is_answered() -> None:
    """And what that has brought there is taken out before."""
    protocol, memory = with_memory()
    push = protocol.next_push(1.0, extra=Letters(b"ab"))
    protocol.push(push)
    assert [bytes_in(protocol.message(push, shard).extra) for shard in range(2)] == [
        [b"a\x02"],
        [b"b\x02"],
    ]
    pull = protocol.pull_extra(Letters(b"cd"))
    assert next(pull) == AWAIT
    assert memory[0] == b"a\x02", "it may have to be sent again"
    said = [PushReply(Applied(1), 1, 0, False, extra=(data,)) for data in (b"A", b"B")]
    assert isinstance(pull.send(answers(*said)), Ask)
    assert memory[0] == b"c\x02"
    assert protocol.brought == b"AB"


def test_a_push_is_divided_again_with_the_shards() -> None:
    protocol, _ = with_memory()
    push = protocol.next_push(1.0, extra=Letters(b"abc"))
    protocol.push(push)
    assert protocol.message(push, 1).extra == (b"b\x02",)
    protocol.divide(3, (0, 1, 2, 256))
    assert protocol.message(push, 2).extra == (b"c\x03",)


def test_a_worker_that_comes_back_sends_nothing_of_the_push_that_had_the_same_number() -> None:
    protocol, _ = with_memory()
    for data in (b"ab", b"cd"):
        push = protocol.next_push(1.0, extra=Letters(data))
        assert push.sequence == 1
        protocol.push(push)
        assert bytes_in(protocol.message(push, 0).extra)[0][:1] == data[:1]
        protocol.renew()


@pytest.mark.parametrize("other", [ClientProtocol.status, ClientProtocol.wait])
def test_after_a_push_that_was_rejected_there_is_no_other_and_the_error_is_said_again(
    other: Any,
) -> None:
    protocol = pushed(1)
    operation = other(protocol)
    assert next(operation) == AWAIT
    with pytest.raises(Rejected, match=r"^too far$"):
        operation.throw(Rejected("too far"))
    for again in (lambda: protocol.push(protocol.next_push(1.0)), lambda: next(protocol.wait())):
        with pytest.raises(Rejected, match=r"worker:0 makes no more steps, .*: too far\. Let"):
            again()
    assert asked(protocol.status()) == {0: Status()}  # other requests go on
    protocol.renew()
    protocol.push(protocol.next_push(1.0))
