"""How a row becomes documents. A format is a function from a row to document texts, registered under a name.

A format of your own takes a few lines:

    @register_format("chat", columns=("question", "answer"))
    def chat(row):
        yield f"{row['question']}\\n\\n{row['answer']}"

Only the declared columns are read. A format is a pure function of its row: the position in the stream counts documents.
A format may yield a `Document` instead of a text, to say more than its text about it.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from titan_loom.data.text_files import language_of
from titan_loom.errors import UserError

MAX_CONTENT_CHARS = 200_000
"""Longer files are cut into pieces of this many characters, each with the file's header."""

Row = dict[str, Any]


class Document(NamedTuple):
    """A document's text, and what filters and the holdout look at."""

    text: str

    key: str
    """What the holdout hashes. `repository`: the repository, so that none is held out in part; `file`: repository and
    path; other formats: the text, unless they say otherwise."""

    num_chars: int
    """Length of the content, without a header, and whole when `text` is a piece of it."""

    language: str | None

    fields: Row
    """The struct that the document was made from: the row, or the file in it."""


@dataclass(frozen=True)
class Format:
    """`columns` must be there, `optional` ones are read if they are; those in `texts` must hold texts or nulls.
    `files.content` is the field `content` of the structs in column `files`."""

    name: str
    columns: tuple[str, ...]
    optional: tuple[str, ...]
    texts: tuple[str, ...]
    documents: Callable[[Row], Iterable[str | Document]]

    def read(self, row: Row, source: str) -> Iterator[Document]:
        """The documents of `row`. Their texts have a UTF-8 form: lone surrogates, which JSON and names of files may
        hold, become U+FFFD. Raises UserError, which names `source`, when the row lacks a column."""
        try:
            for document in self.documents(row):
                if isinstance(document, str):
                    document = Document(document, document, len(document), row.get("language"), row)
                yield document._replace(text=_valid(document.text))
        except KeyError as error:
            raise UserError(f"{source}: a row lacks the column {error}, which format {self.name!r} needs") from error


FORMATS: dict[str, Format] = {}


def register_format(
    name: str, *, columns: tuple[str, ...], optional: tuple[str, ...] = (), texts: tuple[str, ...] = ()
):
    """Decorator that makes a function from a row to document texts available as `data.sources.<source>.format =
    name`. Rows with anything but a text or null in a column of `texts` are refused with file and row."""

    def register(documents: Callable[[Row], Iterable[str | Document]]):
        FORMATS[name] = Format(name, columns, optional, texts, documents)
        return documents

    return register


def get_format(source_name: str, name: str) -> Format:
    """The format called `name`. Raises UserError with the choices when there is none."""
    if name not in FORMATS:
        choices = ", ".join(sorted(FORMATS))
        raise UserError(f"data.sources.{source_name}.format = {name!r} is not known: the formats are {choices}")
    return FORMATS[name]


@register_format("text", columns=("text",), texts=("text",))
def text_documents(row: Row) -> Iterator[str]:
    """One document a row: column `text`. Blank rows give none."""
    if not _is_blank(row["text"]):
        yield row["text"]


_REPOSITORY_COLUMNS = ("repo_path", "files.file_path", "files.content")


@register_format(
    "repository",
    columns=_REPOSITORY_COLUMNS,
    optional=("files.language", "files.is_vendor"),
    texts=(*_REPOSITORY_COLUMNS, "files.language"),
)
def repository_documents(row: Row) -> Iterator[Document]:
    """A repository's files, in order. Vendored and blank files are skipped."""
    for file in row["files"] or []:
        if not file.get("is_vendor"):
            yield from _file_documents(row["repo_path"], file, key=row["repo_path"])


@register_format(
    "file",
    columns=("file_path", "content"),
    optional=("repo_path", "language"),
    texts=("file_path", "content", "repo_path", "language"),
)
def file_documents(row: Row) -> Iterator[Document]:
    """One file a row."""
    return _file_documents(row.get("repo_path"), row, key=f"{row.get('repo_path') or ''}/{row['file_path'] or ''}")


def _file_documents(repository: str | None, file: Row, key: str | None) -> Iterator[Document]:
    path, content = file.get("file_path"), file.get("content")
    if _is_blank(content):
        return
    language = file.get("language") or language_of(path or "")
    header = f"repository: {repository or 'unknown'}\nfile: {path or 'unknown'}\nlanguage: {language or 'unknown'}\n"
    for start in range(0, len(content), MAX_CONTENT_CHARS):
        text = header + content[start : start + MAX_CONTENT_CHARS]
        yield Document(text, key or text, len(content), language, file)


def _valid(text: str) -> str:
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return re.sub("[\ud800-\udfff]", "\N{REPLACEMENT CHARACTER}", text)


def _is_blank(text: str | None) -> bool:
    return not text or text.isspace()
