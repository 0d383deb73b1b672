import gzip
import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.unit.data_corpus import shards_of, write_parquet, write_parts
from titan_loom.config.job_config import Source
from titan_loom.data.sources import FILES_PER_PART, list_parts
from titan_loom.errors import UserError


def refuse(match, **source):
    with pytest.raises(UserError, match=match) as raised:
        list_parts("web", Source(**source))
    assert "\n" not in str(raised.value)


def write_files(folder, *names, content="x = 1\n"):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)


def entries(folder, form="file"):
    return [entry for part in list_parts("s", Source(path=str(folder), format=form)).parts for entry in part.entries]


def test_a_path_that_does_not_exist(tmp_path):
    refuse(
        r"data\.sources\.web\.path = '.*/nowhere' does not exist.*parquet.*jsonl.*embedded",
        path=str(tmp_path / "nowhere"),
    )
    refuse(r"data\.sources\.web\.path = '' does not exist", path="")
    refuse(r"embedded:cobol' is not known.*embedded:code and embedded:prose", path="embedded:cobol")


@pytest.mark.parametrize("path", ["a" * 5000, "a/" * 5000, "owner/" + "b" * 5000, "~nobody-of-this-name/x"])
def test_a_path_that_cannot_exist(path):
    refuse(r"data\.sources\.web\.path = '.*' does not exist", path=path)


def test_what_is_no_regular_file(tmp_path):
    # Opening a pipe once waited for somebody to write to it.
    os.mkfifo(tmp_path / "pipe.jsonl")
    refuse(r"data\.sources\.web\.path = '.*' is neither a regular file nor a folder", path=str(tmp_path / "pipe.jsonl"))
    refuse(r"holds no usable file", path=str(tmp_path))


def test_a_folder_without_usable_files(tmp_path):
    refuse(r"holds no usable file: allowed are parquet \(\.parquet\), jsonl", path=str(tmp_path))
    write_files(tmp_path, "picture.png", ".hidden/a.py")
    refuse(r"holds no usable file", path=str(tmp_path))
    refuse(r"holds no usable file", path=str(tmp_path / "picture.png"))


def test_a_folder_of_two_kinds_of_tables(tmp_path):
    write_parquet(tmp_path / "a.parquet", ["x"])
    write_files(tmp_path, "b.jsonl", content='{"text": "x"}\n')
    refuse(r"mixes parquet and jsonl", path=str(tmp_path))


def test_a_format_that_needs_other_columns(tmp_path):
    write_parquet(tmp_path / "a.parquet", ["x"])
    refuse(
        r"data\.sources\.web\.format = 'repository' needs the columns .*a\.parquet lacks .*repo_path.* and has text",
        path=str(tmp_path),
        format="repository",
    )
    refuse(r"needs the columns text, but embedded:code lacks text", path="embedded:code")
    write_files(tmp_path / "j", "b.jsonl", content='{"body": "x"}\n')
    refuse(r"b\.jsonl lacks text and has body", path=str(tmp_path / "j"))
    refuse(r"format = 'json' is not known", path=str(tmp_path), format="json")


