from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.conformance import CATALOG, PATIENCE, Note, frame_of, in_thread
from trireme.errors import (
    AuthenticationError,
    ConnectionBroken,
    ConnectionRefused,
    FrameError,
    PeerClosed,
    StaleEpochError,
    WireError,
    WireTimeout,
)
from trireme.wire.connection import Connection
from trireme.wire.handshake import (
    HANDSHAKE_CATALOG,
    Challenge,
    Denied,
    Hello,
    Identity,
    Proof,
    ServerHandshake,
    Welcome,
    authenticate,
)
from trireme.wire.message import HANDSHAKE_LIMITS, Limits, Message
from trireme.wire.transport import TRANSPORTS
from trireme.wire.transports.socket_stream import SocketStream

JOB, SECRET = "job-1", b"the secret of job-1"
SERVER = "ps:0"
EPOCH = "the first start"
WORKER = Identity(JOB, "worker:1", 3, EPOCH)

Answers = Callable[[Message], Message | None]


@contextmanager
def against(answer: Answers, *, called: str = "") -> Iterator[Connection]:
    """A client's connection, at whose other end a thread answers."""
    here, there = socket.socketpair()
    server = Connection(SocketStream(there, "client"), HANDSHAKE_CATALOG, limits=HANDSHAKE_LIMITS)

    def serve() -> None:
        try:
            while True:
                reply = answer(server.receive(timeout=PATIENCE).message)
                if reply is not None:
                    server.send(reply, timeout=PATIENCE)
        except WireError:
            server.close()

    with (
        in_thread(serve),
        Connection(SocketStream(here, "tcp://there:1", called), CATALOG) as client,
    ):
        yield client


class Recorder:
    """Passes messages through a server's handshake and keeps both sides."""

    def __init__(self, handshake: ServerHandshake) -> None:
        self.handshake = handshake
        self.said: list[Message] = []
        self.answers: list[Message] = []

    def __call__(self, message: Message) -> Message:
        answer = self.handshake.answer(message)
        self.said.append(message)
        self.answers.append(answer)
        return answer


def hello(**changes: Any) -> Hello:
    """The first words of a worker that has not joined."""
    words = Hello(job=JOB, epoch="", task="worker:0", incarnation=0, nonce=bytes(32))
    return replace(words, **changes)


@pytest.mark.parametrize(
    ("task", "role", "index"),
    [
        ("worker:12", "worker", 12),
        ("worker:012", "worker", -1),
        ("worker:1:2", "worker", -1),
        ("observer", "observer", -1),
    ],
)
def test_what_is_no_name_of_a_task_has_no_index(task: str, role: str, index: int) -> None:
    identity = Identity("job", task)
    assert (identity.role, identity.index) == (role, index)


def test_both_sides_prove_themselves() -> None:
    handshake = ServerHandshake(JOB, SECRET, EPOCH)
    assert handshake.identity is None
    with against(handshake.answer) as client:
        limits = client.limits = Limits(metadata=5)
        authenticate(client, WORKER, SECRET, server=SERVER, timeout=PATIENCE)
        assert client.catalog is CATALOG
        assert client.limits is limits
    assert handshake.identity == WORKER
    assert handshake.denied is None


def test_wrong_secret() -> None:
    handshake = ServerHandshake(JOB, b"another secret", EPOCH)
    with against(handshake.answer) as client:
        with pytest.raises(AuthenticationError, match=r"tcp://there:1 .*secret is not that of job"):
            authenticate(client, WORKER, SECRET, server=SERVER, timeout=PATIENCE)
        with pytest.raises(WireError, match="closed by this side"):
            client.send(Note(), timeout=PATIENCE)
    assert handshake.identity is None
    assert handshake.denied == "worker:1 does not know this job's secret"


def test_wrong_job() -> None:
    recorder = Recorder(ServerHandshake("job-2", SECRET))
    with (
        against(recorder) as client,
        pytest.raises(AuthenticationError, match="serves another job than job-1"),
    ):
        authenticate(client, WORKER, SECRET, server=SERVER, timeout=PATIENCE)
    assert recorder.handshake.identity is None
    # A stranger does not learn the job's name.
    assert recorder.answers == [Denied("job")]


def test_a_server_without_the_secret_is_found_out() -> None:
    def pretend(message: Message) -> Message:
        return Challenge(bytes(32)) if isinstance(message, Hello) else Welcome(bytes(32))

    with (
        against(pretend) as client,
        pytest.raises(AuthenticationError, match="could not prove that it knows the secret"),
    ):
        authenticate(client, WORKER, SECRET, server=SERVER, timeout=PATIENCE)


def test_a_server_cannot_reflect_the_clients_proof() -> None:
    def reflect(message: Message) -> Message:
        if isinstance(message, Proof):
            return Welcome(message.hmac)
        return Challenge(bytes(32))

    with against(reflect) as client, pytest.raises(AuthenticationError, match="could not prove"):
        authenticate(client, WORKER, SECRET, server=SERVER, timeout=PATIENCE)


