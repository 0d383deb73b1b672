import gzip
import json
import re
import subprocess
import sys
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tests.unit.data_corpus import write_parquet
from titan_loom.config.job_config import Source, Streaming
from titan_loom.data import readers
from titan_loom.data.documents import FORMATS
from titan_loom.data.readers import Part, Shard, column_types, count_rows, open_rows
from titan_loom.data.retry import Access
from titan_loom.data.sources import list_parts
from titan_loom.errors import UserError


def file_part(path, kind) -> Part:
    return Part(kind=kind, name=path.name, path=str(path), size=path.stat().st_size)


def rows_of(part, start=0, stop=None, skip=0, columns=("text",)):
    return list(open_rows(Shard(part, start, stop), skip, columns))


@pytest.fixture
def parquet(tmp_path) -> Part:
    write_parquet(tmp_path / "a.parquet", [str(i) for i in range(100)], rows_per_group=30)
    return file_part(tmp_path / "a.parquet", "parquet")


@pytest.fixture
def jsonl(tmp_path) -> Part:
    lines = [json.dumps({"text": str(i), "other": i, "files": [{"content": "c", "size": i}]}) for i in range(50)]
    lines.insert(10, "")
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    return file_part(tmp_path / "a.jsonl", "jsonl")


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_rows_start_and_stop_anywhere(kind, request):
    part = request.getfixturevalue(kind)
    everything = rows_of(part)
    assert [row["text"] for row in everything] == [str(i) for i in range(count_rows(part))]
    for start in (0, 1, 15, 16, 29, 30, 31, 49):
        assert rows_of(part, start) == rows_of(part, 0, None, start) == everything[start:]
        assert rows_of(part, start, start + 20) == everything[start : start + 20]
    assert rows_of(part, 5, 45, 39) == everything[44:45]
    assert rows_of(part, 5, 45, 40) == rows_of(part, len(everything)) == []


def test_only_the_needed_columns_and_fields_are_read(tmp_path):
    files = [[{"path": "a", "content": "x", "size": 1}, {"path": "b", "content": "y", "size": 2}], []]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"repo": ["r", "s"], "files": files, "junk": [1, 2]}), path)
    part = file_part(path, "parquet")
    assert column_types(part).keys() == {"repo", "junk", "files", "files.path", "files.content", "files.size"}
    rows = rows_of(part, columns=("repo", "files.content", "files.missing"))
    assert rows == [{"repo": "r", "files": [{"content": "x"}, {"content": "y"}]}, {"repo": "s", "files": []}]
    assert rows_of(part, columns=("files",))[0]["files"] == files[0]


def test_jsonl_rows_keep_the_needed_columns(jsonl):
    assert rows_of(jsonl, columns=("text", "files.content"))[3].keys() == {"text", "files"}
    assert column_types(jsonl).keys() == {"text", "other", "files", "files.content", "files.size"}


def test_gzipped_jsonl_is_jsonl(tmp_path, jsonl):
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    zipped = file_part(tmp_path / "b.jsonl.gz", "jsonl")
    assert rows_of(zipped) == rows_of(jsonl)
    assert count_rows(zipped) == 50


def test_zst_jsonl_is_jsonl(tmp_path, jsonl):
    (tmp_path / "b.jsonl.zst").write_bytes(pa.compress((tmp_path / "a.jsonl").read_bytes(), "zstd", asbytes=True))
    assert rows_of(file_part(tmp_path / "b.jsonl.zst", "jsonl")) == rows_of(jsonl)
    (tmp_path / "b.jsonl.zst").write_bytes(b"no")
    refuse(file_part(tmp_path / "b.jsonl.zst", "jsonl"), "ZSTD", 0)


def test_a_parquet_start_row_does_not_read_earlier_row_groups(tmp_path, monkeypatch):
    path = tmp_path / "big.parquet"
    texts = [f"{i:06}" + "".join(chr(33 + (i * j) % 90) for j in range(500)) for i in range(2000)]
    pq.write_table(pa.table({"text": texts}), path, row_group_size=100, compression="none", use_dictionary=False)
    spans = []

    class Spy:
        def __init__(self, file):
            self._file = file

        def __getattr__(self, name):
            return getattr(self._file, name)

        def read(self, size=-1):
            spans.append((self._file.tell(), size))
            return self._file.read(size)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self._file.close()

    open_file = readers.open_file
    monkeypatch.setattr(readers, "open_file", lambda part, access: Spy(open_file(part, access)))
    rows = open_rows(Shard(file_part(path, "parquet")), 1850, ("text",))
    assert next(rows)["text"].startswith("001850")
    rows.close()
    footer = path.stat().st_size - 70_000
    data = [(start, size) for start, size in spans if start < footer]
    assert data and min(start for start, _ in data) > path.stat().st_size * 0.85
    assert sum(size for _, size in spans) < path.stat().st_size * 0.3


def refuse(part, reason, row, columns=("text",)):
    with pytest.raises(UserError) as raised:
        list(open_rows(Shard(part), 0, columns, Access("web", Streaming()), texts=columns))
    message = str(raised.value)
    assert re.match(rf"data\.sources\.web: {part.name}, row {row} cannot be read: .*{reason}", message), message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "cut', "the line is no JSON .*line 1 column 14"),
        (b'{"text": "\xff\xfe"}', "the line is no JSON .*can't decode byte 0xff"),
        (b"[" * 100_000, "the line is no JSON .*recursion"),
        (b'["text"]', "must be a JSON object, but is of type list"),
        (b'{"text": 5}', "its text must be a text, but is of type int"),
        (b'{"text": ["a"]}', "its text must be a text, but is of type list"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, reason):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n' * 20 + line + b'\n{"text": "b"}\n')
    refuse(file_part(path, "jsonl"), reason, 20)


