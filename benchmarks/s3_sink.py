"""A server with as much of S3 as a checkpoint needs, which throws large objects away.

It reads the parts of uploads as fast as Python's sockets do, and keeps their sizes only. So it
measures the client, where moto's server would be the slowest part. It keeps the content of small
objects, for the ledger, with conditional puts. Started as `python -m benchmarks.s3_sink`, it prints
its port.
"""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

_KEPT = 1 << 16
_objects: dict[str, tuple[int, bytes]] = {}  # the size and, of small ones, the content
_uploads: dict[str, dict[int, int]] = {}
_lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_PUT(self) -> None:
        key, query = self._asked()
        size, content = self._body()
        with _lock:
            if "partNumber" in query:
                _uploads[query["uploadId"]][int(query["partNumber"])] = size
            elif self.headers.get("If-None-Match") == "*" and key in _objects:
                error = "<Error><Code>PreconditionFailed</Code><Condition>If-None-Match</Condition>"
                return self._answer(412, f"{error}</Error>")
            else:
                _objects[key] = size, content
        return self._answer(200)

    def do_POST(self) -> None:
        key, query = self._asked()
        self._body()
        with _lock:
            if "uploads" in query:
                name = str(len(_uploads))
                _uploads[name] = {}
                return self._answer(
                    200,
                    "<InitiateMultipartUploadResult>"
                    f"<UploadId>{name}</UploadId></InitiateMultipartUploadResult>",
                )
            _objects[key] = sum(_uploads.pop(query["uploadId"]).values()), b""
        return self._answer(
            200, '<CompleteMultipartUploadResult><ETag>"x"</ETag></CompleteMultipartUploadResult>'
        )

    def do_GET(self) -> None:
        key, query = self._asked()
        with _lock:
            if "uploads" in query:
                return self._answer(200, "<ListMultipartUploadsResult/>")
            if "list-type" in query:
                return self._answer(200, _listing(key.strip("/"), query.get("prefix", "")))
            found = _objects.get(key)
        if found is None:
            return self._answer(404, "<Error><Code>NoSuchKey</Code></Error>")
        return self._answer(200, found[1].decode("latin-1"))

    def do_HEAD(self) -> None:
        key, _ = self._asked()
        self._answer(200 if key in _objects else 404)

    def do_DELETE(self) -> None:
        key, _ = self._asked()
        with _lock:
            _objects.pop(key, None)
        self._answer(204)

    def _asked(self) -> tuple[str, dict[str, str]]:
        parts = urlsplit(self.path)
        query = parse_qs(parts.query, keep_blank_values=True)
        return unquote(parts.path), {name: values[0] for name, values in query.items()}

    def _body(self) -> tuple[int, bytes]:
        left = size = int(self.headers.get("Content-Length", 0))
        if self.headers.get("Expect") == "100-continue":
            self.send_response_only(100)
            self.end_headers()
        if size <= _KEPT:
            return size, self.rfile.read(size)
        buffer = bytearray(1 << 20)
        while left:
            left -= self.rfile.readinto(memoryview(buffer)[: min(left, len(buffer))])
        return size, b""

    def _answer(self, status: int, text: str = "") -> None:
        content = text.encode("latin-1")
        self.send_response(status)
        self.send_header("ETag", '"x"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        pass


def _listing(bucket: str, prefix: str) -> str:
    start = f"/{bucket}/{prefix}"
    rows = "".join(
        f"<Contents><Key>{escape(key.removeprefix(f'/{bucket}/'))}</Key><Size>{size}</Size>"
        '<ETag>"x"</ETag><LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>'
        for key, (size, _) in sorted(_objects.items())
        if key.startswith(start)
    )
    return f"<ListBucketResult><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>"


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()
