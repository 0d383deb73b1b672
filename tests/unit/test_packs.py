import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from tests.hub_server import fineweb_parts
from tests.unit.data_corpus import TOKENIZER, read, write_corpus, write_parquet
from titan_loom import cli
from titan_loom.config import Data, JobConfig, Model, Source, Training
from titan_loom.config.job_config import Streaming
from titan_loom.data import packing
from titan_loom.data.filters import Holdout
from titan_loom.data.loader import data_fingerprint
from titan_loom.data.packing import make_packs, merge, pack
from titan_loom.data.packs import check_pack, is_pack, open_pack, verify
from titan_loom.data.retry import Access
from titan_loom.data.rows import Order
from titan_loom.data.source_reader import SourceReader
from titan_loom.data.sources import list_parts
from titan_loom.data.tokenizer import EOS_ID, Tokenizer, load_tokenizer
from titan_loom.data.tokens import read_pack
from titan_loom.data.train_tokenizer import train
from titan_loom.errors import UserError


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder)
    return folder


def config_of(corpus, **keys) -> JobConfig:
    sources = {
        "code": Source(path=str(corpus / "code"), format="repository", **keys),
        "prose": Source(path=str(corpus / "prose")),
    }
    return JobConfig(data=Data(sources=sources))


@pytest.fixture(scope="module")
def packs(corpus):
    return {name: pack(config_of(corpus), name, corpus / f"{name}.pack", workers=1) for name in ("code", "prose")}


def files_of(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.suffix == ".bin"}


def texts_of(pack):
    tokens, starts = pack.array("tokens"), pack.array("starts")
    documents = [tokens[start:stop] for start, stop in pairwise(starts)]
    assert all(document[-1] == EOS_ID for document in documents)
    return [TOKENIZER.decode(document[:-1]) for document in documents]


def stream(pack, lane=0, lanes=1, seed=0, state=None, holdout=None):
    source = SourceReader("s", Source(path=pack.path), Access("s", Streaming()), holdout=holdout, pack=pack)
    return read_pack(source, Order(seed=seed, lanes=lanes, window=1, open_parts=1), lane, state)


def epoch_of(stream, epoch=0):
    """Token counts and texts of an epoch, in order."""
    found = []
    for document in stream:
        if document.row_state[0] > epoch:
            return found
        if document.row_state[0] == epoch:
            found.append(TOKENIZER.decode(document.tokens))


def test_a_pack_holds_the_documents_in_order_whole_and_ended(packs, corpus):
    from titan_loom.data.documents import FORMATS
    from titan_loom.data.readers import Shard, open_rows

    source = config_of(corpus).data.sources["code"]
    form = FORMATS["repository"]
    expected = [
        document.text
        for part in list_parts("code", source).parts
        for row in open_rows(Shard(part), 0, form.columns + form.optional)
        for document in form.read(row, "code")
    ]
    found = packs["code"]
    assert texts_of(found) == expected
    assert found.dtype == "<u2" and found.num_documents == len(expected)
    assert found.num_tokens == len(found.array("tokens")) == found.array("starts")[-1]
    assert sorted(os.listdir(found.path)) == ["metadata.json", "points.bin", "starts.bin", "tokens.bin"]


def test_a_pack_does_not_depend_on_the_number_of_workers(packs, corpus, tmp_path):
    pack(config_of(corpus), "code", tmp_path / "pack", workers=3)
    assert files_of(tmp_path / "pack") == files_of(corpus / "code.pack")
    assert open_pack("p", str(tmp_path / "pack")).sha256 == packs["code"].sha256


def test_an_unfinished_pack_goes_on_with_what_is_there(packs, corpus, tmp_path, monkeypatch):
    made = []

    def make_some(job, shards, workers):
        for number in range(0, len(shards), 3):
            packing.make_part(job, number, shards[number])
            made.append(number)
        (job.folder / "000001.tokens").write_bytes(b"half a part")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(packing, "_make_parts", make_some)
        with pytest.raises(KeyboardInterrupt):
            pack(config_of(corpus), "code", tmp_path / "pack", workers=1)
    assert made and not is_pack(str(tmp_path / "pack"))
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "pack" / "parts").glob("*.json")}
    with monkeypatch.context() as patch:
        patch.setattr(packing.shutil, "rmtree", lambda folder: None)
        pack(config_of(corpus), "code", tmp_path / "pack", workers=1)
    assert all(file.stat().st_mtime_ns == time for file, time in before.items())
    assert files_of(tmp_path / "pack") == files_of(corpus / "code.pack")
    # Once more: nothing to do but to tidy up.
    pack(config_of(corpus), "code", tmp_path / "pack", workers=1)
    assert not (tmp_path / "pack" / "parts").exists()


