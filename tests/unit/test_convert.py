"""Exports are exact, complete and checked before they appear, and convert back to what they came from."""

import json
import shutil
from dataclasses import asdict, replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")

from tests import runs
from tests.exports import TINY, TINY_LOOM, export, make_checkpoint
from titan_loom import cli
from titan_loom.config import load_config
from titan_loom.errors import RunError, UserError
from titan_loom.hub import convert
from titan_loom.models import model_args
from titan_loom.models.nanocoder import FLAVORS
from titan_loom.training.checkpoint_files import find_start

FILES = {
    "README.md",
    "config.json",
    "configuration_nanocoder.py",
    "generation_config.json",
    "metrics.jsonl",
    "model.safetensors",
    "modeling_nanocoder.py",
    "tokenizer.json",
    "tokenizer_config.json",
    "training_metadata.json",
}
VARIANTS = [
    TINY,
    replace(TINY, refresh="gated"),
    replace(TINY, rope_interleaved=False),
    replace(TINY, schedule=(0, 1, 1, 2, 0), ngram_visits=(0, 2)),
    TINY_LOOM,
    replace(TINY_LOOM, kv_gate=True, kv_cache="shared", per_loop_routers=False, num_shared_experts=0),
    replace(
        TINY_LOOM,
        capacity_factor=1.0,
        looping_residual=False,
        embed_inject=False,
        residual_scale=False,
        ffn_branch_norm=False,
    ),
]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def elements(path) -> int:
    with safe_open(path, framework="pt") as file:
        return sum(torch.Size(file.get_slice(name).get_shape()).numel() for name in file.offset_keys())


@pytest.mark.parametrize("args", VARIANTS, ids=["scalar", "gated", "halves", "schedule", "loom", "barbados", "ablated"])
def test_there_and_back_and_there_again_gives_the_same_files(tmp_path, args):
    there = export(tmp_path, args)
    convert.from_hf(there, tmp_path / "back")
    convert.to_hf(tmp_path / "back", tmp_path / "again")
    assert {name.replace("loom", "nanocoder") for name in contents(there)} == FILES
    assert contents(there) == contents(tmp_path / "again")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "back", "checkpoint", "export"]


def test_what_is_on_record_is_in_the_export(tmp_path):
    there = export(tmp_path)
    metadata = json.loads((there / "training_metadata.json").read_text())
    assert metadata["source_tokens"] == {"code": 300, "prose": 84}
    assert not {"lanes", "files"} & metadata.keys()
    assert [json.loads(line)["step"] for line in (there / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]
    card = (there / "README.md").read_text()
    assert "| code | 300 | owner/code at c0ffee |" in card
    assert "Loss of the last step: 6.0000" in card
    assert json.loads((there / "tokenizer_config.json").read_text())["model_max_length"] == TINY.max_seq_len


def test_half_precision_keeps_names_and_shapes_and_each_parameter_is_there_once(tmp_path):
    make_checkpoint(tmp_path / "checkpoint", FLAVORS["nanocoder"])
    for dtype in ("float32", "bfloat16"):
        convert.to_hf(tmp_path / "checkpoint", tmp_path / dtype, dtype)
    full, half = (load_file(tmp_path / dtype / "model.safetensors") for dtype in ("float32", "bfloat16"))
    assert elements(tmp_path / "float32" / "model.safetensors") == 9_895_690
    assert {name: t.shape for name, t in full.items()} == {name: t.shape for name, t in half.items()}
    assert {t.dtype for t in half.values()} == {torch.bfloat16}
    assert all(torch.equal(t.bfloat16(), half[name]) for name, t in full.items())
    assert json.loads((tmp_path / "bfloat16" / "config.json").read_text())["dtype"] == "bfloat16"


def test_large_weights_are_several_files_with_an_index(tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "MAX_SHARD_SIZE", "50KB")
    there = export(tmp_path)
    index = json.loads((there / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    convert.from_hf(there, tmp_path / "back")
    convert.to_hf(tmp_path / "back", tmp_path / "again")
    assert contents(there) == contents(tmp_path / "again")


def _change_weights(change):
    def plant(folder):
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})

    return plant


def _change_config(**values):
    def plant(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | values))

    return plant


