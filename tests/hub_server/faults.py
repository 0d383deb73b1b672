"""How the server misbehaves. A fault names the requests it befalls, what happens to them, and how often.

    status        an error status instead of an answer (with Retry-After, if given); nothing is done
    missing       404, as if the entry did not exist; nothing is done
    stall         silence for `seconds` before the answer
    stall_body    silence for `seconds` when the share `at` of the body is out
    cut           the connection ends when the share `at` of the body is out
    slow          the body at `bytes_per_second`
    truncate      the file (or answer) ends at the share `at` of its size, consistently in all headers
    ignore_range  status 200 and the whole file, as proxies do that know no ranges
    wrong_bytes   the start of the file in place of the range, with the status, headers and length of the range

Those of the body leave HEAD requests alone, the last two befall requests with a range only.
"""

import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import unquote

from tests.hub_server.messages import HubError, Reply, Request, error_reply, file_reply, json_reply
from tests.hub_server.routes import KINDS

FOREVER = None

_OF_REPLY = ("status", "missing", "stall", "truncate")
_OF_BODY = ("stall_body", "cut", "slow")
_OF_RANGE = ("ignore_range", "wrong_bytes")


@dataclass(kw_only=True)
class Fault:
    """Befalls `times` requests (FOREVER: all) that match, after letting `after` of them pass. ValueError for an unknown
    `do`."""

    where: str
    """A kind ("tree", "resolve" ...) or, if there is no such kind, a regular expression for the unquoted path."""
    do: str
    times: int | None = 1
    after: int = 0
    method: str | None = None
    status: int = 500
    retry_after: int | None = None
    seconds: float = 60.0
    at: float = 0.5
    bytes_per_second: float = 1000.0
    hits: int = field(default=0, init=False)
    """How many requests it has befallen."""

    def __post_init__(self):
        choices = _OF_REPLY + _OF_BODY + _OF_RANGE
        if self.do not in choices:
            raise ValueError(f"do = {self.do!r} is not known: the faults are {', '.join(choices)}")

    def matches(self, request: Request, kind: str) -> bool:
        if self.method not in (None, request.method) or not is_at(self.where, kind, unquote(request.path)):
            return False
        if self.do in _OF_BODY:
            return request.method != "HEAD"
        return self.do not in _OF_RANGE or (request.method != "HEAD" and request.range is not None)


def is_at(where: str, kind: str, path: str) -> bool:
    """Whether `where`, a kind or a regular expression, means this request."""
    return where == kind if where in KINDS else re.search(where, path) is not None


class Faults:
    """All faults of a server, in the order in which they were added: the first that matches befalls a request."""

    def __init__(self):
        self._faults: list[Fault] = []
        self._lock = threading.Lock()

    def add(self, fault: Fault) -> Fault:
        with self._lock:
            self._faults.append(fault)
        return fault

    def clear(self):
        with self._lock:
            self._faults.clear()

    def take(self, request: Request, kind: str) -> Fault | None:
        with self._lock:
            for fault in self._faults:
                if not fault.matches(request, kind):
                    continue
                if fault.after:
                    fault.after -= 1
                elif fault.times is FOREVER or fault.hits < fault.times:
                    fault.hits += 1
                    return fault
        return None


def answer_under(
    fault: Fault | None, request: Request, answer: Callable[[], Reply], pause: Callable[[float], Any]
) -> Reply:
    """The reply that a request gets under a fault: `answer()`, spoiled, or something in its place."""
    match fault.do if fault else None:
        case "status":
            wait = {} if fault.retry_after is None else {"Retry_After": str(fault.retry_after)}
            return json_reply({"error": "injected fault"}, fault.status, **wait)
        case "missing":
            return error_reply(HubError(404, "EntryNotFound", "injected fault: entry not found"))
        case "stall":
            pause(fault.seconds)
    reply = answer()
    return _spoil(fault, request, reply) if fault and reply.status in (200, 206) else reply


def _spoil(fault: Fault, request: Request, reply: Reply) -> Reply:
    headers = {name: text for name, text in reply.headers.items() if name != "Content-Range"}
    match fault.do:
        case "truncate":
            return file_reply(reply.content.head(int(fault.at * reply.content.size)), request.range, headers)
        case "ignore_range":
            return file_reply(reply.content, None, headers)
        case "wrong_bytes":
            return replace(reply, start=0, stop=reply.stop - reply.start)
        case _:
            return reply


def body_under(fault: Fault | None, reply: Reply, pause: Callable[[float], Any]) -> Iterator[bytes]:
    """The body's bytes as a fault lets them out. Raises ConnectionAbortedError where the connection is to end."""
    chunks, start, stop = reply.content.chunks, reply.start, reply.stop
    middle = start + int(fault.at * (stop - start)) if fault else stop
    match fault.do if fault else None:
        case "cut":
            yield from chunks(start, middle)
            raise ConnectionAbortedError("injected fault: cut")
        case "stall_body":
            yield from chunks(start, middle)
            pause(fault.seconds)
            yield from chunks(middle, stop)
        case "slow":
            # Ten pieces a second; a piece has a byte at least, however slow.
            piece = max(1, int(fault.bytes_per_second / 10))
            for position in range(start, stop, piece):
                pause(piece / fault.bytes_per_second)
                yield from chunks(position, min(position + piece, stop))
        case _:
            yield from chunks(start, stop)
