"""The part of the Hub's HTTP protocol that its clients use to read datasets and models. Uploads are in `uploads`.

A route is a pattern, the kind under which its requests are counted, and a function from a request to a reply. Names in
braces match one path segment, unquoted; `{repo}` matches owner/name and arrives as a `Repo`.
"""

import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlencode

from tests.hub_server.messages import Content, HubError, Reply, Request, error_reply, file_reply, json_reply
from tests.hub_server.repos import Hub, Repo


class Route(NamedTuple):
    methods: tuple[str, ...]
    pattern: re.Pattern
    kind: str
    function: Callable[..., Reply]


ROUTES: list[Route] = []
KINDS = {"unknown"}

_REPO_TYPES = {"datasets": "dataset", "models": "model", "": "model"}
_PLACEHOLDERS = {
    "types": r"(?P<types>datasets|models)",
    "datasets/": r"(?:(?P<types>datasets)/)?",
    "repo": r"(?P<repo>[^/]+/[^/]+?)",
    "*path": r"(?P<path>.*)",
}


def route(methods: str, pattern: str, kind: str):
    """Decorator that registers a function (hub, request, **placeholders) -> Reply."""

    def placeholder(match: re.Match) -> str:
        return _PLACEHOLDERS.get(match[1], rf"(?P<{match[1]}>[^/]+)")

    def register(function: Callable[..., Reply]):
        KINDS.add(kind)
        expression = re.sub(r"\{(.+?)\}", placeholder, pattern.replace(".", r"\."))
        ROUTES.append(Route(tuple(methods.split()), re.compile(expression), kind, function))
        return function

    return register


def find_route(method: str, path: str) -> tuple[str, Callable[[Hub, Request], Reply]]:
    """The kind of a request and what answers it: a function (hub, request) -> Reply, refusals included."""
    for candidate in ROUTES:
        if method in candidate.methods and (match := candidate.pattern.fullmatch(path)):
            return candidate.kind, partial(_call, candidate.function, match)
    return "unknown", _unknown


def _call(function: Callable[..., Reply], match: re.Match, hub: Hub, request: Request) -> Reply:
    arguments = {name: unquote(text or "") for name, text in match.groupdict().items()}
    try:
        if "repo" in arguments:
            repo_type = _REPO_TYPES[arguments.pop("types")]
            arguments["repo"] = hub.find(repo_type, arguments["repo"], request.token)
        return function(hub, request, **arguments)
    except HubError as error:
        return error_reply(error)


def _unknown(hub: Hub, request: Request) -> Reply:
    return error_reply(HubError(404, "", f"No such endpoint: {request.method} {request.path}"))


@route("GET", "/api/{types}/{name}", "info")
@route("GET", "/api/{types}/{name}/revision/{revision}", "revision")
def without_owner(hub: Hub, request: Request, types: str, name: str, revision: str = "") -> Reply:
    """A name alone: no repository here has one."""
    raise hub.not_found(request.token)


@route("GET", "/api/{types}/{repo}", "info")
def info(hub: Hub, request: Request, repo: Repo) -> Reply:
    return revision(hub, request, repo, "main")


@route("GET", "/api/{types}/{repo}/revision/{revision}", "revision")
def revision(hub: Hub, request: Request, repo: Repo, revision: str) -> Reply:
    commit = repo.find(revision)
    return json_reply(
        {
            "_id": commit.sha[:24],
            "id": repo.id,
            "author": repo.id.split("/")[0],
            "sha": commit.sha,
            "private": False,
            "gated": "auto" if repo.gated else False,
            "disabled": False,
            "downloads": 0,
            "likes": 0,
            "tags": [],
            "createdAt": "2026-01-01T00:00:00.000Z",
            "lastModified": "2026-01-01T00:00:00.000Z",
            "siblings": [_sibling(path, content, "blobs" in request.query) for path, content in commit.files.items()],
        }
    )


def _sibling(path: str, content: Content, with_size: bool) -> dict[str, Any]:
    return {"rfilename": path} | ({"size": content.size, "blobId": content.oid[:40]} if with_size else {})


