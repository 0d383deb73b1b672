"""What the Hub holds: repositories, each a history of commits that branches and tags point into.

Commits are immutable and their shas follow from their contents and parents, so that a run against one server finds the
same revisions on the next.
"""

import hashlib
import json
import threading
from dataclasses import dataclass, field

from tests.hub_server.messages import Content, HubError


@dataclass(frozen=True)
class Commit:
    sha: str
    title: str
    parent: str | None
    files: dict[str, Content]


@dataclass
class Repo:
    """`gated` repositories show what they hold to everyone, and give it to the Hub's `accepted_token` only."""

    id: str
    repo_type: str
    gated: bool = False
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    commits: dict[str, Commit] = field(default_factory=dict)

    def commit(self, changes: dict[str, Content | None], title: str, branch: str = "main") -> Commit:
        """Adds and replaces files; those given as None go."""
        parent = self.branches.get(branch)
        files = dict(self.commits[parent].files) if parent else {}
        files = {path: content for path, content in sorted((files | changes).items()) if content is not None}
        listing = [(path, content.oid) for path, content in files.items()]
        identity = json.dumps([self.repo_type, self.id, parent, title, listing])
        commit = Commit(hashlib.sha1(identity.encode()).hexdigest(), title, parent, files)
        self.commits[commit.sha] = commit
        self.branches[branch] = commit.sha
        return commit

    def find(self, revision: str) -> Commit:
        """The commit that a branch, a tag or a full sha names."""
        sha = self.branches.get(revision) or self.tags.get(revision) or revision
        if sha not in self.commits:
            raise HubError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return self.commits[sha]

    def history(self, revision: str) -> list[Commit]:
        """Newest first."""
        commits = [self.find(revision)]
        while commits[-1].parent:
            commits.append(self.commits[commits[-1].parent])
        return commits


class Hub:
    """All repositories, by type ("dataset" or "model") and id, and the large files that uploads left for a commit to
    name. Whoever changes something holds `lock`."""

    def __init__(self, accepted_token: str, page_size: int):
        self.accepted_token = accepted_token
        self.page_size = page_size
        self.repos: dict[tuple[str, str], Repo] = {}
        self.large_files: dict[str, Content] = {}
        self.lock = threading.RLock()

    def create(self, repo_type: str, repo_id: str) -> Repo:
        with self.lock:
            repo = self.repos[repo_type, repo_id] = Repo(repo_id, repo_type)
            repo.commit({}, "initial commit")
            return repo

    def find(self, repo_type: str, repo_id: str, token: str | None) -> Repo:
        if repo := self.repos.get((repo_type, repo_id)):
            return repo
        raise self.not_found(token)

    def not_found(self, token: str | None) -> HubError:
        if token is None:
            # The Hub does not tell strangers what exists.
            return HubError(401, "RepoNotFound", "Invalid username or password.")
        return HubError(404, "RepoNotFound", "Repository not found")

    def check_access(self, repo: Repo, token: str | None):
        if repo.gated and token != self.accepted_token:
            status, advice = (403, "ask for access") if token else (401, "log in")
            raise HubError(status, "GatedRepo", f"Access to {repo.repo_type} {repo.id} is restricted: {advice}")
