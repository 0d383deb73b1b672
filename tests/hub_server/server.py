"""The Hub as a server on 127.0.0.1: sockets and threads, the log of requests, and what tests do to it.

Every connection has a thread; `close` ends them all, also those that a fault has put to sleep or whose client hangs.
"""

import contextlib
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

from tests.hub_server import admin, uploads  # noqa: F401  (uploads registers its routes)
from tests.hub_server.faults import Fault, Faults, answer_under, body_under, is_at
from tests.hub_server.messages import Content, Reply, Request
from tests.hub_server.repos import Hub, Repo
from tests.hub_server.routes import find_route


@dataclass
class Record:
    """One request and what became of it. `sent` counts bytes of the body that went out."""

    method: str
    path: str
    kind: str
    range: str | None
    fault: str | None = None
    status: int = 0
    sent: int = 0


class HubServer:
    """Listens from `start` (or the `with`) to `close`; the methods may be called from any thread at any time.

    `accepted_token` opens gated repositories; `page_size` is the number of entries of a tree in one answer.
    """

    def __init__(self, *, accepted_token: str = "hf_accepted", page_size: int = 1000):
        self.hub = Hub(accepted_token, page_size)
        self.faults = Faults()
        self.stopping = threading.Event()
        self._records: list[Record] = []
        self._lock = threading.Lock()
        self._listener = _Listener(self)
        self._thread = threading.Thread(target=self._listener.serve_forever, args=(0.05,), daemon=True)
        self.url = f"http://127.0.0.1:{self._listener.server_address[1]}"

    def start(self) -> Self:
        self._thread.start()
        return self

    def close(self):
        self.stopping.set()
        self._listener.shutdown()
        self._thread.join()
        self._listener.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_):
        self.close()

    def environment(self, folder: Path, token: str = "") -> dict[str, str]:
        """Variables that clients need before they are imported: this server, caches of their own below `folder`, no
        token but the one given, nothing through a proxy."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(folder / "hf"),
            "HF_HUB_CACHE": str(folder / "hf" / "hub"),
            "HF_DATASETS_CACHE": str(folder / "hf" / "datasets"),
            "HF_TOKEN": token,
            "HF_HUB_OFFLINE": "0",
            "HF_DATASETS_OFFLINE": "0",
            # Without it, uploads ask for an endpoint of another protocol.
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_UPDATE_CHECK": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }

    def commit(
        self,
        repo_id: str,
        files: Mapping[str, bytes | str | Path | None],
        *,
        repo_type: str = "dataset",
        branch: str = "main",
    ) -> str:
        """Adds a commit, creating the repository if need be; its sha (40 hex digits).

        A file is bytes or a path on disk, which is served from there; None deletes.
        """
        contents = {path: None if source is None else Content.of(source) for path, source in files.items()}
        with self.hub.lock:
            repo = self.hub.repos.get((repo_type, repo_id)) or self.hub.create(repo_type, repo_id)
            return repo.commit(contents, "test", branch).sha

    def tag(self, repo_id: str, name: str, *, revision: str = "main", repo_type: str = "dataset"):
        """Sets the tag, also where it points elsewhere."""
        with self.hub.lock:
            repo = self.repo(repo_id, repo_type)
            repo.tags[name] = repo.find(revision).sha

    def gate(self, repo_id: str, *, repo_type: str = "dataset"):
        """From now on files are for `accepted_token`: 401 for others without a token, 403 for those with one."""
        self.repo(repo_id, repo_type).gated = True

    def repo(self, repo_id: str, repo_type: str = "dataset") -> Repo:
        return self.hub.repos[repo_type, repo_id]

    def fault(self, where: str, *, do: str, **details: Any) -> Fault:
        """Misbehaves at `where`, a kind or a regular expression for paths; see `faults` for `do` and the details."""
        return self.faults.add(Fault(where=where, do=do, **details))

    def requests(self, where: str = "", *, method: str | None = None) -> list[Record]:
        """The requests so far at `where`, a kind or a regular expression for paths, in order of arrival."""
        with self._lock:
            records = list(self._records)
        return [
            record for record in records if is_at(where, record.kind, record.path) and method in (None, record.method)
        ]

    def count(self, where: str = "", *, method: str | None = None) -> int:
        return len(self.requests(where, method=method))

    def bytes_sent(self, where: str = "") -> int:
        """Bytes of bodies, headers not counted."""
        return sum(record.sent for record in self.requests(where))

    def forget_requests(self):
        with self._lock:
            self._records.clear()

    def record(self, record: Record):
        with self._lock:
            self._records.append(record)

    def pause(self, seconds: float):
        """Sleeps, but not beyond `close`."""
        if self.stopping.wait(seconds):
            raise ConnectionAbortedError("the server is closing")


class _Listener(ThreadingHTTPServer):
    """Knows its connections, so that closing does not wait for clients."""

    request_queue_size = 128

    def __init__(self, owner: HubServer):
        self.owner = owner
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), _Handler)

    def process_request(self, request: socket.socket, client_address):
        thread = threading.Thread(target=self.process_request_thread, args=(request, client_address), daemon=True)
        with self._lock:
            self._connections[request] = thread
        thread.start()

    def shutdown_request(self, request: socket.socket):
        with self._lock:
            self._connections.pop(request, None)
        super().shutdown_request(request)

    def close(self):
        with self._lock:
            connections = dict(self._connections)
            for connection in connections:
                with contextlib.suppress(OSError):  # its client left first
                    connection.shutdown(socket.SHUT_RDWR)
        for thread in connections.values():
            thread.join(10)
            assert not thread.is_alive(), "a connection does not end"
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Headers and body are two packets: with Nagle's algorithm the second waits 40 ms for the first.
    disable_nagle_algorithm = True
    server: _Listener

    def handle(self):
        try:
            super().handle()
        except ConnectionError:
            # The client left, a fault cut the connection or the server is closing.
            self.close_connection = True

    def answer(self):
        request = self._read_request()
        owner = self.server.owner
        kind, route = find_route(request.method, request.path)
        record = Record(request.method, unquote(request.path), kind, request.range)
        if request.path.startswith("/admin/"):
            self._send(admin.answer(owner, request), None, record)
            return
        fault = owner.faults.take(request, kind)
        record.fault = fault and fault.do
        owner.record(record)
        reply = answer_under(fault, request, lambda: route(owner.hub, request), owner.pause)
        self._send(reply, fault, record)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = answer

    def _read_request(self) -> Request:
        url = urlsplit(self.path)
        headers = {name.lower(): value for name, value in self.headers.items()}
        if headers.get("transfer-encoding") == "chunked":
            body = self._read_chunks()
        else:
            size = int(headers.get("content-length", 0))
            body = self.rfile.read(size)
            if len(body) < size:
                raise ConnectionAbortedError("the client left in the middle of its request")
        return Request(self.command, url.path, parse_qs(url.query), headers, body)

    def _read_chunks(self) -> bytes:
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _send(self, reply: Reply, fault: Fault | None, record: Record):
        record.status = reply.status
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(reply.stop - reply.start))
        self.end_headers()
        if self.command == "HEAD":
            return
        for chunk in body_under(fault, reply, self.server.owner.pause):
            record.sent += len(chunk)  # before the client has it, so that it can rely on the count
            self.wfile.write(chunk)

    def log_message(self, *_):
        """Requests are recorded, not printed."""
