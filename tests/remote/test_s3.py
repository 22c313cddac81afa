"""Runs on a real server of S3: cut off, held, killed, stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.conftest import PYTHONPATH
from tests.faults.proxy import Proxy
from tests.remote.s3_server import CREDENTIALS, s3_server
from tests.session.checkpoint.samples import assert_same, sample, sample_changes, sample_tables
from trireme.errors import CheckpointError, ConfigurationError
from trireme.location import RemotePath
from trireme.remote.object_store import ObjectStore
from trireme.session.checkpoint import (
    CheckpointData,
    describe,
    latest,
    list_checkpoints,
    load,
    prune,
    save,
    verify,
)
from trireme.session.checkpoint.place import place_of
from trireme.session.checkpoint.run_lock import writer_here

pytest.importorskip("s3fs", reason="S3 is not tested: pip install 'trireme-train[s3-tests]'")
pytest.importorskip("moto.server", reason="S3 is not tested: pip install 'trireme-train[s3-tests]'")
pytestmark = [pytest.mark.thorough, pytest.mark.processes]

MIB = 1 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with s3_server(tmp_path_factory.mktemp("moto") / "log") as url:
        yield url


@pytest.fixture
def proxy(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    proxy = Proxy(server.replace("http://", "tcp://"))
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.address.replace("tcp://", "http://"))
    yield proxy
    proxy.close()


@pytest.fixture
def url(proxy: Proxy, request: pytest.FixtureRequest) -> str:
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()  # an instance keeps the endpoint
    return f"s3://bucket/{request.node.name}"


def large(step: int, mebibytes: int = 48) -> CheckpointData:
    return CheckpointData(step, {"w": torch.full((mebibytes * MIB // 4,), float(step))})


def test_saved_listed_verified_pruned(url: str) -> None:
    place = place_of(url)
    lock = place.claim(writer_here("worker:0", "job", epoch="a"))
    save(place, large(1), writer=lock.number)
    path = save(place, sample(2), writer=lock.number, shard_bytes=16)
    assert_same(load(path), sample(2))
    verify(path)
    assert describe(path)[0].nbytes > 100
    assert torch.equal(load(list_checkpoints(url)[0]).model["w"], large(1).model["w"])
    prune(place, 1, good=path)
    assert list_checkpoints(url) == [path]
    with pytest.raises(ConfigurationError, match="writes to the run directory"):
        place_of(url).claim(writer_here("worker:0", "other", epoch="b"))
    lock.release()
    store = ObjectStore(RemotePath(url))
    assert store.create("once", b"a")
    assert not store.create("once", b"b")


def test_changes_of_tables_are_copied_within_the_store(url: str) -> None:
    keys = torch.arange(100_000)
    tables = {
        **sample_tables({}),
        "t/keys": keys,
        "t/rows": torch.ones(len(keys), 8),
        "t/states": torch.ones(len(keys), 1),
        "t/steps": torch.ones_like(keys),
        "t/touches": torch.ones_like(keys),
    }
    place = place_of(url)
    lock = place.claim(writer_here("worker:0", "job", epoch="a"))
    save(place, replace(sample(1), tables=tables), writer=lock.number)
    changes = sample_changes({}, dropped=[0, 7])
    changes["t/rows"], changes["t/states"] = torch.empty(0, 8), torch.empty(0, 1)
    path = save(place, replace(sample(2), tables=changes, since=1), writer=lock.number)
    prune(place, 1, good=path)
    verify(path)
    assert describe(path)[0].chain == (1, 2)
    assert load(path).tables["t/keys"].tolist() == [n for n in range(100_000) if n not in (0, 7)]
    lock.release()


KILLED = """
import sys, torch
from trireme.session.checkpoint import CheckpointData, save
data = CheckpointData(2, {"w": torch.full((int(sys.argv[2]) << 18,), 2.0)})
print("saving", flush=True)
save(sys.argv[1], data)
"""


def test_killed_in_the_middle_of_an_upload(url: str, proxy: Proxy) -> None:
    save(url, large(1))
    proxy.up.rate = 8.0 * MIB  # each connection: the upload takes some seconds
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, url, "256"],
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        stdout=subprocess.PIPE,
    )
    store = ObjectStore(RemotePath(url))
    folder = f"{store.path('checkpoints')}/".partition("/")[2]
    try:
        assert process.stdout is not None
        process.stdout.readline()
        while True:  # until there is an upload that is not complete
            listed = store.file_system.call_s3(
                "list_multipart_uploads", Bucket="bucket", Prefix=folder
            )
            if listed.get("Uploads"):
                break
            assert process.poll() is None, "it ended before it was killed"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    proxy.up.rate = None
    found = latest(url, lambda path, error: pytest.fail(str(error)))
    assert found is not None
    assert found.step == 1
    assert torch.equal(found.model["w"], large(1).model["w"])
    path = save(url, sample(3))  # the killed process is of this host, and seen to have ended
    assert_same(load(path), sample(3))
    folders = {key.split("/")[1] for key in store.list("checkpoints")}
    assert len(folders) == 2


def test_connections_that_are_reset_and_a_server_that_is_gone(
    url: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(url, sample(1))
    proxy.cut()  # kept connections are opened again
    save(url, sample(2))
    address = proxy.address
    proxy.close()
    with pytest.raises((CheckpointError, ConfigurationError), match="Could not connect"):
        save(url, sample(3))
    with pytest.raises(CheckpointError, match="Could not connect"):
        list_checkpoints(url)
    assert address in os.environ["AWS_ENDPOINT_URL"].replace("http://", "tcp://")


def test_no_bucket_and_no_credentials(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import s3fs

    with pytest.raises(OSError, match="its bucket is not"):
        place_of("s3://nowhere/run").claim(writer_here("worker:0", "job", epoch="a"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(OSError, match="Check the credentials"):
        place_of(f"{url}/2").claim(writer_here("worker:0", "job", epoch="a"))


TRAINS = """
import sys, torch, trireme
from torch import nn
from torch.utils.data import TensorDataset
x = torch.randn(500, 8, generator=torch.Generator().manual_seed(0))
data = TensorDataset(x, (x.sum(1) > 0).long())
model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
session = trireme.Session(model, nn.CrossEntropyLoss(), lambda p: torch.optim.Adam(p),
                          run_dir=sys.argv[1], max_steps=int(sys.argv[2]), log_every=5)