def _truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


NORM = "model.blocks.1.attention_norm.weight"
FAULTS = {
    "rope": (_change_config(rope_interleaved=False), "logits are up to"),
    "loops": (_change_config(num_loops=1), "tensors are not the model's|does not load"),
    "missing": (_change_weights(lambda weights: weights.pop(NORM)), f"missing_keys: {NORM}"),
    "renamed": (_change_weights(lambda weights: weights.update(other=weights.pop(NORM))), "unexpected_keys: other"),
    "changed": (_change_weights(lambda weights: weights[NORM].mul_(1.001)), "logits are up to"),
    "nan": (_change_weights(lambda weights: weights[NORM].fill_(float("nan"))), "logits are up to nan"),
    "truncated": (_truncate, "does not load"),
    "code": (lambda folder: (folder / "modeling_nanocoder.py").write_text("import nowhere"), "does not load"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_result_is_found_and_nothing_is_left(tmp_path, monkeypatch, capsys, fault):
    plant, what = FAULTS[fault]
    make_checkpoint(tmp_path / "checkpoint")
    check = convert.check_export

    def planted(folder, *args):
        plant(folder)
        check(folder, *args)

    monkeypatch.setattr(convert, "check_export", planted)
    with pytest.raises(RunError, match=what):
        convert.to_hf(tmp_path / "checkpoint", tmp_path / "out")
    assert cli.main(["convert", "to-hf", str(tmp_path / "checkpoint"), str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err.startswith("error: the export")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_a_run_of_two_processes_is_exported_by_the_folder_of_the_run(tmp_path):
    runs.train(tmp_path, "--training.steps", "2", world_size=2)
    out = tmp_path / "out"
    assert cli.main(["convert", "to-hf", str(tmp_path / "run"), str(out), "--dtype", "bfloat16"]) == 0
    metadata = json.loads((out / "training_metadata.json").read_text())
    assert metadata["step"] == 2 and metadata["tokens_seen"] == 1024
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 2
    assert cli.main(["convert", "from-hf", str(out), str(tmp_path / "step-3")]) == 2
    assert cli.main(["convert", "from-hf", str(out), str(tmp_path / "step-2")]) == 0
    argv = ["--job.config_file", str(tmp_path / "small.toml"), "--job.dump_folder", str(tmp_path / "new")]
    config = load_config([*argv, "--checkpoint.initial_load_path", str(tmp_path / "step-2")])
    assert find_start(config, asdict(model_args(config.model))).model_only


def test_mistakes_are_one_sentence(tmp_path):
    make_checkpoint(tmp_path / "checkpoint")
    (tmp_path / "there").mkdir()
    with pytest.raises(UserError, match="there exists already"):
        convert.to_hf(tmp_path / "checkpoint", tmp_path / "there")
    with pytest.raises(UserError, match="there is no complete checkpoint and holds none"):
        convert.to_hf(tmp_path / "there", tmp_path / "out")
    weights = tmp_path / "checkpoint" / "__0_0.distcp"
    weights.write_bytes(weights.read_bytes()[:-7])
    with pytest.raises(UserError, match="checkpoint is damaged, __0_0"):
        convert.to_hf(tmp_path / "checkpoint", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_weights_that_are_not_the_models_do_not_become_a_checkpoint(tmp_path):
    there = export(tmp_path)
    for change, what in [
        (lambda weights: weights.pop(NORM), f"has no tensor {NORM}"),
        (lambda weights: weights.update(other=weights[NORM].clone()), "not the model's: other"),
        (lambda weights: weights.update({NORM: weights[NORM][:-1].clone()}), r"has the shape \[31\] instead of \[32\]"),
    ]:
        shutil.copytree(there, tmp_path / "changed")
        _change_weights(change)(tmp_path / "changed")
        with pytest.raises(UserError, match=what):
            convert.from_hf(tmp_path / "changed", tmp_path / "back")
        shutil.rmtree(tmp_path / "changed")
    assert not (tmp_path / "back").exists()
