"""The repository of a run on the Hub: whether it may be written to, what was pushed to it, what is to be taken from it.

Requests are huggingface_hub's, which reads the token by itself; nothing here passes one on. It repeats few requests and
waits for an answer without end, so both are seen to here.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from huggingface_hub import HfApi, constants, get_session, hf_hub_url, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HTTPError,  # of the HTTP library that this version of huggingface_hub is built on
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
)
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

from titan_loom.data.retry import first_line
from titan_loom.errors import RunError, UserError

T = TypeVar("T")

TRIES = 3
"""Before training begins; later an outage is waited for."""

METADATA = "training_metadata.json"
TAG_PREFIX = "checkpoint-"
OF_EVERY_REPOSITORY = (".gitattributes", "README.md")


class Repository:
    """`repo_id` as it is on the Hub. What a method raises is huggingface_hub's.

    Args:
        timeout_seconds: silence after which a request has failed.
    """

    def __init__(self, repo_id: str, timeout_seconds: float):
        self.repo_id = repo_id
        self.api = HfApi()
        self._timeout_seconds = timeout_seconds
        self.limit_time()

    def limit_time(self) -> None:
        """Again before each try: huggingface_hub makes itself a new client now and then."""
        get_session().timeout = self._timeout_seconds

    def files(self, revision: str = "main") -> tuple[str, list[str]]:
        """The commit that `revision` is, and the paths of its files."""
        # Not to be told how long to wait means for ever here, whatever the client says.
        found = self.api.model_info(self.repo_id, revision=revision, timeout=self._timeout_seconds)
        return found.sha, [file.rfilename for file in found.siblings]

    def read_json(self, path: str, revision: str = "main") -> dict[str, Any]:
        """Raises EntryNotFoundError when there is no file at `path`."""
        response = get_session().get(hf_hub_url(self.repo_id, path, revision=revision), headers=build_hf_headers())
        hf_raise_for_status(response)
        return json.loads(response.content)

    def run_id(self) -> str | None:
        """The run whose steps are in the repository; None when it is empty, "" when what it holds is no run's."""
        try:
            return self.read_json(METADATA).get("run_id") or ""
        except EntryNotFoundError:
            return "" if set(self.files()[1]) - set(OF_EVERY_REPOSITORY) else None

    def download(self, revision: str, patterns: list[str], folder: Path) -> None:
        """Put the files of `revision` that match into `folder`."""
        snapshot_download(self.repo_id, revision=revision, allow_patterns=patterns, local_dir=folder)

    def commits(self) -> dict[str, str]:
        """The titles of all commits by their ids, the newest first."""
        return {commit.commit_id: commit.title for commit in self.api.list_repo_commits(self.repo_id)}

    def tags(self) -> dict[str, str]:
        """The commits of the tags that milestones get."""
        tags = self.api.list_repo_refs(self.repo_id).tags
        return {tag.name: tag.target_commit for tag in tags if tag.name.startswith(TAG_PREFIX)}

    def tag(self, name: str, commit: str) -> None:
        """Make the tag; one that points elsewhere, as after a run was extended, is moved."""
        found = self.tags().get(name)
        if found == commit:
            return
        if found is not None:
            self.api.delete_tag(self.repo_id, tag=name)
        self.api.create_tag(self.repo_id, tag=name, revision=commit)


def open_to_push(repository: Repository, private: bool) -> None:
    """Make the repository unless it is there, and make sure that it can be written to. Raises as `ask`."""
    name, api = repository.repo_id, repository.api
    write = f"{constants.ENDPOINT}/api/models/{quote(name)}/auth-check/write"
    for request in (
        api.whoami,
        lambda: api.create_repo(name, private=private, exist_ok=True),
        lambda: hf_raise_for_status(get_session().get(write, headers=build_hf_headers())),
    ):
        ask(_found(name), repository, request)


def check_owner(repository: Repository, run_id: str, overwrite: bool) -> None:
    """Raises UserError when the repository holds anything but the steps of this run; otherwise as `ask`."""
    holder = ask(_found(repository.repo_id), repository, repository.run_id)
    if holder not in (None, run_id) and not overwrite:
        what = "the steps of another run" if holder else "files that no run has pushed"
        raise UserError(
            f"{_found(repository.repo_id)}, which holds {what}: choose another repository, continue that run with "
            "hub.resume, or set hub.overwrite to replace what is there"
        )


def _found(repo_id: str) -> str:
    return f"hub.repo_id is {repo_id!r}"


def ask(found: str, repository: Repository, function: Callable[[], T]) -> T:
    """`function()`, tried again when the Hub does not answer.

    Args:
        found: the key and its value, for the messages.

    Raises:
        UserError: there is no token, or the Hub refuses.
        RunError: the Hub keeps failing, so that nobody knows what is there.
    """
    for tries in range(1, TRIES + 1):
        try:
            repository.limit_time()
            return function()
        except LocalTokenNotFoundError as error:
            raise UserError(f"{found}, but there is no token: set HF_TOKEN or run `hf auth login`") from error
        except OfflineModeIsEnabled as error:
            raise UserError(f"{found}, but HF_HUB_OFFLINE is set: unset it") from error
        except (HTTPError, ValueError, OSError) as error:  # an answer that is no JSON is a ValueError
            status = error.response.status_code if isinstance(error, HfHubHTTPError) else 0
            if 400 <= status < 500 and status not in (408, 429):
                raise UserError(
                    f"{found}, but the Hub refuses ({reason(error)}): check the name, and that the token of HF_TOKEN "
                    "or `hf auth login` may read and, to push, write it"
                ) from error
            if tries == TRIES:
                raise RunError(
                    f"{found}, but the Hub at {constants.ENDPOINT} does not answer ({reason(error)}); nothing was "
                    "changed, start again when it does"
                ) from error
        time.sleep(2.0 ** (tries - 1))
    raise AssertionError


def reason(error: Exception) -> str:
    """In one line, what went wrong with a request, without the secrets that an address may hold."""
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        return f"status {error.response.status_code} of {error.response.request.url.path}"
    return f"{type(error).__name__}: {first_line(error)}"
