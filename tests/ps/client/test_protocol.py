"""A worker's requests while the shards are divided anew, without a network."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from tests.ps.bench import PARAMETER, SGD, SYNC
from trireme.errors import ConfigurationError
from trireme.ps.client.lanes import Answer, Divided
from trireme.ps.client.operations import AWAIT, PUBLISH, Ask, Operation, Pause
from trireme.ps.client.protocol import ClientProtocol
from trireme.ps.layout import Layout
from trireme.ps.messages import (
    Applied,
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
from trireme.ps.row_messages import RowKeys, RowUpdates, data_of, raw
from trireme.ps.snapshot import ModelState, TableMark
from trireme.ps.snapshot_messages import Load, Loaded, Snapshot, TakeSnapshot
from trireme.ps.table_spec import Add, TableSpec
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


def test_values_are_brought_to_one_step_before_the_next_request_may_find_other_shards() -> None:
    protocol = pushed(3)
    lease = protocol.lease("examples", 50, 1, 1)
    assert next(lease) == AWAIT
    assert asked(lease, applied(2, 2, 1)) == {2: Pull(0, False, 2)}
    behind = {2: (PullReply(2, False), ())}
    assert asked(lease, behind) == {0: Lease(0, "examples", 50, 1, 1, 1)}
    protocol.divide(2)  # the lease has found two shards, which are at step 5 now
    again = lease.throw(Divided())
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
    protocol.divide(3)
    again = pull.throw(Divided())
    assert isinstance(again, Ask)
    assert list(again.requests) == [0, 1, 2]


@pytest.mark.parametrize("shards", [1, 3])
def test_a_request_is_made_for_the_shards_that_a_push_has_found_meanwhile(shards: int) -> None:
    protocol = pushed(2)
    status = protocol.status()
    assert next(status) == AWAIT
    protocol.divide(shards)  # the push has gone to them by itself
    assert asked(status, applied(*[1] * shards)) == dict.fromkeys(range(shards), Status())
    with pytest.raises(StopIteration) as ended:
        status.send(answers(*[ServerStatus(1, True, 1, (), {})] * shards))
    assert len(ended.value.value) == shards


def test_rows_that_do_not_fit_into_a_message_are_refused() -> None:
    pytest.importorskip(
        "numba", reason="tables are not tested: pip install 'trireme-train[tables]'"
    )
    protocol = ClientProtocol(0, 1, patience_seconds=1.0, rng=random.Random(0))
    wide = TableSpec("wide", 1 << 20, Add())
    protocol._rows.show((wide,), (0, 256), "none")
    few, many = (np.arange(count, dtype=np.int64).tobytes() for count in (2, 100))
    push = protocol.next_push(1.0, wanted=(RowKeys(0, few),))
    assert protocol.message(push, 0).wanted == (RowKeys(0, few),)
    protocol = ClientProtocol(0, 1, patience_seconds=1.0, rng=random.Random(0))
    protocol._rows.show((wide,), (0, 256), "none")
    push = protocol.next_push(1.0, wanted=(RowKeys(0, many),))
    with pytest.raises(ConfigurationError, match=r"take 400 MiB at one server.*a smaller batch"):
        protocol.message(push, 0)


def copied(since: int, step: int = 7) -> Snapshot:
    return Snapshot(step, (), (), (), view=3, since=since)


def test_a_copy_is_asked_for_at_all_servers_at_once() -> None:
    operation = attached(2, (True, 3), (True, 3)).snapshot(state=True, since=TableMark(5, 3))
    assert next(operation) == Pause(0.0)
    requests = operation.send(0.0)
    assert isinstance(requests, Ask)
    messages = [request.message for request in requests.requests.values()]
    assert isinstance(messages[0], TakeSnapshot) and messages == [messages[0]] * 2
    assert (messages[0].since, messages[0].since_view) == (5, 3)
    with pytest.raises(StopIteration) as ended:
        operation.send({0: (copied(5), ()), 1: (copied(5), ())})
    assert [message for message, _ in ended.value.value] == [copied(5)] * 2


@pytest.mark.parametrize(
    "answers",
    [(copied(5), copied(-1)), (copied(5), Refused("busy", "", 3))],
    ids=["one does not know all changes", "an answer was lost"],
)
def test_a_copy_that_is_not_whole_is_asked_for_again(answers: tuple[Any, Any]) -> None:
    operation = attached(2, (True, 3), (True, 3)).snapshot(state=True, since=TableMark(5, 3))
    next(operation)
    first = operation.send(0.0)
    assert isinstance(first, Ask)
    assert isinstance(operation.send({0: (answers[0], ()), 1: (answers[1], ())}), Pause)
    second = operation.send(0.1)
    assert isinstance(second, Ask)
    before, after = first.requests[0].message, second.requests[0].message
    assert isinstance(before, TakeSnapshot) and isinstance(after, TakeSnapshot)
    assert before.token != after.token
    known = isinstance(answers[1], Refused)
    assert after.since == (5 if known else -1)


def test_hyper_parameters_are_sent_with_the_next_update_that_has_examples() -> None:
    protocol, faster = attached(1, (True, 1)), (GroupSpec({"lr": 2.0}),)
    sent = []
    for weight in (0.0, 3.0, 3.0):
        push = protocol.next_push(weight, hyper=faster)
        sent.append(push.hyper)
        protocol.push(push)
        wait = protocol.wait()
        next(wait)
        with pytest.raises(StopIteration):
            wait.send(applied(1))
            wait.send(None)
    assert sent == [None, faster, None]


def test_the_memory_for_rows_is_used_again_when_the_push_before_is_answered() -> None:
    """And what that has brought there is taken out before."""
    pytest.importorskip(
        "numba", reason="tables are not tested: pip install 'trireme-train[tables]'"
    )
    memory = [bytearray(4096), bytearray(4096)]
    protocol = ClientProtocol(
        0,
        2,
        patience_seconds=1.0,
        rng=random.Random(0),
        space=lambda shard, nbytes: memoryview(memory[shard])[:nbytes],
    )
    protocol._rows.show((TableSpec("counts", 1, Add(), "int64"),), (0, 128, 256), "none")
    keys = np.arange(40)
    wanted = RowKeys(0, raw(keys))
    push = protocol.next_push(1.0, wanted=(wanted,))
    protocol.push(push)
    sent = [protocol.message(push, shard).wanted[0] for shard in range(2)]
    mine = [np.frombuffer(data_of(each.keys), np.int64).copy() for each in sent]
    assert sorted(np.concatenate(mine)) == keys.tolist()
    pull = protocol.pull_rows([RowKeys(0, raw(np.arange(5) + 1000))])
    assert next(pull) == AWAIT
    for each, before in zip(sent, mine, strict=True):
        assert bytes(data_of(each.keys)) == before.tobytes(), "it may have to be sent again"
    said = [PushReply(Applied(1), 1, 0, False, rows=(raw(-each),)) for each in mine]
    assert isinstance(pull.send(answers(*said)), Ask)
    (brought,) = protocol.brought
    np.testing.assert_array_equal(brought, -keys.reshape(-1, 1))


def test_a_worker_that_comes_back_sends_no_rows_of_the_push_that_had_the_same_number() -> None:
    pytest.importorskip(
        "numba", reason="tables are not tested: pip install 'trireme-train[tables]'"
    )
    protocol = ClientProtocol(0, 2, patience_seconds=1.0, rng=random.Random(0))
    protocol._rows.show((TableSpec("counts", 1, Add(), "int64"),), (0, 128, 256), "none")
    for first in (0, 100):
        keys = np.arange(first, first + 40)
        updates = RowUpdates(0, raw(keys), raw(np.ones(40, np.int64)))
        push = protocol.next_push(1.0, rows=(updates,))
        assert push.sequence == 1
        protocol.push(push)
        sent = [protocol.message(push, shard).rows[0] for shard in range(2)]
        found = np.concatenate([np.frombuffer(data_of(each.keys), np.int64) for each in sent])
        assert sorted(found.tolist()) == keys.tolist()
        protocol.renew()