with session:
    for batch in session.loader(data, batch_size=10):
        session.step(batch)
"""


def test_a_job_runs_there_and_the_commands_read_it(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "program.py").write_text(TRAINS)
    (tmp_path / "elsewhere").mkdir()
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}

    def trireme(*arguments: str, there: Path = tmp_path) -> str:
        ended = subprocess.run(
            [sys.executable, "-m", "trireme", *arguments],
            env=environment,
            cwd=there,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    run = ("run", "--ps", "1", "--workers", "2", "--run-dir", url, "program.py", url)
    assert "finished" in trireme(*run, "30")
    assert "restoring" in trireme(*run, "50")
    elsewhere = tmp_path / "elsewhere"
    assert "step-000000050" in trireme("checkpoint", "ls", url, there=elsewhere)
    assert "newest checkpoint is of step 50" in trireme("status", url)
    assert "global step 50/50" in trireme("top", url)
    assert "does not run" in trireme("stop", url)
    trireme("report", url, "--output", "report.html")
    assert "step-000000050" in (tmp_path / "report.html").read_text()
    trireme("checkpoint", "export", url, there=elsewhere)
    assert (elsewhere / "model.safetensors").stat().st_size > 100
    keys = ObjectStore(RemotePath(url)).list("")
    assert not [key for key in keys if "secret" in key or key.endswith((".lock", ".pem"))]
