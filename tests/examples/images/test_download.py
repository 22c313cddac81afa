"""Downloads from a server on this machine that can resume, break off, lie and refuse."""

from __future__ import annotations

import hashlib
import io
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from images import cifar, download
from images.download import Remote

from trireme.errors import DataError

CONTENT = bytes(range(256)) * 2000


class Server(ThreadingHTTPServer):
    """Serves `files`; `break_after` makes each answer end early, `ranges` says how it resumes."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {"/good": CONTENT, "/bad": CONTENT[:-1] + b"!"}
        self.break_after: int | None = None
        self.ranges = "right"
        self.requests: list[tuple[str, str | None]] = []

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_port}{path}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        self.server.requests.append((self.path, wanted))
        content = self.server.files.get(self.path)
        if content is None:
            self.send_error(404, "no such file")
            return
        start = 0
        if wanted and self.server.ranges != "ignored":
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if self.server.ranges == "wrong":
                start += 1
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        stop = len(content)
        if self.server.break_after is not None:
            stop = start + self.server.break_after
        self.wfile.write(content[start:stop])

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server() as serving:
        thread = threading.Thread(target=serving.serve_forever, args=(0.01,))
        thread.start()
        yield serving
        serving.shutdown()
        thread.join()


def remote(*urls: str, content: bytes = CONTENT, name: str = "file.bin") -> Remote:
    return Remote(name, len(content), hashlib.sha256(content).hexdigest(), urls)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_file_comes_whole_and_once(server: Server, tmp_path: Path) -> None:
    reported: list[tuple[str, int, int]] = []
    directory = tmp_path / "made" / "on the way"
    path = download.fetch(
        remote(server.url("/good")), directory, progress=lambda *report: reported.append(report)
    )
    assert path == directory / "file.bin"
    assert path.read_bytes() == CONTENT
    assert names(directory) == ["file.bin"]
    assert reported[0] == ("file.bin", 0, len(CONTENT))
    assert reported[-1] == ("file.bin", len(CONTENT), len(CONTENT))
    assert [there for _, there, _ in reported] == sorted({there for _, there, _ in reported})
    download.fetch(remote(server.url("/good")), directory)
    assert server.requests == [("/good", None)]


def test_goes_on_where_it_broke_off(server: Server, tmp_path: Path) -> None:
    server.break_after = 200_000
    path = download.fetch(remote(server.url("/good")), tmp_path)
    assert path.read_bytes() == CONTENT
    assert server.requests == [
        ("/good", None),
        ("/good", "bytes=200000-"),
        ("/good", "bytes=400000-"),
    ]


def test_a_later_call_goes_on(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.bin.part").write_bytes(CONTENT[:1000])
    path = download.fetch(remote(server.url("/good")), tmp_path)
    assert path.read_bytes() == CONTENT
    assert server.requests == [("/good", "bytes=1000-")]
    assert names(tmp_path) == ["file.bin"]


def test_a_part_that_was_whole_is_not_fetched_again(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.bin.part").write_bytes(CONTENT)
    assert download.fetch(remote(server.url("/good")), tmp_path).read_bytes() == CONTENT
    assert server.requests == []


@pytest.mark.parametrize("ranges", ["ignored", "right"])
@pytest.mark.parametrize("part", [b"x" * 1000, CONTENT + b"more"])
def test_a_part_of_something_else_is_thrown_away(
    server: Server, tmp_path: Path, ranges: str, part: bytes
) -> None:
    server.ranges = ranges
    (tmp_path / "file.bin.part").write_bytes(part)
    assert download.fetch(remote(server.url("/good")), tmp_path).read_bytes() == CONTENT


def test_a_server_that_goes_on_elsewhere_is_not_believed(server: Server, tmp_path: Path) -> None:
    server.ranges = "wrong"
    (tmp_path / "file.bin.part").write_bytes(CONTENT[:1000])
    with pytest.raises(DataError, match="asked from byte 1000 on, got bytes 1001-"):
        download.fetch(remote(server.url("/good")), tmp_path)
    assert (tmp_path / "file.bin.part").read_bytes() == CONTENT[:1000]


def test_the_second_url_helps_out(server: Server, tmp_path: Path) -> None:
    urls = (server.url("/missing"), server.url("/bad"), server.url("/good"))
    assert download.fetch(remote(*urls), tmp_path).read_bytes() == CONTENT
    assert [path for path, _ in server.requests] == ["/missing", "/bad", "/good"]


def test_wrong_content_never_gets_the_name(server: Server, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the content has another checksum"):
        download.fetch(remote(server.url("/bad")), tmp_path)
    assert names(tmp_path) == []


def test_without_a_server_it_says_how_to_do_it_by_hand(server: Server, tmp_path: Path) -> None:
    gone = server.url("/good")
    server.shutdown()
    server.server_close()
    with pytest.raises(DataError) as raised:
        download.fetch(remote(gone), tmp_path)
    message = str(raised.value)
    assert gone in message
    assert "refused" in message
    assert f"put it at {tmp_path / 'file.bin'}" in message


def test_a_silent_server_is_given_up(server: Server, tmp_path: Path) -> None:
    # Listens, and nobody answers: the loop that would accept is stopped.
    server.shutdown()
    with pytest.raises(DataError, match="timed out"):
        download.fetch(remote(server.url("/good")), tmp_path, timeout=0.05)


def test_another_file_of_that_name_is_left_alone(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.bin").write_bytes(b"mine")
    with pytest.raises(DataError, match=r"is there, and its checksum is not that of http"):
        download.fetch(remote(server.url("/good")), tmp_path)
    assert (tmp_path / "file.bin").read_bytes() == b"mine"
    assert server.requests == []


def test_mnist_fetches_each_file(server: Server, tmp_path: Path) -> None:
    files = [remote(server.url("/good"), name=known.name) for known in download.MNIST]
    assert download.mnist(tmp_path, files=files) == tmp_path
    assert names(tmp_path) == sorted(known.name for known in download.MNIST)


def archive(members: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


RECORDS = {name: bytes(3073) for name in (*cifar.TRAIN_FILES, *cifar.TEST_FILES)}


def serve_archive(server: Server, members: dict[str, bytes]) -> Remote:
    server.files["/cifar"] = archive(members)
    return remote(server.url("/cifar"), content=server.files["/cifar"], name="cifar.tar.gz")


def test_cifar10_is_fetched_and_unpacked_once(server: Server, tmp_path: Path) -> None:
    members = {f"cifar-10-batches-bin/{name}": content for name, content in RECORDS.items()}
    packed = serve_archive(server, members | {"../../outside": b"", "readme.html": b"x"})
    folder = download.cifar10(tmp_path, archive=packed)
    assert folder == tmp_path / "cifar-10-batches-bin"
    assert names(tmp_path) == ["cifar-10-batches-bin"]
    assert names(folder) == sorted(RECORDS)
    assert [len(part) for part in cifar.load(folder)] == [5, 1]
    download.cifar10(tmp_path, archive=packed)
    assert len(server.requests) == 1


def test_an_archive_of_something_else(server: Server, tmp_path: Path) -> None:
    packed = serve_archive(server, {"a/data_batch_1.bin": b""})
    with pytest.raises(DataError, match=r"lacks data_batch_2\.bin, .*it is another archive"):
        download.cifar10(tmp_path, archive=packed)
    server.files["/cifar"] = CONTENT
    packed = remote(server.url("/cifar"), name="cifar2.tar.gz")
    with pytest.raises(DataError, match="cannot be unpacked"):
        download.cifar10(tmp_path, archive=packed)


def test_what_is_published() -> None:
    assert [known.size for known in download.MNIST] == [9912422, 28881, 1648877, 4542]
    assert all(len(known.sha256) == 64 for known in (*download.MNIST, download.CIFAR10))
    assert all(url.startswith("https://") for known in download.MNIST for url in known.urls)