def recorded() -> Recorder:
    recorder = Recorder(ServerHandshake(JOB, SECRET, EPOCH))
    with against(recorder) as client:
        authenticate(client, WORKER, SECRET, server=SERVER, timeout=PATIENCE)
    return recorder


def test_a_replayed_proof_is_denied() -> None:
    old = recorded()
    again = ServerHandshake(JOB, SECRET, EPOCH)
    challenge = again.answer(old.said[0])
    assert isinstance(challenge, Challenge)
    assert challenge != old.answers[0]
    assert again.answer(old.said[1]) == Denied("secret")
    assert again.identity is None


def test_a_replayed_welcome_is_found_out() -> None:
    old = recorded()

    def replay(message: Message) -> Message:
        return old.answers[0] if isinstance(message, Hello) else old.answers[1]

    with against(replay) as client, pytest.raises(AuthenticationError, match="could not prove"):
        authenticate(client, WORKER, SECRET, server=SERVER, timeout=PATIENCE)


@pytest.mark.parametrize(
    "change",
    [
        {"task": "worker:2"},
        {"incarnation": 4},
        {"epoch": ""},
        {"server": "ps:1"},
        {"address": "shm://there"},
        {"nonce": bytes(32)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_the_proof_covers_who_it_is(change: dict[str, Any]) -> None:
    handshake = ServerHandshake(JOB, SECRET, EPOCH)

    def man_in_the_middle(message: Message) -> Message:
        if isinstance(message, Hello):
            message = replace(message, **change)
        return handshake.answer(message)

    with against(man_in_the_middle) as client, pytest.raises(AuthenticationError, match="secret"):
        authenticate(client, WORKER, SECRET, server=SERVER, timeout=PATIENCE)
    assert handshake.identity is None


def test_a_task_of_an_earlier_start_is_denied() -> None:
    handshake = ServerHandshake(JOB, SECRET, "the second start")
    with (
        against(handshake.answer) as client,
        pytest.raises(StaleEpochError, match=r"worker:1 belongs to an earlier start of job job-1"),
    ):
        authenticate(client, WORKER, SECRET, server=SERVER, timeout=PATIENCE)
    assert handshake.identity is None
    assert handshake.denied == "worker:1 belongs to an earlier start of the job"


def test_a_client_that_meant_another_task_is_denied() -> None:
    handshake = ServerHandshake(JOB, SECRET, EPOCH, serves=("ps:1", "coordinator:0"))
    with (
        against(handshake.answer) as client,
        pytest.raises(AuthenticationError, match=r"tcp://there:1 is not ps:0, which worker:1 mean"),
    ):
        authenticate(client, WORKER, SECRET, server="ps:0", timeout=PATIENCE)
    assert handshake.denied == "worker:1 meant to reach ps:0, not ps:1 and coordinator:0"


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("shm://trireme-127.0.0.1:2222", "tcp://127.0.0.1:2222"),
        pytest.param(
            *("shm://trireme-127.0.0.1:2222", "shm://trireme-127.0.0.1:2223"),
            marks=pytest.mark.skipif("shm" not in TRANSPORTS, reason="shm is not installed"),
        ),
        ("tcp://[::1]:2222", "tcp://127.0.0.1:2222"),
        ("tcp://127.0.0.1:2222", "tcp://127.0.0.1:2223"),
        ("tcp://127.0.0.1:2222", "tcp://10.0.0.5:2222"),
        ("tcp://10.0.0.5:2222", "tcp://127.0.0.1:2222"),
        ("tcp://10.0.0.5:2222", "shm://trireme-10.0.0.5:2222"),
        ("", "tcp://127.0.0.1:2222"),
        ("tcp://", "tcp://127.0.0.1:2222"),
        ("tcp://nonsense", "tcp://10.0.0.5:2222"),
    ],
)
def test_what_came_by_another_way_than_the_client_went_is_denied(theirs: str, ours: str) -> None:
    handshake = ServerHandshake(JOB, SECRET, EPOCH, called=ours)
    with (
        against(handshake.answer, called=theirs) as client,
        pytest.raises(AuthenticationError, match="something between them relays"),
    ):
        authenticate(client, WORKER, SECRET, server=SERVER, timeout=PATIENCE)
    assert handshake.identity is None


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("shm://trireme-127.0.0.1:2222", "shm://trireme-127.0.0.1:2222"),
        ("tcp://[::1]:2222", "tcp://[::1]:2222"),
        ("tcp://10.0.0.5:2222", "tcp://192.168.0.5:32222"),  # translated on the way
    ],
)
def test_the_way_that_the_client_went_is_let_in(theirs: str, ours: str) -> None:
    handshake = ServerHandshake(JOB, SECRET, EPOCH, called=ours)
    with against(handshake.answer, called=theirs) as client:
        authenticate(client, WORKER, SECRET, server=SERVER, timeout=PATIENCE)
    assert handshake.identity == WORKER


