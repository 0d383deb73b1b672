"""Leaving in good order: SIGTERM, SIGINT or the launcher's death ask for a stop after the step that is running."""

import os
import signal


class StopRequest:
    """Remembers that this process was asked to stop. A second SIGINT interrupts at once."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._parent = os.getppid()
        signal.signal(signal.SIGTERM, self._handle)
        signal.signal(signal.SIGINT, self._handle)

    def _handle(self, signum: int, frame: object) -> None:
        self.reason = signal.Signals(signum).name
        if signum == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def __bool__(self) -> bool:
        if self.reason is None and os.getppid() != self._parent:
            self.reason = "the launcher's death"
        return self.reason is not None
