"""Datasets on the Hub: a revision resolved to a commit, files listed once, a file read by ranges.

Requests are huggingface_hub's (its session, headers, addresses and errors), but time limits and repetitions are
`retry`'s, and what comes back is checked: a range must be the one asked for, out of a file of the listed size, to the
last byte. (Its own file system takes the first bytes of an answer that ignores the range for the range.)
"""

import io
import json
import re
import time
from collections.abc import Callable, Iterator
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import quote

from fsspec.utils import glob_translate
from huggingface_hub import constants, get_session, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,  # of the HTTP library that this version of huggingface_hub is built on
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.repocard import RepoCard
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

from titan_loom.data.retry import Access, Transient, first_line
from titan_loom.errors import ReadError, UserError

MAX_REQUEST_BYTES = 4 << 20
TRIES_TO_CONNECT = 3
"""Before training begins; later an outage is waited for."""

_OFFLINE = "to train offline, give a local path, embedded:code (format repository) or embedded:prose (format text)"
_OTHER_SPLITS = ("test", "testing", "eval", "evaluation", "valid", "validation", "val", "dev")
_SPLIT_WORDS = {"train": ("train", "training"), "test": _OTHER_SPLITS[:4], "validation": _OTHER_SPLITS[4:]}


class Dataset:
    """Dataset `path` on the Hub, as the user's `key` (`data.sources.<name>`) gives it, at `revision`.

    Raises UserError for what does not exist or may not be read, and when the Hub cannot be reached; ReadError when it
    keeps failing.

    Attributes:
        commit: what `revision` was when this was made, 40 hexadecimal digits.
    """

    def __init__(self, key: str, path: str, revision: str, access: Access):
        self._key = key
        self._path = path
        self._access = access
        self._revision = revision
        url = f"{constants.ENDPOINT}/api/datasets/{path}/revision/{quote(revision, safe='')}"
        self.commit: str = self._get(url, "the revision", json.loads)[0]["sha"]

    def list_files(self, config: str | None, split: str) -> list[tuple[str, int]]:
        """Path and size of each file of a configuration, or of all when the dataset's card names none, sorted."""
        patterns = self._patterns(config, split)
        folder = _common_folder(patterns)
        files = self._tree(folder)
        if patterns is None:
            return _of_split(files, split)
        expressions = [re.compile(glob_translate(pattern)) for pattern in patterns]
        return [file for file in files if any(expression.match(file[0]) for expression in expressions)]

    def _patterns(self, config: str | None, split: str) -> list[str] | None:
        """The patterns of the files of `config`; None when the card has no configurations."""
        configs = {entry["config_name"]: entry for entry in self._card().get("configs", [])}
        if config is not None and config not in configs:
            known = f"the configurations are {', '.join(configs)}" if configs else "its card names no configurations"
            raise UserError(f"{self._key}.config = {config!r} is not in {self._path}: {known}")
        if not configs:
            return None
        if config is None:
            defaults = [name for name, entry in configs.items() if entry.get("default") or name == "default"]
            if not defaults and len(configs) > 1:
                raise UserError(
                    f"{self._key}.config is not set; the configurations of {self._path} are " + ", ".join(configs)
                )
            config = (defaults or list(configs))[0]
        by_split = _patterns_by_split(configs[config])
        if by_split is None:
            return None
        if split not in by_split:
            raise UserError(
                f"{self._key}.split = {split!r} is not in {self._path}: the splits are {', '.join(by_split)}"
            )
        return by_split[split]

    def _card(self) -> dict[str, Any]:
        url = hf_hub_url(self._path, "README.md", repo_type="dataset", revision=self.commit)
        try:
            card, _ = self._get(url, "the card", _card_data, missing_is_error=False)
        except RemoteEntryNotFoundError:
            return {}
        return card

    def _tree(self, folder: str) -> list[tuple[str, int]]:
        url = f"{constants.ENDPOINT}/api/datasets/{self._path}/tree/{self.commit}/{quote(folder)}".rstrip("/")
        url, files = f"{url}?recursive=true&expand=false", []
        while url:
            page, url = self._get(url, "the list of files", json.loads)
            files += [(entry["path"], entry["size"]) for entry in page if entry["type"] == "file"]
        return sorted(files)

    def _get(
        self, url: str, what: str, parse: Callable[[bytes], Any], missing_is_error: bool = True
    ) -> tuple[Any, str | None]:
        """What `parse` makes of the answer, and where its next page is. Says of each error what to do about it."""
        found = f"{self._key}.path = {self._path!r}"
        tries = 0

        def attempt() -> tuple[Any, str | None]:
            nonlocal tries
            try:
                body, next_page = _request(url, self._access)
            except Transient as error:
                tries += 1
                if error.unreachable and tries >= TRIES_TO_CONNECT:
                    raise UserError(
                        f"{found} is no local file or folder, and the Hub at {constants.ENDPOINT} cannot be reached "
                        f"({error}): check the network, or {_OFFLINE}"
                    ) from error
                raise
            try:
                return parse(body), next_page
            except ValueError as error:
                raise Transient(f"the answer cannot be read ({error})", wrong=True) from error

        try:
            return self._access.attempt(f"{what} of {self._path}", attempt)
        except OfflineModeIsEnabled as error:
            raise UserError(f"{found} is on the Hub, but HF_HUB_OFFLINE is set: unset it, or {_OFFLINE}") from error
        except GatedRepoError as error:
            raise UserError(
                f"{found} is gated: accept its terms at {constants.ENDPOINT}/datasets/{self._path} and set HF_TOKEN to "
                "a token of that account"
            ) from error
        except RevisionNotFoundError as error:
            raise UserError(
                f"{self._key}.revision = {self._revision!r} is no branch, tag or commit of {self._path}"
            ) from error
        except (RepositoryNotFoundError, HFValidationError) as error:
            raise UserError(
                f"{found} is no local file or folder, and the Hub shows no dataset of that name: check the spelling, "
                f"or set HF_TOKEN if it is private; {_OFFLINE}"
            ) from error
        except RemoteEntryNotFoundError as error:
            if missing_is_error:
                raise UserError(f"{self._key}: {self._path} has no files in the folder of its configuration") from error
            raise
        except HfHubHTTPError as error:
            raise UserError(f"{found}: the Hub refuses {what} ({first_line(error)}); check HF_TOKEN") from error


