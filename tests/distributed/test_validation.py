"""Validation gives the same numbers to the bit each time, on any number of ranks, and leaves training as it was."""

import pytest

from tests import processes, runs

HELD_OUT = ("--data.holdout_percent", "20", "--validation.enable", "true", "--validation.steps", "3")
SMALL = (*HELD_OUT, "--validation.local_batch_size", "2", "--training.steps", "3", "--validation.freq", "2")


def _validated(argv: list[str]) -> dict:
    """Two validations of the initial weights, and the same by a plain mean over the tokens of each row alone."""
    import torch
    import torch.nn.functional as F

    from titan_loom.config.loading import load_config
    from titan_loom.trainer import Trainer
    from titan_loom.training import validation

    config = load_config(argv)
    trainer = Trainer(config)
    first, second = (trainer.validator.run(trainer.model, trainer.data_parallel) for _ in range(2))
    batch = validation.read_rows(
        config.validation,
        config.data,
        trainer.tokenizer,
        config.debug.seed,
        config.training.seq_len,
        trainer.listing,
    )
    plain = {}
    with trainer.data_parallel.evaluation():
        for loop in range(1, trainer.args.num_loops + 1):
            losses = []
            for tokens, labels in zip(batch.inputs, batch.labels, strict=True):
                logits = trainer.model.logits(trainer.model(tokens[None], loop).hidden)[0]
                losses.append(F.cross_entropy(logits, labels, reduction="none"))  # -100 is ignored
            plain[loop] = torch.cat(losses).double().sum().item() / (batch.labels != -100).sum().item()
    sharded = all(hasattr(p, "device_mesh") for p in trainer.model.parameters())
    trainer.close()
    return {"first": first, "second": second, "plain": plain, "sharded": sharded, "rows": len(batch.labels)}


def test_the_token_mean_is_the_same_to_the_bit_on_any_number_of_ranks(tmp_path):
    (tmp_path / "small.toml").write_text(runs.LOOM)
    argv = ["--job.config_file", str(tmp_path / "small.toml"), "--training.local_batch_size", "1", *SMALL]
    found = []
    for world_size in (1, 2, 4):
        folder = ["--job.dump_folder", str(tmp_path / str(world_size))]
        found += processes.run(_validated, world_size, [*argv, *folder])
    expected = found[0]["first"]
    loops = [f"loop/{loop}/loss" for loop in (1, 2, 3)]
    assert set(expected) == {"loss", *loops}
    for result in found:
        assert result["rows"] == 6 and result["sharded"]
        assert result["first"] == result["second"] == expected
        assert [expected[name] for name in loops] == pytest.approx(list(result["plain"].values()))
    assert expected["loss"] == expected["loop/3/loss"] != expected["loop/1/loss"]


def test_a_run_with_validation_trains_as_one_without(tmp_path):
    without = runs.train(tmp_path / "without", *HELD_OUT[:2], "--training.steps", "3", world_size=2)
    rows = runs.train(tmp_path / "with", *SMALL, world_size=2)
    assert [row["step"] for row in rows if "validation/loss" in row] == [2, 3]
    for key in ("loss", "grad_norm", "batch_sha256"):
        assert [row[key] for row in rows] == [row[key] for row in without]
    assert rows[2]["validation/loss"] < rows[1]["validation/loss"]


def test_a_path_of_its_own_is_read_whole(tmp_path):
    (tmp_path / "text.jsonl").write_text('{"text": "some words that the run does not train on"}\n')
    path = ("--validation.enable", "true", "--validation.path", str(tmp_path / "text.jsonl"))
    [row] = runs.train(tmp_path, *path, "--validation.steps", "1", "--training.steps", "1")
    assert row["validation/loss"] == row["validation/loop/2/loss"] > 0
