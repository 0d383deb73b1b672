import re

import pytest

from tests import runs
from titan_loom import cli
from titan_loom.data.report import END_OF_DOCUMENT, visible
from titan_loom.data.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer()


@pytest.fixture
def small(tmp_path):
    (tmp_path / "small.toml").write_text(runs.SMALL)
    return ["--job.config_file", str(tmp_path / "small.toml")]


def data(capsys, *argv) -> str:
    assert cli.main(["data", *argv]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("lanes", ["4", "8"])
def test_hashes_are_those_that_training_writes(tmp_path, small, capsys, lanes):
    filters = ["--data.sources.code.max_chars", "20000", "--data.holdout_percent", "5"]
    trained = runs.train(tmp_path, "--training.steps", "3", "--data.lanes", lanes, *filters, world_size=2)
    lines = data(capsys, "hashes", "--steps", "3", "--data.lanes", lanes, *filters, *small).splitlines()
    assert lines == [f"{row['step']} {row['batch_sha256']}" for row in trained]
    # The counts of dropped documents add up over ranks and never fall.
    dropped = [row["filtered"]["code"].get("max_chars", 0) for row in trained]
    assert dropped == sorted(dropped) and dropped[-1] > 0
    assert all(sum(row["filtered"].get("prose", {}).values()) >= 0 for row in trained)


def test_filtered_counts_are_equal_after_a_resume_in_another_layout(tmp_path):
    filters = ["--data.sources.code.max_chars", "20000"]
    expected = [row["filtered"] for row in runs.train(tmp_path / "whole", "--training.steps", "6", *filters)]
    runs.train(tmp_path / "parts", "--training.steps", "3", *filters, world_size=2)
    found = runs.train(tmp_path / "parts", "--training.steps", "6", *filters)
    assert [row["filtered"] for row in found] == expected and expected[-1]["code"]["max_chars"] > 0


def test_preview_shows_where_documents_end(small, capsys):
    out = data(capsys, "preview", "--sequences", "8", "--training.seq_len", "1024", *small)
    assert re.findall(r"━━━━ step (\d+), position (\d+), (\w+), ([\d,]+) tokens ━━━━", out)[0] == (
        "1",
        "0",
        "code",
        "1,024",
    )
    assert out.count("━━━━ step") == 8 and "prose" in out
    assert END_OF_DOCUMENT in out and "repository: " in out


def test_eos_written_in_a_text_is_no_end_of_a_document():
    (tokens,) = TOKENIZER.encode_batch(["one<|eos|>two"])
    assert visible(TOKENIZER, tokens) == f"one<|eos|>two\n{END_OF_DOCUMENT}\n"
    assert visible(TOKENIZER, tokens[:-1]) == "one<|eos|>two"


def test_stats_count_documents_tokens_and_bytes(tmp_path, small, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    folder = tmp_path / "texts"
    folder.mkdir()
    texts = ["first", "the second text", "é" * 50, " "]
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_text(text)
    options = ["--data.sources.prose.path", str(folder), "--data.sources.prose.max_chars", "40", "--documents", "0"]
    code = ["--data.sources.code.path", str(folder), "--data.sources.code.format", "text"]
    rows = [re.split(r"\s*│\s*", line)[1:-1] for line in data(capsys, "stats", *options, *code, *small).splitlines()]
    tokens = [len(document) for document in TOKENIZER.encode_batch(texts[:3])]
    num_bytes = [len(text.encode()) for text in texts[:3]]
    found = {row[0]: row[1:] for row in rows if row}
    assert found["code"] == [
        "3",
        str(sum(tokens)),
        f"{sum(tokens) / 3:.1f}",
        f"{sum(num_bytes) / sum(tokens):.3f}",
        "75.000 %",
        "none",
    ]
    assert found["prose"][:2] == ["2", str(sum(tokens[:2]))]
    assert found["prose"][4:] == ["25.000 %", "max_chars 1"]


def test_speed_times_every_stage_of_streams_and_packs(tmp_path, small, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["pack", "--source", "prose", "--workers", "1", "--out", str(tmp_path / "prose"), *small]) == 0
    capsys.readouterr()
    out = data(capsys, "speed", "--seconds", "0.1", "--data.sources.prose.path", str(tmp_path / "prose"), *small)
    stages = re.findall(r"│ (\w+) +│ (documents|sequences|batches) ", out)
    assert stages == [("code", "documents"), ("code", "sequences"), ("prose", "sequences"), ("all", "batches")]


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["look"], "titan-loom data 'look': what to report must be one of preview, stats, hashes, speed"),
        ([], "titan-loom data '': what to report must be one of"),
        (["stats", "--data.sources.code.path", "nowhere"], "data.sources.code.path = 'nowhere' does not exist"),
        (["hashes", "--data.lanes", "3"], "data.lanes is 3; it must divide training.global_batch_size"),
    ],
)
def test_a_mistake_is_one_sentence(small, capsys, argv, sentence):
    assert cli.main(["data", *argv, *(small if argv[1:] else [])]) == 2
    assert sentence in capsys.readouterr().err