def _patterns_by_split(config: dict[str, Any]) -> dict[str, list[str]] | None:
    """`data_files` of a card: a pattern, several, or tables of `split` and `path`; None if there are none."""
    folder = config.get("data_dir")
    data_files = config.get("data_files") or (None if folder is None else "**")
    if data_files is None:
        return None
    if isinstance(data_files, str) or all(isinstance(entry, str) for entry in data_files):
        data_files = [{"split": "train", "path": data_files}]
    prefix = "" if folder is None else f"{folder.strip('/')}/"
    patterns: dict[str, list[str]] = {}
    for entry in data_files:
        paths = [entry["path"]] if isinstance(entry["path"], str) else entry["path"]
        patterns.setdefault(entry["split"], []).extend(prefix + path.removeprefix("./") for path in paths)
    return patterns


def _common_folder(patterns: list[str] | None) -> str:
    """The folder that all matches of `patterns` are in, so that a large repository is listed in part."""
    folders = [re.split(r"[*?\[]", pattern)[0].split("/")[:-1] for pattern in patterns or [""]]
    common = []
    for names in zip(*folders):  # noqa: B905  (the shortest ends it)
        if len(set(names)) > 1:
            break
        common.append(names[0])
    return "/".join(common)


def _of_split(files: list[tuple[str, int]], split: str) -> list[tuple[str, int]]:
    """The files whose path names `split`, or all but those that name another one if none does."""

    def names(path: str, words: tuple[str, ...]) -> bool:
        return not set(words).isdisjoint(re.split(r"[^a-z]+", path.lower()))

    chosen = [file for file in files if names(file[0], _SPLIT_WORDS.get(split, (split,)))]
    return chosen or [file for file in files if split == "train" and not names(file[0], _OTHER_SPLITS)]


