"""How a source is read in one process: failures that may pass are tried again, within a budget per hour; a read that
lasts is reported while it lasts; the time spent is added up.

Waiting times are random (so that the processes of a run do not come back all at once) but from no generator that
anything else draws from: the order of the data knows nothing of failures.
"""

import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from titan_loom.config.job_config import Streaming
from titan_loom.errors import ReadError
from titan_loom.tools.logging import logger

T = TypeVar("T")

FIRST_WAIT_SECONDS = 1.0
LONGEST_WAIT_SECONDS = 60.0
TRIES_OF_WRONG_ANSWERS = 8
"""An answer that is wrong rather than late mostly stays wrong: a proxy that knows no ranges, a damaged file."""

_random = random.SystemRandom()


@dataclass(eq=False)
class Transient(Exception):
    """A failure that may pass."""

    reason: str
    retry_after: float | None = None
    """Seconds that the server asks to wait."""

    unreachable: bool = False
    """Not even a connection."""

    wrong: bool = False
    """There was an answer, with other content than what was asked for."""

    def __str__(self) -> str:
        return self.reason


class Access:
    """What the readers of source `name` share in this process. Copies, as pickle makes them, count on their own.

    Attributes:
        seconds: spent in `watch` so far.
    """

    def __init__(self, name: str, streaming: Streaming):
        self.name = name
        self.streaming = streaming
        self.seconds = 0.0
        self._failures: deque[float] = deque()

    def attempt(self, part: str, function: Callable[[], T]) -> T:
        """`function()`, called again after each Transient. Raises ReadError, with its last reason, when it fails for
        good."""
        tries = 0
        while True:
            try:
                return function()
            except Transient as error:
                tries += 1
                self.failed(part, error, tries)

    def failed(self, part: str, error: Transient, tries: int) -> None:
        """Count a failure, the `tries`-th of one read in a row, and wait; or raise ReadError."""
        now = time.monotonic()
        self._failures.append(now)
        while self._failures[0] < now - 3600:
            self._failures.popleft()
        budget, count = self.streaming.failures_per_hour, len(self._failures)
        if count > budget:
            raise ReadError(
                self.name,
                part,
                f"{error}; it was failure {count} within an hour, and data.streaming.failures_per_hour is {budget}",
            )
        if error.wrong and tries >= TRIES_OF_WRONG_ANSWERS:
            raise ReadError(self.name, part, f"{error}, {tries} times in a row")
        wait = min(LONGEST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2 ** min(tries - 1, 10)) * _random.uniform(0.5, 1.0)
        if error.retry_after is not None:
            wait = error.retry_after + wait / 4
        logger.warning(
            f"Rank {_rank()}: data.sources.{self.name}, {part}: {error}; trying again in {wait:.1f} s "
            f"(failure {count} of the {budget} that an hour may have)"
        )
        time.sleep(wait)

    @contextmanager
    def watch(self, part: str) -> Iterator[None]:
        """Adds what happens inside to `seconds`, and warns, again and again, when it takes long."""
        started = time.monotonic()
        done = threading.Event()

        def report() -> None:
            while not done.wait(self.streaming.report_seconds):
                waited = time.monotonic() - started
                logger.warning(f"Rank {_rank()}: reading data.sources.{self.name}, {part}, for {waited:.0f} s now")

        threading.Thread(target=report, daemon=True).start()
        try:
            yield
        finally:
            done.set()
            self.seconds += time.monotonic() - started


def first_line(error: Exception) -> str:
    """What `error` says, in a line. The HTTP library quotes a token that is no valid header, which is not passed on."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return "a header is not valid" if "Bearer " in line else line


def _rank() -> str:
    return os.environ.get("RANK", "0")