def test_only_who_knows_the_secret_is_told_of_the_epoch() -> None:
    handshake = ServerHandshake(JOB, SECRET, "the second start")
    assert isinstance(handshake.answer(hello(epoch=EPOCH)), Challenge)
    assert handshake.answer(Proof(bytes(32))) == Denied("secret")


def test_a_task_may_come_before_the_server_has_joined_itself() -> None:
    handshake = ServerHandshake(JOB, SECRET, "")
    with (
        against(handshake.answer) as client,
        pytest.raises(ConnectionRefused, match="has not joined job job-1 yet"),
    ):
        authenticate(client, WORKER, SECRET, server=SERVER, timeout=PATIENCE)


def test_who_has_not_joined_names_no_epoch() -> None:
    handshake = ServerHandshake(JOB, SECRET, EPOCH)
    with against(handshake.answer) as client:
        authenticate(client, Identity(JOB, "worker:1"), SECRET, server=SERVER, timeout=PATIENCE)
    assert handshake.identity == Identity(JOB, "worker:1", 0, "")


def test_one_proof_a_handshake() -> None:
    old = recorded()
    handshake = ServerHandshake(JOB, SECRET)
    handshake.answer(old.said[0])
    for _ in range(3):
        assert isinstance(handshake.answer(Proof(bytes(32))), Denied)
    assert handshake.denied is not None
    assert isinstance(handshake.answer(old.said[0]), Denied)


@pytest.mark.parametrize(
    "message", [Proof(bytes(32)), Challenge(bytes(32)), Welcome(bytes(32)), Denied("job")]
)
def test_anything_before_hello_is_denied(message: Message) -> None:
    handshake = ServerHandshake(JOB, SECRET)
    assert handshake.answer(message) == Denied("order")
    assert handshake.denied is not None
    assert isinstance(handshake.answer(hello()), Denied)


def test_hello_comes_once() -> None:
    handshake = ServerHandshake(JOB, SECRET)
    assert isinstance(handshake.answer(hello()), Challenge)
    assert handshake.answer(hello()) == Denied("order")


def test_nothing_comes_after_welcome() -> None:
    old = recorded()
    assert old.handshake.identity == WORKER
    assert old.handshake.answer(old.said[1]) == Denied("order")
    assert old.handshake.identity is None


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_short_nonce_is_denied(size: int) -> None:
    handshake = ServerHandshake(JOB, SECRET)
    assert handshake.answer(hello(nonce=bytes(size))) == Denied("order")


messages = st.one_of(
    st.builds(
        Hello,
        job=st.sampled_from([JOB, "x"]),
        epoch=st.text(),
        task=st.text(),
        incarnation=st.integers(0, 9),
        nonce=st.binary(),
    ),
    st.builds(hello, nonce=st.binary(min_size=32, max_size=32)),
    st.builds(Challenge, st.binary()),
    st.builds(Proof, st.binary(max_size=40)),
    st.builds(Welcome, st.binary()),
    st.builds(Denied, st.text()),
)


@given(st.lists(messages))
def test_no_sequence_of_guesses_is_welcome(said: list[Message]) -> None:
    handshake = ServerHandshake(JOB, SECRET)
    for message in said:
        assert isinstance(handshake.answer(message), Challenge | Denied)
        assert handshake.identity is None


def test_a_stalled_server() -> None:
    with against(lambda message: None) as client:
        with pytest.raises(WireTimeout, match=r"did not answer the handshake of worker:1 in time"):
            authenticate(client, WORKER, SECRET, server=SERVER, timeout=0.05)
        with pytest.raises(WireError, match="closed by this side"):
            client.receive(timeout=PATIENCE)


def test_a_server_that_answers_out_of_order() -> None:
    with (
        against(lambda message: Welcome(bytes(32))) as client,
        pytest.raises(FrameError, match="answered Hello with Welcome"),
    ):
        authenticate(client, WORKER, SECRET, server=SERVER, timeout=PATIENCE)


def test_a_server_that_goes_away() -> None:
    here, there = socket.socketpair()
    there.close()
    client = Connection(SocketStream(here, "there"), CATALOG)
    with pytest.raises(WireError):
        authenticate(client, WORKER, SECRET, server=SERVER, timeout=PATIENCE)


def test_the_client_accepts_no_large_answer() -> None:
    here, there = socket.socketpair()
    client = Connection(SocketStream(here, "there"), CATALOG)
    there.sendall(frame_of(Note("x" * 2000)))
    with pytest.raises(FrameError, match="at most 1024"):
        authenticate(client, WORKER, SECRET, server=SERVER, timeout=PATIENCE)
    server = Connection(SocketStream(there, "client"), HANDSHAKE_CATALOG)
    assert isinstance(server.receive(timeout=PATIENCE).message, Hello)
    with pytest.raises((PeerClosed, ConnectionBroken)):
        server.receive(timeout=PATIENCE)