def test_lines_that_look_like_dates_are_texts(tmp_path):
    # A reader that guesses types once made datetimes of them.
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "2024-01-01"}\n{"text": "2024-01-02T03:04:05"}\n{"other": 1}\n')
    assert [row["text"] for row in rows_of(file_part(path, "jsonl"))] == ["2024-01-01", "2024-01-02T03:04:05", None]


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"content": ["a"], "file_path": []}, "its lists differ in length"),
        ({"content": "a"}, "its files must be a list of objects"),
        (["a"], "its files must be a list of objects"),
        ([{"content": "a"}, {"content": 1.5}], "its files.content must be a text, but is of type float"),
    ],
)
def test_a_bad_struct_is_named(tmp_path, files, reason):
    (tmp_path / "a.jsonl").write_text(json.dumps({"files": files}))
    refuse(file_part(tmp_path / "a.jsonl", "jsonl"), reason, 0, ("files.content",))


def test_a_damaged_file_is_named(tmp_path, parquet):
    zipped = gzip.compress(b"".join(b'{"text": "%d"}\n' % (i * i) for i in range(9000)))
    (tmp_path / "b.jsonl.gz").write_bytes(zipped[:-9])
    part = file_part(tmp_path / "b.jsonl.gz", "jsonl")
    refuse(part, "Truncated", r"\d+")
    with pytest.raises(UserError, match=r"b\.jsonl\.gz cannot be read: .*Truncated"):
        count_rows(part)
    (tmp_path / "a.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-9])
    refuse(parquet, "Parquet", 0)


class Shared(IterableDataset):
    """The same part in every worker, as lanes that split a part by rows have it."""

    def __init__(self, part: Part):
        self.part = part

    def __iter__(self) -> Iterator[tuple[int, str]]:
        worker = get_worker_info().id
        return (
            (worker, row["text"]) for row in open_rows(Shard(self.part, worker * 10, worker * 10 + 10), 0, ("text",))
        )


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_every_worker_process_can_read_the_same_part(kind, request):
    # A reader that dealt the files of a stream to the workers once gave all but worker 0 nothing.
    items = list(DataLoader(Shared(request.getfixturevalue(kind)), batch_size=None, num_workers=2))
    assert sorted(map(tuple, items)) == sorted((worker, str(worker * 10 + i)) for worker in range(2) for i in range(10))


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_an_interpreter_leaves_in_the_middle_of_a_part(kind, request):
    part = request.getfixturevalue(kind)
    code = (
        "from titan_loom.data.readers import Part, Shard, open_rows\n"
        f"rows = open_rows(Shard({part!r}), 0, ('text',))\n"
        "print(next(rows)['text'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


def test_text_files_are_rows_with_their_name_and_language(tmp_path):
    (tmp_path / "tool" / "src").mkdir(parents=True)
    (tmp_path / "tool" / "src" / "a.py").write_text("x = 1\n")
    (tmp_path / "tool" / "README.md").write_text("# tool\n")
    (tmp_path / "tool" / "blob.txt").write_bytes(b"\xff\xfe\x00")
    (part,) = list_parts("s", Source(path=str(tmp_path / "tool"), format="file")).parts
    readme, blob, code = rows_of(part)
    assert code == {
        "repo_path": "tool",
        "file_path": "src/a.py",
        "language": "Python",
        "content": "x = 1\n",
        "text": "x = 1\n",
    }
    assert readme["language"] == "Markdown"
    assert blob["content"] == "" and list(FORMATS["file"].documents(blob)) == []


def test_embedded_code_has_the_shape_of_repositories():
    (part,) = list_parts("s", Source(path="embedded:code", format="repository")).parts
    assert list(part.entries) == sorted(part.entries)
    assert {"argparse", "asyncio", "json"} <= set(part.entries)
    assert not {"test", "site-packages", "__pycache__", "pydoc_data"} & set(part.entries)
    start = part.entries.index("json")
    (row,) = rows_of(part, start, start + 1)
    assert row["repo_path"] == "json"
    assert [file["file_path"] for file in row["files"]][:2] == ["json/__init__.py", "json/decoder.py"]
    assert all(file.keys() == {"file_path", "content", "language", "is_vendor"} for file in row["files"])
    documents = list(FORMATS["repository"].documents(row))
    assert documents[0].text.startswith("repository: json\nfile: json/__init__.py\nlanguage: Python\n")


def test_embedded_prose_has_the_shape_of_web_text():
    (part,) = list_parts("s", Source(path="embedded:prose")).parts
    rows = rows_of(part)
    assert len(rows) == len(part.entries) > 50
    assert all(row.keys() == {"text"} and len(row["text"]) > 100 for row in rows)


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_struct_of_lists_is_the_list_of_structs_that_it_stands_for(tmp_path, kind):
    files = {"file_path": ["a.py", "b.py"], "content": ["x = 1", "y = 2"], "size": [5, 5]}
    row = {"repo_path": "o/n", "files": files}
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / "part.parquet")
    else:
        (tmp_path / "part.jsonl").write_text(json.dumps(row) + "\n")
    source = Source(path=str(tmp_path), format="repository")
    (part,) = list_parts("s", source).parts
    form = FORMATS["repository"]
    (found,) = open_rows(Shard(part), 0, form.columns + form.optional, texts=form.texts)
    assert [(file["file_path"], file["content"]) for file in found["files"]] == [("a.py", "x = 1"), ("b.py", "y = 2")]
    texts = [document.text for document in form.documents(found)]
    assert [text.splitlines()[-1] for text in texts] == ["x = 1", "y = 2"]
    if kind == "parquet":
        assert "size" not in found["files"][0]
