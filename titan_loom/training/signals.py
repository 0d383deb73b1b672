"""Leaving in good order: SIGTERM, SIGINT or the launcher's death ask for a stop after the step that is running."""

import atexit
import ctypes
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def leave_with_launcher() -> None:
    """Have SIGTERM sent to this process when the launcher dies (Linux only), and leave if it is dead already.

    From the first moment on: while it joins the others, a worker would wait for minutes to be told.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.environ.get("LAUNCHER_PID", str(os.getppid())) != str(os.getppid()):
        sys.exit(1)


def run_and_exit(main: Callable[[], int]) -> NoReturn:
    """`sys.exit(main())`, but the process ends with the interpreter standing, after what is registered with `atexit`.

    A thread that needs an interpreter which is going down aborts the process: one of gloo's that is late in freeing the
    tensors of the last collective, one that is left behind in the middle of a read.
    """
    status = 1  # of an exception that nobody catches

    def leave() -> None:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)

    atexit.register(leave)  # before libraries register theirs: the first is called last
    try:
        status = main()
    except SystemExit as stop:
        status = stop.code
        raise
    sys.exit(status)


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
