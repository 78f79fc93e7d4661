"""A real S3 server over HTTP for tests (moto), behind a proxy that makes it as bad as the network can be.

The fixture `s3` gives a bucket of one's own; `s3.faults` decides the fate of each request. What the proxy did is
kept in `s3.seen`, so that a test can say that it met what it was written for.
"""

from __future__ import annotations

import http.client
import http.server
import random
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

import pytest

SLOW_SECONDS = 3.0
READ_TIMEOUT_SECONDS = 1.0
"""Given to the clients of tests that meet `Fault.SLOW`."""


class Fault(StrEnum):
    """What may befall a request."""

    INTERNAL = "500 and nothing done"
    UNAVAILABLE = "503 SlowDown and nothing done"
    THROTTLED = "429 and nothing done"
    CONFLICT = "409 ConditionalRequestConflict and nothing done"
    SLOW = "no answer before the client's time is up"
    DROPPED = "the connection is closed and nothing done"
    LOST = "done, but the connection is closed before the answer"
    CUT = "half of the answer, then the connection is closed"
    DIES = "half of the upload reaches the server, then its connection is closed"


ANYTIME = (Fault.INTERNAL, Fault.UNAVAILABLE, Fault.DROPPED, Fault.LOST, Fault.CUT, Fault.DIES)
"""Faults that cost no time."""

_ANSWERS = {
    Fault.INTERNAL: (500, "InternalError"),
    Fault.UNAVAILABLE: (503, "SlowDown"),
    Fault.THROTTLED: (429, "TooManyRequests"),
    Fault.CONFLICT: (409, "ConditionalRequestConflict"),
}

Decide = Callable[[str, str], Fault | None]
"""Method and path to what befalls the request."""


@dataclass
class Bucket:
    """A bucket behind the proxy."""

    url: str
    endpoint: str
    direct: str
    """The server itself, past the proxy."""
    faults: Decide | None = None
    seen: list[tuple[str, str, Fault | None]] = field(default_factory=list)
    """Method, path and fate of every request."""

    @property
    def met(self) -> set[Fault]:
        return {fault for _, _, fault in self.seen if fault is not None}

    def strike(self, *faults: Fault, method: str = "", part: str = "") -> None:
        """These befall the next requests of that method whose path has that part, one each; then all is well."""
        left, lock = list(faults), threading.Lock()

        def decide(by: str, path: str) -> Fault | None:
            with lock:
                return left.pop(0) if left and by.startswith(method) and part in path else None

        self.faults = decide

    def always(self, fault: Fault, *, method: str = "", part: str = "") -> None:
        """It befalls every such request."""
        self.faults = lambda by, path: fault if by.startswith(method) and part in path else None

    def at_random(self, rate: float, *, seed: int = 0, among: tuple[Fault, ...] = ANYTIME) -> None:
        """One of these befalls this share of all requests."""
        rng, lock = random.Random(seed), threading.Lock()

        def decide(_by: str, _path: str) -> Fault | None:
            with lock:
                return rng.choice(among) if rng.random() < rate else None

        self.faults = decide


