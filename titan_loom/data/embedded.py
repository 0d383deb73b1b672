"""Real text that every machine has, in the shapes of the large corpora.

`embedded:code`: the running Python's standard library, one row per top-level package or module (stack-v3's shape:
`repo_path`, `files`). `embedded:prose`: the topics of Python's `help()` (fineweb-edu's shape: `text`). Another Python
version is another text. Listing is cheap; files are read when their row is.
"""

import sysconfig
from functools import lru_cache
from pathlib import Path

from titan_loom.data.text_files import read_text

NAMES = ("embedded:code", "embedded:prose")

_SKIPPED_FOLDERS = {"__pycache__", "idle_test", "site-packages", "test", "tests"}
_VENDOR_FOLDERS = {"_vendor", "_bundled"}
# Its one large file is the text of `embedded:prose`: a corpus should not be in another one of the same run.
_SKIPPED_PACKAGES = {"pydoc_data"}


def row_names(name: str) -> tuple[str, ...]:
    """The names of the rows of `embedded:code` (packages) or `embedded:prose` (topics), sorted."""
    return tuple(_packages() if name == "embedded:code" else _topics())


def size(name: str) -> int:
    """Bytes of the text."""
    if name == "embedded:code":
        return sum(path.stat().st_size for files in _packages().values() for path in files)
    return sum(len(text.encode()) for text in _topics().values())


def row(name: str, row_name: str) -> dict:
    """One row, read now."""
    if name == "embedded:prose":
        return {"text": _topics()[row_name]}
    root = _library()
    files = [
        {
            "file_path": path.relative_to(root).as_posix(),
            "content": read_text(path),
            "language": "Python",
            "is_vendor": not _VENDOR_FOLDERS.isdisjoint(path.parts),
        }
        for path in _packages()[row_name]
    ]
    return {"repo_path": row_name, "files": files}


def _library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


@lru_cache
def _packages() -> dict[str, list[Path]]:
    packages = {}
    for entry in sorted(_library().iterdir()):
        if entry.suffix == ".py":
            packages[entry.stem] = [entry]
        elif (entry / "__init__.py").exists() and entry.name not in _SKIPPED_FOLDERS | _SKIPPED_PACKAGES:
            files = sorted(entry.rglob("*.py"))
            packages[entry.name] = [
                path for path in files if _SKIPPED_FOLDERS.isdisjoint(path.parts[len(entry.parts) :])
            ]
    return dict(sorted(packages.items()))


@lru_cache
def _topics() -> dict[str, str]:
    from pydoc_data.topics import topics

    return dict(sorted(topics.items()))
