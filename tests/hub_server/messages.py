"""What goes over the wire, without sockets: a request, a reply, and the bytes that a reply sends.

A reply sends the bytes start..stop of a `Content`, be it JSON, a file in memory or a file on disk. So ranges and the
faults that cut, stall or falsify a body are written once, for all of them.
"""

import hashlib
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

_CHUNK = 1 << 18


class HubError(Exception):
    """A refusal. `code` is the header X-Error-Code, from which clients choose the exception that they raise."""

    def __init__(self, status: int, code: str, message: str):
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


@dataclass(frozen=True)
class Content:
    """`size` bytes, in memory or in a file on disk that is read piece by piece. `oid` is 64 hex digits."""

    source: bytes | Path
    size: int
    oid: str

    @classmethod
    def of(cls, source: bytes | str | Path) -> Self:
        if isinstance(source, bytes):
            return cls(source, len(source), hashlib.sha256(source).hexdigest())
        path = Path(source)
        stat = path.stat()
        # The name of the bytes, not their hash: hashing would read whole parts in order to list them.
        identity = f"{path}:{stat.st_size}:{stat.st_mtime_ns}"
        return cls(path, stat.st_size, hashlib.sha256(identity.encode()).hexdigest())

    def head(self, size: int) -> Self:
        """The same file, ending early."""
        return replace(self, size=size)

    def chunks(self, start: int, stop: int) -> Iterator[bytes]:
        in_memory = isinstance(self.source, bytes)
        with io.BytesIO(self.source) if in_memory else open(self.source, "rb") as file:
            file.seek(start)
            while start < stop:
                chunk = file.read(min(_CHUNK, stop - start))
                if not chunk:
                    raise ConnectionAbortedError(f"{self.source} has become shorter")
                start += len(chunk)
                yield chunk


@dataclass(frozen=True)
class Request:
    """`path` is as sent, percent-encoded, without the query; header names are in lower case."""

    method: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    body: bytes = field(default=b"", repr=False)

    @property
    def range(self) -> str | None:
        return self.headers.get("range")

    @property
    def token(self) -> str | None:
        return self.headers.get("authorization", "").removeprefix("Bearer ") or None

    @property
    def origin(self) -> str:
        """The server's URL as the client knows it."""
        return f"http://{self.headers['host']}"

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Reply:
    content: Content
    start: int
    stop: int
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


def json_reply(value: Any, status: int = 200, **headers: str) -> Reply:
    """`headers` are written with underscores: `X_Error_Code`."""
    content = Content.of(json.dumps(value).encode())
    names = {name.replace("_", "-"): text for name, text in headers.items()}
    return Reply(content, 0, content.size, status, {"Content-Type": "application/json"} | names)


def error_reply(error: HubError) -> Reply:
    return json_reply({"error": error.message}, error.status, X_Error_Code=error.code, X_Error_Message=error.message)


def file_reply(content: Content, range_header: str | None, headers: dict[str, str]) -> Reply:
    """The whole content, or with a range 206 and that range, or 416 when it begins behind the end.

    `headers` are the file's own, to which those of the range are added.
    """
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", range_header or "")
    if not match or not any(match.groups()):
        return Reply(content, 0, content.size, 200, headers)
    first, last = match.groups()
    if first:
        start = int(first)
        stop = min(content.size, int(last) + 1) if last else content.size
    else:
        start, stop = max(0, content.size - int(last)), content.size
    if start >= stop:
        return Reply(content, 0, 0, 416, headers | {"Content-Range": f"bytes */{content.size}"})
    return Reply(content, start, stop, 206, headers | {"Content-Range": f"bytes {start}-{stop - 1}/{content.size}"})
