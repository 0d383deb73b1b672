"""The part of the Hub's HTTP protocol with which clients create repositories, upload files, commit and tag.

Large files come first (batch, PUT, verify, by the LFS protocol), then one commit that names them by hash and brings the
small ones along. Everything here needs a token, of whatever kind.
"""

import base64
import json

from tests.hub_server.messages import Content, HubError, Reply, Request, json_reply
from tests.hub_server.repos import Hub, Repo
from tests.hub_server.routes import is_large, route

USER = "tester"


def check_write(request: Request):
    if not request.token:
        raise HubError(401, "", "Invalid username or password.")


@route("GET", "/api/whoami-v2", "whoami")
def whoami(hub: Hub, request: Request) -> Reply:
    check_write(request)
    token = {"type": "access_token", "accessToken": {"displayName": "test", "role": "write"}}
    return json_reply({"type": "user", "name": USER, "orgs": [], "auth": token})


@route("POST", "/api/repos/create", "create")
def create(hub: Hub, request: Request) -> Reply:
    check_write(request)
    wanted = request.json()
    repo_type, repo_id = wanted.get("type", "model"), f"{wanted.get('organization') or USER}/{wanted['name']}"
    url = f"{request.origin}/{'datasets/' if repo_type == 'dataset' else ''}{repo_id}"
    with hub.lock:
        if (repo_type, repo_id) in hub.repos:
            return json_reply({"error": f"You already created this {repo_type} repo", "url": url}, 409)
        hub.create(repo_type, repo_id)
    return json_reply({"url": url, "name": repo_id, "id": "0" * 24})


@route("GET", "/api/{types}/{repo}/auth-check/write", "auth-check")
def auth_check(hub: Hub, request: Request, repo: Repo) -> Reply:
    check_write(request)
    return json_reply({})


@route("POST", "/api/validate-yaml", "validate-yaml")
def validate_yaml(hub: Hub, request: Request) -> Reply:
    return json_reply({"errors": [], "warnings": []})


@route("POST", "/api/{types}/{repo}/preupload/{revision}", "preupload")
def preupload(hub: Hub, request: Request, repo: Repo, revision: str) -> Reply:
    check_write(request)
    files = repo.find(revision).files
    return json_reply(
        {
            "files": [
                {
                    "path": path,
                    "uploadMode": "lfs" if is_large(path) else "regular",
                    "shouldIgnore": False,
                    "oid": files[path].oid[:40] if path in files else None,
                }
                for path in (file["path"] for file in request.json()["files"])
            ]
        }
    )


@route("POST", "/{datasets/}{repo}.git/info/lfs/objects/batch", "lfs-batch")
def lfs_batch(hub: Hub, request: Request, repo: Repo) -> Reply:
    """Where to put each file; nothing for those that are there."""
    check_write(request)
    objects = []
    for wanted in request.json()["objects"]:
        answer = {"oid": wanted["oid"], "size": wanted["size"]}
        if wanted["oid"] not in hub.large_files:
            upload, verify = f"{request.origin}/lfs/{wanted['oid']}", f"{request.origin}/lfs-verify"
            answer["actions"] = {"upload": {"href": upload}, "verify": {"href": verify}}
        objects.append(answer)
    return json_reply({"transfer": "basic", "objects": objects})


@route("PUT", "/lfs/{oid}", "lfs-put")
def lfs_put(hub: Hub, request: Request, oid: str) -> Reply:
    content = Content.of(request.body)
    if content.oid != oid:
        raise HubError(400, "", "the bytes received do not have the hash announced")
    with hub.lock:
        hub.large_files[oid] = content
    return json_reply({})


@route("POST", "/lfs-verify", "lfs-verify")
def lfs_verify(hub: Hub, request: Request) -> Reply:
    wanted = request.json()
    content = hub.large_files.get(wanted["oid"])
    if content is None or content.size != wanted["size"]:
        raise HubError(404, "", "the object was not uploaded")
    return json_reply({})


@route("POST", "/api/{types}/{repo}/commit/{revision}", "commit")
def commit(hub: Hub, request: Request, repo: Repo, revision: str) -> Reply:
    """One JSON object a line: a header, then what is added and deleted."""
    check_write(request)
    with hub.lock:
        head = repo.find(revision)
        title, changes = "", {}
        for line in request.body.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            match operation["key"]:
                case "header":
                    title = value["summary"]
                    if value.get("parentCommit", head.sha) != head.sha:
                        raise HubError(412, "", "A commit has happened since. Please refresh and try again.")
                case "file":
                    changes[value["path"]] = Content.of(base64.b64decode(value["content"]))
                case "lfsFile":
                    if value["oid"] not in hub.large_files:
                        raise HubError(400, "", f"{value['path']} points to a file that was not uploaded")
                    changes[value["path"]] = hub.large_files[value["oid"]]
                case "deletedFile":
                    changes[value["path"]] = None
                case "deletedFolder":
                    changes |= {path: None for path in head.files if path.startswith(f"{value['path'].rstrip('/')}/")}
        sha = repo.commit(changes, title, branch=revision).sha
    url = f"{request.origin}/{repo.id}/commit/{sha}"
    return json_reply({"success": True, "commitOid": sha, "commitUrl": url, "hookOutput": ""})


@route("POST", "/api/{types}/{repo}/tag/{revision}", "tag")
def tag(hub: Hub, request: Request, repo: Repo, revision: str) -> Reply:
    check_write(request)
    return _create_ref(hub, repo.tags, request.json()["tag"], repo.find(revision).sha)


@route("DELETE", "/api/{types}/{repo}/tag/{name}", "tag")
def delete_tag(hub: Hub, request: Request, repo: Repo, name: str) -> Reply:
    check_write(request)
    with hub.lock:
        if repo.tags.pop(name, None) is None:
            raise HubError(404, "RevisionNotFound", f"Tag {name} does not exist")
    return json_reply({})


@route("POST", "/api/{types}/{repo}/branch/{name}", "branch")
def branch(hub: Hub, request: Request, repo: Repo, name: str) -> Reply:
    check_write(request)
    start = request.json().get("startingPoint", "main")
    return _create_ref(hub, repo.branches, name, repo.find(start).sha)


def _create_ref(hub: Hub, references: dict[str, str], name: str, sha: str) -> Reply:
    with hub.lock:
        if name in references:
            raise HubError(409, "", f"Reference {name} exists already")
        references[name] = sha
    return json_reply({})
