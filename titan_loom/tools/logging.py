"""The one logger of the package, in TorchTitan's format."""

import logging
import os
import sys
from typing import TextIO

logger = logging.getLogger("titan_loom")

FORMAT = "[titan] %(asctime)s - %(name)s - %(levelname)s - %(message)s"


class _StdoutHandler(logging.StreamHandler):
    """Writes to what `sys.stdout` is at the time: a progress bar puts itself in its place."""

    @property
    def stream(self) -> TextIO:
        return sys.stdout

    @stream.setter
    def stream(self, _: TextIO) -> None:
        pass


def init_logger(stream: TextIO | None = None) -> None:
    """Log to `stream` (default: stdout) from INFO on the ranks in LOG_RANK (default: 0), warnings on the others."""
    handler = logging.StreamHandler(stream) if stream is not None else _StdoutHandler()
    handler.setFormatter(logging.Formatter(FORMAT))
    logger.handlers = [handler]
    logger.propagate = False
    is_shown = os.environ.get("RANK", "0") in os.environ.get("LOG_RANK", "0").split(",")
    logger.setLevel(logging.INFO if is_shown else logging.WARNING)