class HubFile(io.RawIOBase):
    """A file at a commit, read by ranges: `read` gives exactly the bytes that are there, or raises.

    Args:
        name: for messages.
        url: `hf://datasets/owner/name@commit/path`.
        size: as listed.

    Raises ReadError when the file is missing or forbidden, and when reading keeps failing.
    """

    def __init__(self, name: str, url: str, size: int, access: Access):
        super().__init__()
        repository, _, path = url.removeprefix("hf://datasets/").partition("@")
        commit, _, path = path.partition("/")
        self._url = hf_hub_url(repository, path, repo_type="dataset", revision=commit)
        self._name = name
        self._size = size
        self._access = access
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        stop = self._size if size is None or size < 0 else min(self._position + size, self._size)
        pieces = []
        while self._position < stop:
            pieces.append(self._fetch(self._position, min(stop, self._position + MAX_REQUEST_BYTES)))
            self._position += len(pieces[-1])
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def _fetch(self, start: int, stop: int) -> bytes:
        try:
            found = self._access.attempt(
                self._name, lambda: _request(self._url, self._access, (start, stop, self._size))
            )
        except (HfHubHTTPError, OfflineModeIsEnabled) as error:
            raise ReadError(self._access.name, self._name, first_line(error)) from error
        return found[0]


def _request(url: str, access: Access, span: tuple[int, int, int] | None = None) -> tuple[bytes, str | None]:
    """GET `url`, or of `span` (start, stop, size of the file) the bytes from start to stop: the body, and the address
    of the next page.

    Raises Transient for what may pass, HfHubHTTPError for what will not.
    """
    seconds = access.streaming.read_timeout_seconds
    deadline = time.monotonic() + seconds
    headers = build_hf_headers()
    if span is not None:
        headers |= {"Range": f"bytes={span[0]}-{span[1] - 1}", "Accept-Encoding": "identity"}
    try:
        with get_session().stream("GET", url, headers=headers, timeout=seconds) as response:
            _check_answer(response, span)
            body = b"".join(_chunks(response, deadline))
            next_page = response.links.get("next", {}).get("url")
    except HfHubHTTPError:
        raise
    except HTTPError as error:
        name = type(error).__name__
        raise Transient(f"{name}: {first_line(error)}", unreachable=name == "ConnectError") from error
    if span is not None and len(body) != span[1] - span[0]:
        raise Transient(f"{len(body)} bytes came instead of {span[1] - span[0]}", wrong=True)
    return body, next_page


def _check_answer(response: Any, span: tuple[int, int, int] | None) -> None:
    status, headers = response.status_code, response.headers
    if status in (408, 429) or status >= 500:
        raise Transient(f"status {status}", retry_after=_retry_after(headers.get("retry-after")))
    if status == 416:  # every range that is asked for lies within the listed size
        raise Transient("the answer says that the file is shorter than listed (status 416)", wrong=True)
    if status >= 400:
        response.read()
        hf_raise_for_status(response)
    if span is not None:
        expected, found = f"bytes {span[0]}-{span[1] - 1}/{span[2]}", headers.get("content-range")
        if status != 206 or found != expected:
            raise Transient(f"the answer to a request for {expected} has status {status} and range {found}", wrong=True)


def _card_data(body: bytes) -> dict[str, Any]:
    """The metadata of a dataset's card. Raises ValueError when they have no end: then the card was cut."""
    text = body.decode()
    if not text.startswith("---"):
        return {}
    if "\n---" not in text:
        raise ValueError("its metadata have no end")
    return RepoCard(text, ignore_metadata_errors=True).data.to_dict()


def _chunks(response: Any, deadline: float) -> Iterator[bytes]:
    """The body; gives up when it has taken too long, which the session's time limit between bytes would not."""
    for chunk in response.iter_bytes():
        yield chunk
        if time.monotonic() > deadline:
            raise Transient("the answer takes longer than data.streaming.read_timeout_seconds")


def _retry_after(text: str | None) -> float | None:
    """Seconds, from the seconds or the date of a Retry-After header."""
    if text is None:
        return None
    if text.strip().isdecimal():
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except ValueError:
        return None
