"""The server as a process of its own: prints its URL on one line, serves until SIGTERM or SIGINT.

    python -m tests.hub_server --folder DIR [--faults '[{"where": "resolve", "do": "cut", "times": 2}]']

DIR holds repositories: `datasets/Owner/name/...` and `models/Owner/name/...`, served from the disk.
"""

import argparse
import json
import signal
from pathlib import Path

from tests.hub_server.admin import files_below
from tests.hub_server.server import HubServer


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.hub_server", description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="holds datasets/Owner/name and models/Owner/name")
    parser.add_argument("--faults", type=json.loads, default=[], help="a JSON list of faults")
    arguments = parser.parse_args()

    # Before any thread: a signal is to wake sigwait below, never one of them.
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    with HubServer() as server:
        for repo_type in ("dataset", "model"):
            for repo in sorted(arguments.folder.glob(f"{repo_type}s/*/*/")):
                server.commit(f"{repo.parent.name}/{repo.name}", files_below(repo), repo_type=repo_type)
        for fault in arguments.faults:
            server.fault(**fault)
        print(server.url, flush=True)
        signal.sigwait(signals)


if __name__ == "__main__":
    main()
