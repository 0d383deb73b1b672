import os

import pytest

from titan_loom.data import documents
from titan_loom.data.documents import FORMATS, MAX_CONTENT_CHARS, get_format, register_format
from titan_loom.data.tokenizer import load_tokenizer
from titan_loom.errors import UserError

FILES = [
    {"file_path": "a.py", "content": "print(1)\n", "language": "Python", "is_vendor": False},
    {"file_path": "vendor/b.js", "content": "x", "language": "JavaScript", "is_vendor": True},
    {"file_path": "blank.py", "content": " \n\t", "language": "Python", "is_vendor": False},
    {"file_path": "null.py", "content": None, "language": "Python", "is_vendor": False},
    {"file_path": "c.rs", "content": "fn main() {}", "language": None, "is_vendor": None},
]
EXPECTED = [
    "repository: me/tool\nfile: a.py\nlanguage: Python\nprint(1)\n",
    "repository: me/tool\nfile: c.rs\nlanguage: Rust\nfn main() {}",
]


def texts(form, row):
    return [document.text for document in FORMATS[form].read(row, "data.sources.s")]


def repository(files):
    return texts("repository", {"repo_path": "me/tool", "files": files})


def test_repository_files_are_adjacent_in_order_without_vendored_and_blank_ones():
    assert repository(FILES) == EXPECTED


def test_a_repository_without_files_gives_nothing():
    assert repository([]) == repository(None) == []


def test_a_file_without_content_or_name_is_one_with_nulls():
    assert repository([{"file_path": "a.py"}]) == []
    assert repository([{"content": "x"}]) == ["repository: me/tool\nfile: unknown\nlanguage: unknown\nx"]


def test_lone_surrogates_do_not_reach_the_tokenizer():
    # A file called b"\xff.py" and "\\ud800" in JSON once ended the run with a TypeError of the tokenizer's.
    row = {"repo_path": None, "file_path": os.fsdecode(b"\xff.py"), "content": "x \ud800 \U0001f600"}
    (text,) = texts("file", row)
    assert text == "repository: unknown\nfile: \ufffd.py\nlanguage: Python\nx \ufffd \U0001f600"
    assert texts("text", {"text": "\udfff"}) == ["\ufffd"]
    load_tokenizer().encode_batch([text])


def test_long_content_is_cut_in_pieces_with_the_header_each():
    content = "".join(chr(97 + i % 26) for i in range(2 * MAX_CONTENT_CHARS + 5))
    pieces = repository([{"file_path": "long.py", "content": content, "language": "Python"}])
    header = "repository: me/tool\nfile: long.py\nlanguage: Python\n"
    assert [len(piece) - len(header) for piece in pieces] == [MAX_CONTENT_CHARS, MAX_CONTENT_CHARS, 5]
    assert all(piece.startswith(header) for piece in pieces)
    assert "".join(piece.removeprefix(header) for piece in pieces) == content


def test_content_of_exactly_the_limit_stays_whole():
    assert len(repository([{"file_path": "x", "content": "y" * MAX_CONTENT_CHARS}])) == 1


def test_text_rows_give_one_document_unless_blank():
    assert [texts("text", {"text": value}) for value in ("hello\n", "", "  ", None)] == [["hello\n"], [], [], []]


def test_file_rows_have_the_header_of_repository_files():
    row = {"repo_path": "me/tool", "file_path": "a.py", "content": "print(1)\n"}
    assert texts("file", row) == EXPECTED[:1]


def test_a_user_adds_a_format(monkeypatch):
    monkeypatch.setattr(documents, "FORMATS", dict(FORMATS))

    @register_format("chat", columns=("question", "answer"))
    def chat(row):
        yield row["question"] + row["answer"]

    form = get_format("talk", "chat")
    assert form.columns == ("question", "answer")
    (document,) = form.read({"question": "a?", "answer": "b"}, "data.sources.s")
    assert (document.text, document.key, document.num_chars) == ("a?b", "a?b", 3)


def test_documents_know_their_key_length_and_language():
    content = "x" * (MAX_CONTENT_CHARS + 1)
    files = [{"file_path": "a.py", "content": content, "language": None}, {"file_path": "b", "content": "y"}]
    documents = list(FORMATS["repository"].read({"repo_path": "me/tool", "files": files}, "data.sources.s"))
    lengths = [len(content), len(content), 1]
    assert [document.num_chars for document in documents] == lengths
    assert {document.key for document in documents} == {"me/tool"}
    assert [document.language for document in documents] == ["Python", "Python", None]
    assert documents[2].fields is files[1]

    row = {"repo_path": "me/tool", "file_path": "b/a.py", "content": "z"}
    (document,) = FORMATS["file"].read(row, "data.sources.s")
    assert (document.key, document.fields) == ("me/tool/b/a.py", row)


def test_an_unknown_format_is_named_with_the_choices():
    with pytest.raises(UserError, match=r"data\.sources\.web\.format = 'txt' .* file, repository, text"):
        get_format("web", "txt")


def test_a_row_without_the_column_is_the_users_mistake():
    with pytest.raises(UserError, match=r"data\.sources\.web: a row lacks the column 'text'.*'text'"):
        list(FORMATS["text"].read({"body": "x"}, "data.sources.web"))