def test_a_killed_pack_goes_on_and_leaves_no_process(tmp_path):
    for part in range(3):
        write_parquet(tmp_path / f"{part}.parquet", [f"{part} {i} " + "some words " * 3000 for i in range(120)])
    (tmp_path / "c.toml").write_text(f'[data.sources.s]\npath = "{tmp_path}"\n')
    command = [sys.executable, "-m", "titan_loom.cli", "pack", "--job.config_file", str(tmp_path / "c.toml")]
    command += ["--workers", "2", "--out"]
    process = subprocess.Popen([*command, tmp_path / "pack"], stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 50
    while len(list((tmp_path / "pack" / "parts").glob("*.json"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert not is_pack(str(tmp_path / "pack"))
    while members(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not members(process.pid)
    kept = len(list((tmp_path / "pack" / "parts").glob("*.json")))
    done = subprocess.run([*command, tmp_path / "pack"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"{kept} of 32 parts are there already" in done.stderr
    assert len(texts_of(open_pack("p", str(tmp_path / "pack")))) == 360
    assert "360 documents" in done.stdout


def members(session: int) -> list[str]:
    """Processes of a session that are running."""
    found = []
    for stat in os.listdir("/proc"):
        try:
            fields = open(f"/proc/{stat}/stat").read().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(stat)
    return found


def test_filters_apply_when_packing_and_are_counted(packs, corpus, tmp_path):
    found = pack(config_of(corpus, min_chars=700), "code", tmp_path / "pack", workers=1)
    (origin,) = found.origin
    assert origin["filtered"]["min_chars"] == packs["code"].num_documents - found.num_documents > 0
    with pytest.raises(UserError, match=r"data\.sources\.s\.path = .* is a pack, whose documents cannot be filtered"):
        list_parts("s", Source(path=found.path, min_chars=3))


def with_pack(config, name, folder, **changes) -> JobConfig:
    source = replace(config.data.sources[name], pack=str(folder), **changes)
    return replace(config, data=replace(config.data, sources={name: source}))


def test_a_source_with_a_pack_is_packed_once_and_read_from_it(packs, corpus, tmp_path):
    config = with_pack(config_of(corpus, min_chars=700), "code", tmp_path / "deeper" / "pack")
    with pytest.raises(UserError, match=r"data\.sources\.code\.pack = .* is no pack"):
        list_parts("code", config.data.sources["code"])
    make_packs(config)
    before = (tmp_path / "deeper" / "pack" / "metadata.json").stat().st_mtime_ns
    make_packs(config)
    assert (tmp_path / "deeper" / "pack" / "metadata.json").stat().st_mtime_ns == before
    by_path = Data(lanes=2, sources={"code": Source(path=config.data.sources["code"].pack)})
    assert read(replace(config.data, lanes=2), 3) == read(by_path, 3)
    assert read(by_path, 3)[0] != read(replace(by_path, sources={"code": Source(path=packs["code"].path)}), 3)[0]


def test_a_pack_of_something_else_is_refused_before_a_run(packs, corpus, tmp_path):
    make_packs(with_pack(config_of(corpus), "prose", packs["prose"].path))
    code = {"path": str(corpus / "code"), "format": "repository"}
    for changes, differ in [({"min_chars": 3}, "min_chars"), (code, "path, format, parts")]:
        sentence = rf"data\.sources\.prose\.pack is .*, which is a pack of something else \({differ} differ\)"
        with pytest.raises(UserError, match=sentence):
            make_packs(with_pack(config_of(corpus), "prose", packs["prose"].path, **changes))
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"data\.sources\.prose\.pack is .*; it must be a folder that can be written"):
        make_packs(with_pack(config_of(corpus), "prose", tmp_path / "file" / "pack"))


def test_a_packed_dataset_is_asked_for_once(hub, tmp_path, monkeypatch):
    def make_parts(job, shards, workers):
        for number, shard in enumerate(shards):
            packing.make_part(job, number, shard)

    hub.commit("Owner/corpus", fineweb_parts(2, 6, seed=0, row_group_size=4))
    monkeypatch.setattr(packing, "_make_parts", make_parts)
    config = with_pack(JobConfig(data=Data(sources={"s": Source(path="Owner/corpus")})), "s", tmp_path / "pack")
    make_packs(config)
    assert open_pack("p", str(tmp_path / "pack")).num_documents == 12
    hub.forget_requests()
    make_packs(config)
    data_fingerprint(config.data, Training(), 0, TOKENIZER)
    assert not hub.requests()
    with pytest.raises(UserError, match=r"is a pack of something else \(revision differ\)"):
        make_packs(with_pack(config, "s", tmp_path / "pack", revision="other"))


@pytest.mark.parametrize("lanes", [1, 2, 7, 60])
def test_every_document_comes_once_an_epoch_in_a_new_order(packs, lanes):
    expected = Counter(text + "<|eos|>" for text in texts_of(packs["prose"]))
    assert 7 < expected.total() < 60
    orders = [[epoch_of(stream(packs["prose"], lane, lanes), epoch) for lane in range(lanes)] for epoch in (0, 1)]
    for order in orders:
        assert Counter(text for lane in order for text in lane) == expected
    assert orders[0] != orders[1]
    assert orders[0] != [epoch_of(stream(packs["prose"], lane, lanes, seed=1)) for lane in range(lanes)]


def test_a_pack_stream_goes_on_from_any_state(packs):
    reference = stream(packs["prose"], 1, 2)
    expected = [next(reference) for _ in range(packs["prose"].num_documents + 5)]
    for start in range(0, len(expected) - 3, 4):
        again = stream(packs["prose"], 1, 2, state=json.loads(json.dumps(expected[start].row_state)))
        for document in expected[start : start + 3]:
            found = next(again)
            assert found.row_state == document.row_state
            np.testing.assert_array_equal(found.tokens, document.tokens)


@pytest.mark.parametrize("packing", ["stream", "first_fit"])
def test_packs_train_in_the_same_lanes_and_resume_exactly(packs, packing):
    # A packed source beside a packed one; stops in documents, at their ends and behind an epoch's end.
    data = Data(
        lanes=4,
        packing=packing,
        sources={
            "code": Source(path=packs["code"].path, share=0.75),
            "prose": Source(path=packs["prose"].path, share=0.25),
        },
    )
    expected, _ = read(data, 30)
    assert len(set(expected)) == 30
    for first in range(1, 26, 3):
        _, states = read(data, first, degree=1 + first % 2)
        second, states = read(data, 2, degree=4, start_step=first, lane_states=states)
        third, _ = read(data, 2, workers=first % 3, start_step=first + 2, lane_states=states)
        assert second + third == expected[first : first + 4], first


def test_merged_packs_hold_the_documents_of_both(packs, tmp_path):
    both = merge([packs["code"], packs["prose"]], tmp_path / "both")
    assert texts_of(both) == texts_of(packs["code"]) + texts_of(packs["prose"])
    points = [packs[name].array("points") for name in ("code", "prose")]
    np.testing.assert_array_equal(both.array("points"), np.concatenate(points))
    assert [entry["path"] for entry in both.origin] == [packs[name].origin[0]["path"] for name in ("code", "prose")]
    verify(open_pack("p", both.path))


def copy_of(pack, folder):
    shutil.copytree(pack.path, folder)
    return folder


@pytest.mark.parametrize("name", ["tokens.bin", "starts.bin", "points.bin"])
def test_a_changed_byte_is_found_by_verify_and_merge(packs, tmp_path, name):
    folder = copy_of(packs["prose"], tmp_path / "copy")
    with open(folder / name, "r+b") as file:
        file.seek(11)
        byte = file.read(1)
        file.seek(11)
        file.write(bytes([byte[0] ^ 1]))
    changed = open_pack("p", str(folder))
    with pytest.raises(UserError, match=f"is damaged: the checksum of {name}"):
        verify(changed)
    with pytest.raises(UserError, match="is damaged"):
        merge([packs["code"], changed], tmp_path / "both")
    assert not (tmp_path / "both").exists()
    assert cli.main(["pack", "verify", packs["prose"].path]) == 0
    assert cli.main(["pack", "verify", str(folder)]) == 2


def test_a_pack_of_another_size_or_version_is_refused_at_start(packs, tmp_path):
    folder = copy_of(packs["prose"], tmp_path / "copy")
    metadata = (folder / "metadata.json").read_text()
    (folder / "metadata.json").write_text(metadata.replace("titan_loom pack 1", "titan_loom pack 9"))
    with pytest.raises(UserError, match=r"data\.sources\.s\.path = .* is in format 'titan_loom pack 9'"):
        list_parts("s", Source(path=str(folder)))
    (folder / "metadata.json").write_text(metadata)
    os.truncate(folder / "tokens.bin", 100)
    with pytest.raises(UserError, match=r"data\.sources\.s\.path = .*: tokens\.bin has 100 bytes but must have"):
        list_parts("s", Source(path=str(folder)))
    (folder / "tokens.bin").unlink()
    with pytest.raises(UserError, match=r"tokens\.bin is missing but must have"):
        list_parts("s", Source(path=str(folder)))


@pytest.fixture(scope="module")
def other_tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "tokenizer.json").write_text(train(iter(["some text"] * 9 + ["and more of it"]), 260).to_str())
    return folder


def test_a_pack_of_another_tokenizer_is_refused_at_start(packs, other_tokenizer, corpus, tmp_path):
    other = load_tokenizer(str(other_tokenizer))
    data = Data(lanes=2, sources={"s": Source(path=packs["prose"].path)})
    data_fingerprint(data, Training(), 0, TOKENIZER)
    with pytest.raises(UserError, match=r"data\.sources\.s\.path = .* was packed with another tokenizer .*8,192"):
        data_fingerprint(data, Training(), 0, other)
    config = replace(config_of(corpus), model=Model(tokenizer_path=str(other_tokenizer)))
    mine = pack(config, "prose", tmp_path / "pack", workers=1)
    check_pack("p", mine, other)
    with pytest.raises(UserError, match="are of two tokenizers"):
        merge([packs["prose"], mine], tmp_path / "both")


def test_tokens_take_four_bytes_when_the_vocabulary_needs_them(packs, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(Tokenizer, "__reduce__", lambda self: (load_tokenizer, ()))
    wide = load_tokenizer()
    wide.vocab_size = (1 << 16) + 1
    monkeypatch.setattr(packing, "load_tokenizer", lambda path: wide)
    made = pack(config_of(corpus), "prose", tmp_path / "pack", workers=1)
    assert made.dtype == "<u4"
    np.testing.assert_array_equal(made.array("tokens"), open_pack("p", str(corpus / "prose.pack")).array("tokens"))
    data = Data(lanes=1, sources={"s": Source(path=made.path)})
    assert read(data, 2)[0] == read(replace(data, sources={"s": Source(path=str(corpus / "prose.pack"))}), 2)[0]


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--source", "cod", "--out", "new"], "--source is 'cod'; it must be one of [data.sources]: code, prose"),
        (["--out", "new"], "--source is not set; it must be one of [data.sources]: code, prose"),
        (["--source", "code"], "--out is not set; it must be the folder of the new pack"),
        (["--source", "code", "--out", "prose.pack"], "--out is 'prose.pack', which is a pack of something else"),
        (["--source", "code", "--out", "code"], "--out is 'code', which is not empty: name a new folder"),
        (["merge", "--out", "new"], "titan-loom pack merge names no pack"),
        (["verify", "code"], "pack = 'code' is no pack: it must be a folder that `titan-loom pack` has finished"),
        (["mix", "code", "--out", "new"], "titan-loom pack 'mix': it must be merge, verify or the options"),
        (["--source", "code", "--out", "new", "--data.sources.code.path", "code.pack"], "is a pack already"),
    ],
)
def test_a_mistake_is_one_sentence(packs, corpus, monkeypatch, capsys, argv, sentence):
    monkeypatch.chdir(corpus)
    (corpus / "c.toml").write_text(
        '[data.sources.code]\npath = "code"\nformat = "repository"\n[data.sources.prose]\npath = "prose"\n'
    )
    words = argv if argv[0] in ("merge", "verify", "mix") else ["--job.config_file", "c.toml", *argv]
    assert cli.main(["pack", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and sentence in error and error.count("\n") == 1
    assert not (corpus / "new").exists()


def test_an_empty_side_of_the_holdout_is_an_error_and_not_a_hang(packs):
    with pytest.raises(UserError, match=r"data\.sources\.s\.path gives no documents"):
        next(stream(packs["prose"], holdout=Holdout(0.0, inside=True)))
