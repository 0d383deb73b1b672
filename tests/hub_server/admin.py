"""`/admin/...`: what tests in other processes do to a server that runs in one of its own. JSON both ways.

    POST   /admin/faults    {"where": "resolve", "do": "cut", "times": 2}  adds a fault
    DELETE /admin/faults    ends all faults
    GET    /admin/counts    {"tree": 1, ...}  requests by kind
    GET    /admin/requests  every request
    DELETE /admin/requests  forgets them
    POST   /admin/commit    {"repo_id": ..., "folder": ..., "repo_type": "dataset"}  -> {"sha": ...}

These requests are not counted and no fault befalls them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tests.hub_server.messages import HubError, Reply, Request, error_reply, json_reply

if TYPE_CHECKING:
    from tests.hub_server.server import HubServer


def answer(server: HubServer, request: Request) -> Reply:
    match request.method, request.path.removeprefix("/admin/"):
        case "POST", "faults":
            try:
                server.fault(**request.json())
            except (TypeError, ValueError) as error:
                return error_reply(HubError(400, "", str(error)))
            return json_reply({})
        case "DELETE", "faults":
            server.faults.clear()
            return json_reply({})
        case "GET", "counts":
            return json_reply(Counter(record.kind for record in server.requests()))
        case "GET", "requests":
            return json_reply([asdict(record) for record in server.requests()])
        case "DELETE", "requests":
            server.forget_requests()
            return json_reply({})
        case "POST", "commit":
            wanted = request.json()
            files = files_below(Path(wanted["folder"]))
            sha = server.commit(wanted["repo_id"], files, repo_type=wanted.get("repo_type", "dataset"))
            return json_reply({"sha": sha})
        case _:
            return error_reply(HubError(404, "", f"No such endpoint: {request.method} {request.path}"))


def files_below(folder: Path) -> dict[str, Path]:
    """A folder's files by their path in a repository."""
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
