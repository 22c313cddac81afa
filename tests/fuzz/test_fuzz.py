"""A slice of each fuzzer, and bugs planted in what it reads with, each of which it has to find."""

from __future__ import annotations

import mmap
import random
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.fuzz import frames, handshakes
from tests.fuzz.checkpoints import CheckpointFuzzer
from tests.fuzz.run import Broken, run_cases
from tests.fuzz.values import message_of
from trireme.cluster.messages import CLUSTER_CATALOG
from trireme.ps.replication.messages import PS_CATALOG, PS_MESSAGES
from trireme.session.checkpoint import manifest, tensors
from trireme.wire import connection, handshake, message
from trireme.wire.connection import Connection
from trireme.wire.message import Header

SEED = 20


def test_frames() -> None:
    outcome = run_cases("frames", frames.run_case, 3000, SEED)
    ways = {re.sub(r": \w+$", "", name) for name in outcome.counts}
    assert all(outcome.counts[f"{way}: refused"] > 10 for way in ways)
    assert outcome.counts["a value: accepted"] > 100


def test_handshakes() -> None:
    outcome = run_cases("handshakes", handshakes.run_case, 2000, SEED)
    assert outcome.counts["between, to a server: admitted"] > 20
    assert outcome.counts["between, to a client: admitted"] > 20
    assert not outcome.counts["without the secret, to a server: admitted"]


@pytest.mark.thorough
def test_checkpoints(tmp_path: Path) -> None:
    outcome = run_cases("checkpoints", CheckpointFuzzer(tmp_path).run_case, 150, SEED)
    assert outcome.counts["bytes: refused"] > 20
    assert any(name.startswith("forged") and "loaded" in name for name in outcome.counts)


@pytest.mark.parametrize("kind", PS_MESSAGES, ids=lambda kind: str(kind.__name__))
def test_examples_of_every_kind_are_valid(kind: type[message.Message]) -> None:
    draw = random.Random(1)
    for _ in range(20):
        made = message_of(kind, draw)
        encoded = PS_CATALOG.encode(made)
        assert PS_CATALOG.encode(PS_CATALOG.decode(kind.kind, encoded)) == encoded


def test_a_case_that_raises_is_named_so_that_it_can_be_repeated() -> None:
    numbers: list[float] = []

    def case(draw: random.Random) -> str:
        numbers.append(draw.random())
        if len(numbers) == 1234:
            raise KeyError("oh")
        return "well"

    with pytest.raises(Broken, match=r"case 233 of batch 5/some/1: KeyError\('oh'\)"):
        run_cases("some", case, 2000, 5)
    draw = random.Random("5/some/1")
    assert [draw.random() for _ in range(234)] == numbers[1000:]


@pytest.mark.thorough
def test_a_case_that_keeps_memory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[mmap.mmap] = []

    def case(draw: random.Random) -> str:
        # Pages of its own: bytes would fit into what earlier tests have freed.
        kept.append(mmap.mmap(-1, 1 << 16))
        kept[-1].write(draw.randbytes(1 << 16))
        return "kept"

    with pytest.raises(Broken, match="memory has grown"):
        run_cases("keeps", case, 4000, 1)


# Planted bugs ------------------------------------------------------------------------------------


def _frames_find(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    with pytest.raises(Broken, match=said):
        run_cases("frames", frames.run_case, 20_000, SEED)


def test_frames_find_a_version_that_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(data: Any, limits: Any, offset: int = 0) -> Header:
        fields = frames.HEADER.unpack_from(data, offset)
        return Header(fields[2], fields[4], fields[5], fields[6])

    monkeypatch.setattr(connection, "unpack_header", careless)
    _frames_find(monkeypatch, "")


def test_frames_find_an_error_that_is_not_the_projects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message.msgspec, "DecodeError", ZeroDivisionError)
    monkeypatch.setattr(message, "FrameError", ArithmeticError)
    _frames_find(monkeypatch, "ArithmeticError")


def test_frames_find_a_payload_that_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Connection.poll

    def poll(self: Connection) -> Any:
        incoming = real(self)
        if incoming is not None and incoming.nbytes > 50:
            incoming.payload = [view[:50] for view in incoming.payload]
        return incoming

    monkeypatch.setattr(Connection, "poll", poll)
    _frames_find(monkeypatch, "AssertionError")


def test_frames_find_a_value_that_is_taken_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    lax = {
        kind: msgspec.msgpack.Decoder(decoder.type, strict=False)
        for kind, decoder in CLUSTER_CATALOG._decoders.items()
    }
    monkeypatch.setattr(CLUSTER_CATALOG, "_decoders", lax)
    _frames_find(monkeypatch, "became")


def _handshakes_find(said: str) -> None:
    with pytest.raises(Broken, match=said):
        run_cases("handshakes", handshakes.run_case, 5000, SEED)


def test_handshakes_find_a_proof_that_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake.hmac, "compare_digest", lambda one, other: True)
    _handshakes_find("AssertionError")


@pytest.mark.thorough
@pytest.mark.parametrize("field", ["epoch", "incarnation", "task", "nonce"])
def test_handshakes_find_what_no_proof_covers(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    """Each field of `Hello` has to be under the proof: else whoever sits between can change it."""
    real = handshake._digest
    blank = {"epoch": "", "incarnation": 0, "task": "", "nonce": b""}[field]

    def digest(secret: bytes, label: bytes, *parts: message.Message) -> bytes:
        without = (
            msgspec.structs.replace(part, **{field: blank})
            if isinstance(part, handshake.Hello)
            else part
            for part in parts
        )
        return real(secret, label, *without)

    monkeypatch.setattr(handshake, "_digest", digest)
    monkeypatch.setattr(handshakes, "mac", digest)
    _handshakes_find("was admitted, and")


def _checkpoints_find(tmp_path: Path) -> None:
    with pytest.raises(Broken):
        run_cases("checkpoints", CheckpointFuzzer(tmp_path).run_case, 2000, SEED)


def test_checkpoints_find_checksums_that_are_not_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = manifest.verify_files

    def by_size(directory: Path, listed: Any, content: Any = None) -> None:
        real(directory, listed, lambda name: False)

    monkeypatch.setattr("trireme.session.checkpoint.format.verify_files", by_size)
    _checkpoints_find(tmp_path)


def test_checkpoints_find_a_step_that_is_not_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "order_of", lambda name: None)
    _checkpoints_find(tmp_path)


def test_checkpoints_find_an_error_that_is_not_the_projects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors, "CheckpointError", ArithmeticError)
    _checkpoints_find(tmp_path)
