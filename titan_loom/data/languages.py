"""Which files of a folder are text worth reading, and what language they are in: by suffix or by name."""

from pathlib import PurePosixPath

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


def language_of(file_path: str) -> str | None:
    """The language of a file by its name; None when the file is not known to be text."""
    path = PurePosixPath(file_path)
    return _BY_NAME.get(path.name.lower()) or _BY_SUFFIX.get(path.suffix.lower())
