"""Training with isolated documents: another function of the same batches, and the same numbers everywhere."""

import json
import math
import random

import pytest

from tests import runs

SAME = ("batch_sha256", "tokens_seen", "source_tokens")


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> tuple[str, ...]:
    """A few documents in every sequence, and the refresh that looks back in time by itself."""
    file = tmp_path_factory.mktemp("data") / "short.jsonl"
    draw = random.Random(0)
    words = ["loop", "layer", "reads", "writes", "token", "stream", "memory", "twice", "once", "again", "then"]
    texts = [" ".join(draw.choices(words, k=draw.randint(2, 30))) for _ in range(400)]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    sources = [("--data.sources.code.format", "text")]
    sources += [(f"--data.sources.{name}.path", str(file)) for name in ("code", "prose")]
    training = [("--model.args.refresh", "gated"), ("--optimizer.name", "AdamW"), ("--training.steps", "8")]
    return tuple(word for option in sources + training for word in option)


@pytest.fixture(scope="module")
def masked(tmp_path_factory, options) -> list[dict]:
    return runs.train(tmp_path_factory.mktemp("masked"), *options, "--data.document_mask", "true")


def test_batches_and_counts_do_not_depend_on_the_mask_but_every_loss_does(tmp_path, options, masked):
    rows = runs.train(tmp_path, *options)
    assert [[row[key] for key in SAME] for row in rows] == [[row[key] for key in SAME] for row in masked]
    assert all(row["loss"] != other["loss"] for row, other in zip(rows, masked, strict=True))
    assert all(math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"]) for row in masked)
    assert masked[-1]["loss"] < masked[0]["loss"]


def test_numbers_with_rows_of_whole_documents_do_not_depend_on_processes_or_a_resume(tmp_path, options, masked):
    packing = (*options, "--data.packing", "first_fit", "--training.steps")
    runs.train(tmp_path / "one", *packing, "2")
    rows = runs.train(tmp_path / "one", *packing, "4")
    others = runs.train(tmp_path / "two", *packing, "4", "--training.local_batch_size", "4", world_size=2)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row, other in zip(rows, others, strict=True):
        assert row["batch_sha256"] == other["batch_sha256"]
        assert row["tokens_seen"] == other["tokens_seen"] < masked[row["step"] - 1]["tokens_seen"]
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)


@pytest.mark.parametrize(("world_size", "local_batch_size"), [(1, 4), (2, 2)])
def test_numbers_with_the_mask_do_not_depend_on_processes_or_accumulation(
    tmp_path, options, masked, world_size, local_batch_size
):
    layout = ("--data.document_mask", "true", "--training.local_batch_size", str(local_batch_size))
    rows = runs.train(tmp_path, *options, *layout, world_size=world_size)
    for row, expected in zip(rows, masked, strict=True):
        assert row["batch_sha256"] == expected["batch_sha256"]
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