@route("GET", "/api/{types}/{repo}/tree/{revision}", "tree")
@route("GET", "/api/{types}/{repo}/tree/{revision}/{*path}", "tree")
def tree(hub: Hub, request: Request, repo: Repo, revision: str, path: str = "") -> Reply:
    """Files and folders below `path`, in pages that a Link header joins."""
    recursive = request.query.get("recursive", [""])[0].lower() == "true"
    entries = list(_entries(repo.find(revision).files, path.strip("/"), recursive))
    if path and not entries:
        raise HubError(404, "EntryNotFound", f"{path} does not exist on {revision}")
    start = int(request.query.get("cursor", ["0"])[0])
    stop = start + hub.page_size
    if stop >= len(entries):
        return json_reply(entries[start:])
    query = urlencode(request.query | {"cursor": [str(stop)]}, doseq=True)
    return json_reply(entries[start:stop], Link=f'<{request.origin}{request.path}?{query}>; rel="next"')


def _entries(files: dict[str, Content], folder: str, recursive: bool) -> Iterable[dict[str, Any]]:
    prefix = f"{folder}/" if folder else ""
    folders: set[str] = set()
    for path, content in files.items():
        if not path.startswith(prefix):
            continue
        names = path.removeprefix(prefix).split("/")
        for depth in range(1, len(names) if recursive else min(2, len(names))):
            parent = prefix + "/".join(names[:depth])
            if parent not in folders:
                folders.add(parent)
                yield _folder_entry(parent)
        if recursive or len(names) == 1:
            yield _file_entry(path, content)


def _file_entry(path: str, content: Content) -> dict[str, Any]:
    entry = {"type": "file", "path": path, "size": content.size, "oid": content.oid[:40]}
    if is_large(path):
        entry["lfs"] = {"oid": content.oid, "size": content.size, "pointerSize": 134}
    return entry


def _folder_entry(path: str) -> dict[str, Any]:
    return {"type": "directory", "path": path, "size": 0, "oid": "0" * 40}


def is_large(path: str) -> bool:
    """Whether the Hub keeps the file outside of git."""
    return path.endswith((".parquet", ".safetensors", ".bin", ".pt", ".zst", ".gz"))


@route("POST", "/api/{types}/{repo}/paths-info/{revision}", "paths-info")
def paths_info(hub: Hub, request: Request, repo: Repo, revision: str) -> Reply:
    files = repo.find(revision).files
    is_json = "json" in request.headers.get("content-type", "")
    paths = request.json()["paths"] if is_json else parse_qs(request.body.decode()).get("paths", [])
    entries = []
    for path in paths:
        if path in files:
            entries.append(_file_entry(path, files[path]))
        elif any(name.startswith(f"{path.rstrip('/')}/") for name in files):
            entries.append(_folder_entry(path))
    return json_reply(entries)


@route("GET HEAD", "/{datasets/}{repo}/resolve/{revision}/{*path}", "resolve")
def resolve(hub: Hub, request: Request, repo: Repo, revision: str, path: str) -> Reply:
    hub.check_access(repo, request.token)
    commit = repo.find(revision)
    if path not in commit.files:
        raise HubError(404, "EntryNotFound", f"{path} does not exist on {revision}")
    content = commit.files[path]
    headers = {
        "Content-Type": "application/octet-stream",
        "Accept-Ranges": "bytes",
        "ETag": f'"{content.oid}"',
        "X-Repo-Commit": commit.sha,
    }
    return file_reply(content, request.range, headers)


@route("GET", "/api/{types}/{repo}/refs", "refs")
def refs(hub: Hub, request: Request, repo: Repo) -> Reply:
    branches = [_ref(name, f"refs/heads/{name}", sha) for name, sha in repo.branches.items()]
    tags = [_ref(name, f"refs/tags/{name}", sha) for name, sha in repo.tags.items()]
    return json_reply({"branches": branches, "tags": tags, "converts": [], "pullRequests": []})


def _ref(name: str, ref: str, sha: str) -> dict[str, str]:
    return {"name": name, "ref": ref, "targetCommit": sha}


@route("GET", "/api/{types}/{repo}/commits/{revision}", "commits")
def commits(hub: Hub, request: Request, repo: Repo, revision: str) -> Reply:
    date = "2026-01-01T00:00:00.000Z"
    return json_reply(
        [
            {"id": commit.sha, "title": commit.title, "message": "", "date": date, "authors": []}
            for commit in repo.history(revision)
        ]
    )
