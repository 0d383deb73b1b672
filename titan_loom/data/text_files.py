"""Text files: which files of a folder count, their content, and what language they are in, by suffix or name.

Hidden folders, caches, installed packages and virtual environments are not the user's text and are left out.
"""

import os
from pathlib import Path, PurePosixPath

_SUFFIXES = {
    "Ada": "ada adb ads",
    "Assembly": "asm s",
    "C": "c h",
    "C#": "cs",
    "C++": "cc cpp cxx hh hpp hxx",
    "CMake": "cmake",
    "CSS": "css less scss",
    "Clojure": "clj cljs",
    "Cuda": "cu cuh",
    "D": "d",
    "Dart": "dart",
    "Elixir": "ex exs",
    "Elm": "elm",
    "Erlang": "erl hrl",
    "F#": "fs fsx",
    "Fortran": "f f90 f95 f03",
    "GLSL": "glsl vert frag",
    "Go": "go",
    "GraphQL": "graphql",
    "Groovy": "groovy gradle",
    "HTML": "html htm",
    "Haskell": "hs",
    "INI": "cfg ini",
    "Java": "java",
    "JavaScript": "js jsx mjs cjs",
    "Julia": "jl",
    "Kotlin": "kt kts",
    "Lisp": "el lisp scm rkt",
    "Lua": "lua",
    "Markdown": "md markdown",
    "Nim": "nim",
    "Nix": "nix",
    "OCaml": "ml mli",
    "Objective-C": "m mm",
    "PHP": "php",
    "Pascal": "pas",
    "Perl": "pl pm",
    "PowerShell": "ps1",
    "Protocol Buffer": "proto",
    "Python": "py pyi pyx pxd",
    "R": "r",
    "Ruby": "rb",
    "Rust": "rs",
    "SQL": "sql",
    "Scala": "scala",
    "Shell": "sh bash zsh fish",
    "Solidity": "sol",
    "Svelte": "svelte",
    "Swift": "swift",
    "SystemVerilog": "sv svh",
    "TOML": "toml",
    "TeX": "tex",
    "Text": "txt",
    "TypeScript": "ts tsx",
    "Verilog": "v vh",
    "VHDL": "vhd vhdl",
    "Vue": "vue",
    "YAML": "yaml yml",
    "Zig": "zig",
    "reStructuredText": "rst",
}
_BY_SUFFIX = {f".{suffix}": language for language, suffixes in _SUFFIXES.items() for suffix in suffixes.split()}
_BY_NAME = {"makefile": "Makefile", "dockerfile": "Dockerfile", "cmakelists.txt": "CMake"}

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


def language_of(file_path: str) -> str | None:
    """The language of a file by its name; None when the file is not known to be text."""
    path = PurePosixPath(file_path)
    return _BY_NAME.get(path.name.lower()) or _BY_SUFFIX.get(path.suffix.lower())