class _Proxy(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, target: tuple[str, int]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = target
        self.bucket: Bucket | None = None
        # S3 decides conditional writes one after the other; moto looks and writes in two steps.
        self.writing = threading.Lock()

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that hang up are what this is about."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Proxy

    def do_GET(self) -> None:
        bucket = self.server.bucket
        fault = bucket.faults(self.command, self.path) if bucket is not None and bucket.faults is not None else None
        if bucket is not None:
            bucket.seen.append((self.command, self.path, fault))
        body = self._body()
        if fault is Fault.SLOW:
            time.sleep(SLOW_SECONDS)
            fault = Fault.DROPPED
        if fault is Fault.DIES:
            self._die_upstream(body)
            fault = Fault.DROPPED
        if fault is Fault.DROPPED:
            self._hang_up()
            return
        if fault in _ANSWERS:
            status, code = _ANSWERS[fault]
            text = f"<Error><Code>{code}</Code><Message>as the test wants it</Message></Error>".encode()
            self._answer(status, [("Content-Type", "application/xml")], b"" if self.command == "HEAD" else text)
            return
        status, headers, answer = self._forward(body)
        if fault is Fault.LOST:
            self._hang_up()
        elif fault is Fault.CUT:
            self._answer(status, headers, answer, send=answer[: len(answer) // 2])
            self._hang_up()
        else:
            self._answer(status, headers, answer)

    do_PUT = do_POST = do_HEAD = do_DELETE = do_GET

    def _body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            while self.rfile.readline().strip():
                pass
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _sent_headers(self) -> dict[str, str]:
        skip = ("connection", "expect", "transfer-encoding", "content-length")
        return {k: v for k, v in self.headers.items() if k.lower() not in skip}

    def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(*self.server.target, timeout=60)
        try:
            with self.server.writing if self.command in ("PUT", "POST") else threading.Lock():
                headers = {**self._sent_headers(), "Content-Length": str(len(body))}
                connection.request(self.command, self.path, body=body or None, headers=headers)
                response = connection.getresponse()
                return response.status, response.getheaders(), response.read()
        finally:
            connection.close()

    def _die_upstream(self, body: bytes) -> None:
        """The server gets the head, which promises the whole, and half of it."""
        lines = [f"{self.command} {self.path} HTTP/1.1"]
        lines += [f"{k}: {v}" for k, v in {**self._sent_headers(), "Content-Length": str(len(body))}.items()]
        with socket.create_connection(self.server.target, timeout=60) as upstream:
            upstream.sendall("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body[: len(body) // 2])
            if not body:
                return
            upstream.shutdown(socket.SHUT_WR)
            upstream.settimeout(10)
            try:
                while upstream.recv(65536):
                    pass
            except OSError:
                pass

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes, *, send: bytes | None = None) -> None:
        self.send_response_only(status)
        skip = ("connection", "transfer-encoding", "content-length")
        length = next((v for k, v in headers if k.lower() == "content-length"), str(len(body)))
        for name, value in headers:
            if name.lower() not in skip:
                self.send_header(name, value)
        self.send_header("Content-Length", length if self.command == "HEAD" else str(len(body)))
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else body if send is None else send)

    def _hang_up(self) -> None:
        self.close_connection = True
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture(scope="session")
def moto_address() -> Iterator[tuple[str, int]]:
    """Host and port of a moto server."""
    server_module = pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield server.get_host_and_port()
    server.stop()


@pytest.fixture
def s3(moto_address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """A new bucket, named s3://..., of which the environment tells where it is."""
    import s3fs

    proxy = _Proxy(moto_address)
    threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    endpoint = f"http://127.0.0.1:{proxy.server_port}"
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    }.items():
        monkeypatch.setenv(name, value)
    # An open file system remembers the endpoint that it met first.
    s3fs.S3FileSystem.clear_instance_cache()
    name = f"b{uuid.uuid4().hex[:12]}"
    direct = f"http://{moto_address[0]}:{moto_address[1]}"
    connection = http.client.HTTPConnection(*moto_address, timeout=60)
    connection.request("PUT", f"/{name}")
    assert connection.getresponse().status == 200
    connection.close()
    bucket = Bucket(url=f"s3://{name}", endpoint=endpoint, direct=direct)
    proxy.bucket = bucket
    yield bucket
    proxy.shutdown()
    proxy.server_close()
    s3fs.S3FileSystem.clear_instance_cache()


def stored(bucket: Bucket) -> dict[str, bytes]:
    """All that is in a bucket, asked of the server itself."""
    import boto3

    client = boto3.client("s3", endpoint_url=bucket.direct)
    name = bucket.url.removeprefix("s3://")
    found = {}
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=name):
        for item in page.get("Contents", []):
            found[item["Key"]] = client.get_object(Bucket=name, Key=item["Key"])["Body"].read()
    return found
