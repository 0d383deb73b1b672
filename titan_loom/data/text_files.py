"""Folders of text files: which files count, and their content.

Hidden folders, caches, installed packages and virtual environments are not the user's text and are left out.
"""

import os
from pathlib import Path

_SKIPPED_FOLDERS = {"__pycache__", "node_modules", "site-packages"}


def list_files(root: Path) -> list[str]:
    """Paths of all visible files below `root`, relative, with `/`, sorted."""
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if _is_visible(Path(folder, name))]
        relative = Path(folder).relative_to(root)
        found += [(relative / name).as_posix() for name in names if not name.startswith(".")]
    return sorted(path for path in found if (root / path).is_file())


def _is_visible(folder: Path) -> bool:
    is_virtualenv = (folder / "pyvenv.cfg").exists()
    return not (folder.name.startswith(".") or folder.name in _SKIPPED_FOLDERS or is_virtualenv)


def read_text(path: Path) -> str:
    """The content of a text file; "" (which no format turns into a document) when it is binary or not UTF-8.

    A file is never left out: rows are counted by listing, so an unreadable one must still be a row.
    """
    try:
        content = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return ""
    return "" if "\0" in content else content