@pytest.mark.parametrize(
    ("name", "content"), [("a.parquet", b"no"), ("a.jsonl", b"no\n"), ("a.jsonl.gz", b"no"), ("b.jsonl", b"[1]\n")]
)
def test_a_damaged_file(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    refuse(rf"data\.sources\.web: {name} cannot be read: .", path=str(tmp_path))


def test_every_parquet_file_is_looked_at(tmp_path):
    write_parquet(tmp_path / "a.parquet", ["x"] * 50)
    write_parquet(tmp_path / "b.parquet", ["x"] * 50)
    content = (tmp_path / "b.parquet").read_bytes()
    (tmp_path / "b.parquet").write_bytes(content[: len(content) // 2])
    refuse(r"data\.sources\.web: b\.parquet cannot be read: .", path=str(tmp_path))
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "b.parquet")
    refuse(r"b\.parquet lacks text and has body", path=str(tmp_path))


@pytest.mark.parametrize(
    ("form", "row", "column", "kind"),
    [
        ("text", {"text": 5}, "text", "int"),
        ("text", {"text": b"5"}, "text", "binary"),
        ("repository", {"repo_path": "r", "files": [{"file_path": "a", "content": 5}]}, "files.content", "int"),
    ],
)
def test_columns_that_hold_no_text(tmp_path, form, row, column, kind):
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    needs = rf"data\.sources\.web\.format = '{form}' needs texts in the column {column}, but"
    refuse(rf"{needs} a\.parquet has {kind}", path=str(tmp_path), format=form)
    if kind == "int":
        (tmp_path / "b.jsonl").write_text(json.dumps(row))
        refuse(rf"{needs} b\.jsonl has int", path=str(tmp_path / "b.jsonl"), format=form)


def test_texts_of_any_arrow_type_are_texts(tmp_path):
    texts = pa.array(["a", None, "b"])
    for kind in (pa.large_string(), pa.dictionary(pa.int32(), pa.string())):
        pq.write_table(pa.table({"text": texts.cast(kind)}), tmp_path / "a.parquet")
        list_parts("s", Source(path=str(tmp_path)))


def test_parts_are_sorted_and_found_in_subfolders(tmp_path):
    for name in ("b/2.parquet", "b/10.parquet", "a/9.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_parquet(tmp_path / name, ["x"])
    parts = list_parts("s", Source(path=str(tmp_path))).parts
    assert [part.name for part in parts] == ["a/9.parquet", "b/10.parquet", "b/2.parquet"]


def test_a_single_file_is_a_source(tmp_path):
    write_parquet(tmp_path / "a.parquet", ["x"])
    write_parquet(tmp_path / "b.parquet", ["x"])
    (part,) = list_parts("s", Source(path=str(tmp_path / "b.parquet"))).parts
    assert part.name == "b.parquet"


def test_code_folders_leave_out_what_is_not_the_users_text(tmp_path):
    write_files(tmp_path, "a.py", "Makefile", "src/b.rs", "docs/c.md")
    write_files(
        tmp_path, ".git/x.py", "node_modules/y.js", "env/lib/z.py", "__pycache__/w.py", "image.bin", ".hidden.py"
    )
    write_files(tmp_path, "env/pyvenv.cfg")
    assert entries(tmp_path) == ["Makefile", "a.py", "docs/c.md", "src/b.rs"]


def test_tables_beside_text(tmp_path):
    write_files(tmp_path / "code", "a.py", "fixture.jsonl")
    assert entries(tmp_path / "code") == ["a.py"]
    (tmp_path / "data").mkdir()
    write_parquet(tmp_path / "data" / "a.parquet", ["x"])
    write_files(tmp_path / "data", "README.md", "convert.py")
    parts = list_parts("s", Source(path=str(tmp_path / "data")))
    assert (parts.kind, parts.num_ignored) == ("parquet", 2)


def test_many_text_files_are_read_in_runs(tmp_path):
    write_files(tmp_path, *[f"{i:04}.py" for i in range(2 * FILES_PER_PART + 3)])
    parts = list_parts("s", Source(path=str(tmp_path), format="file")).parts
    assert [len(part.entries) for part in parts] == [FILES_PER_PART, FILES_PER_PART, 3]
    assert [entry for part in parts for entry in part.entries] == sorted(path.name for path in tmp_path.iterdir())


def test_digest_changes_with_names_and_sizes(tmp_path):
    write_files(tmp_path, "a.py", "b.py")
    source = Source(path=str(tmp_path), format="file")
    digests = [list_parts("s", source).digest()]
    assert list_parts("s", source).digest() == digests[0]
    (tmp_path / "a.py").write_text("x = 10\n")
    digests.append(list_parts("s", source).digest())
    (tmp_path / "b.py").rename(tmp_path / "c.py")
    digests.append(list_parts("s", source).digest())
    assert len(set(digests)) == 3


@pytest.mark.parametrize("rows", [[10], [10, 0, 1], [100, 1], [7, 8, 9]])
@pytest.mark.parametrize("lanes", [1, 3, 8])
def test_shards_hold_every_row_once_and_every_lane_has_some(tmp_path, rows, lanes):
    write_parts(tmp_path, rows)
    shards = shards_of(tmp_path, lanes)
    found = []
    for shard in shards:
        part = int(shard.part.name[5:7])
        stop = rows[part] if shard.stop is None else shard.stop
        found += [(part, row) for row in range(shard.start, stop)]
    assert sorted(found) == [(part, row) for part, count in enumerate(rows) for row in range(count)]
    if len(rows) < lanes:
        assert len(shards) == min(lanes, sum(rows))
        assert all(shard.start < shard.stop for shard in shards)


def test_split_parts_are_about_even(tmp_path):
    write_parts(tmp_path, [10, 90])
    sizes = [shard.stop - shard.start for shard in shards_of(tmp_path, 10)]
    assert sizes == [10] * 10


def test_jsonl_parts_are_split_by_rows(tmp_path):
    lines = [json.dumps({"text": str(i)}) for i in range(9)]
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress("\n".join([*lines, "", ""]).encode()))
    assert [(shard.start, shard.stop) for shard in shards_of(tmp_path, 2)] == [(0, 4), (4, 9)]
