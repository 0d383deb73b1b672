"""Worker processes that end with the process that started them, whatever either is doing.

The ways of a pool or a loader to stop a worker wait for what it is doing, and a read may wait for the network.
"""

import os
import threading
from multiprocessing.connection import Connection


def leave_when_closed(lifeline: Connection) -> None:
    """End this process when the other end of `lifeline` is closed, be it by hand or by the death of its owner."""

    def watch() -> None:
        lifeline.poll(None)  # nothing is ever sent
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
