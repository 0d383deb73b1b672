import json
import shutil
import subprocess
import sys
from dataclasses import asdict

import pytest

from titan_loom.config import load_config
from titan_loom.data import tokenizer
from titan_loom.data.loader import data_fingerprint
from titan_loom.errors import UserError
from titan_loom.models import model_args
from titan_loom.preflight import preflight
from titan_loom.training.checkpoint_files import write_state

FILE = """
[data]
lanes = 2
[data.sources.prose]
path = "PATH"
[training]
steps = 4
local_batch_size = 2
global_batch_size = 4
seq_len = 64
"""


@pytest.fixture
def sentence(tmp_path):
    """What is wrong with a small good run after overrides; None when nothing is."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.jsonl").write_text(json.dumps({"text": "some words"}) + "\n")
    (tmp_path / "run.toml").write_text(FILE.replace("PATH", str(tmp_path / "text")))

    def sentence(*argv: str, world_size: int = 1) -> str | None:
        dump = ["--job.dump_folder", str(tmp_path / "dump")]
        config = load_config(["--job.config_file", str(tmp_path / "run.toml"), *dump, *argv])
        try:
            preflight(config, world_size)
        except UserError as error:
            return str(error)

    return sentence


def test_a_good_run_passes_with_any_number_of_processes_that_divides(sentence):
    assert sentence() is None
    assert sentence(world_size=2) is None
    assert "training.global_batch_size is 4" in sentence(world_size=4)


def test_an_export_that_could_not_be_made_is_found_at_start(sentence, monkeypatch):
    monkeypatch.setattr("titan_loom.hub.families.find_spec", lambda name: None if name == "transformers" else name)
    assert sentence() is None
    assert sentence("--checkpoint.last_save_in_hf").startswith("checkpoint.last_save_in_hf needs transformers: pip")
    assert sentence("--hub.repo_id", "owner/model").startswith("hub.repo_id needs transformers: pip")


def test_a_source_is_packed_before_a_run(sentence, tmp_path):
    packed = ["--data.sources.prose.pack", str(tmp_path / "pack")]
    assert "training.global_batch_size" in sentence(*packed, world_size=4)
    assert not (tmp_path / "pack").exists()
    assert sentence(*packed) is None
    assert (tmp_path / "pack" / "metadata.json").exists()
    (tmp_path / "text" / "a.jsonl").write_text(json.dumps({"text": "other words"}) + "\n")
    assert "data.sources.prose.pack is" in sentence(*packed)


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--data.lanes", "3"], ["data.lanes is 3"]),
        (["--compile.enable", "--compile.backend", "inducter"], ["compile.backend is 'inducter'", "inductor, "]),
        (["--validation.enable", "true"], ["validation.path is not set", "data.holdout_percent is 0"]),
        (
            ["--validation.enable", "true", "--validation.path", "nowhere"],
            ["validation.path = 'nowhere' does not exist"],
        ),
        (["--model.name", "gpt"], ["model.name", "gpt", "nanocoder"]),
        (["--model.flavor", "huge"], ["model.flavor", "huge", "minicoder"]),
        (["--model.args.num_loop", "2"], ["model.args.num_loop is not a key", "model.args.num_loops"]),
        (["--model.args.num_loops", "two"], ['model.args.num_loops is "two" (a string)', "an integer"]),
        (["--training.seq_len", "4097"], ["training.seq_len is 4097", "model.args.max_seq_len = 4096"]),
        (["--model.args.vocab_size", "77"], ["model.tokenizer_path", "vocab_size is 77"]),
        (["--model.tokenizer_path", "nowhere"], ["model.tokenizer_path", "nowhere"]),
        (["--data.sources.prose.path", "nowhere"], ["data.sources.prose.path", "nowhere"]),
        (["--data.sources.prose.format", "csv"], ["data.sources.prose.format", "csv", "text"]),
        (["--checkpoint.load_step", "7"], ["checkpoint.load_step is 7"]),
        (["--checkpoint.initial_load_path", "hf://model"], ["initial_load_path is 'hf://model'", "hf://owner/name"]),
        (["--job.dump_folder", "/dev/null/run"], ["job.dump_folder is '/dev/null/run'", "/dev/null is no folder"]),
    ],
)
def test_every_mistake_that_needs_no_tensor_is_found(sentence, argv, parts):
    found = sentence(*argv)
    assert found is not None
    assert "\n" not in found
    assert all(part in found for part in parts), found


def test_an_empty_data_folder_is_found(sentence, tmp_path):
    (tmp_path / "empty").mkdir()
    found = sentence("--data.sources.prose.path", str(tmp_path / "empty"))
    assert "data.sources.prose.path" in found


def test_a_tokenizer_with_another_eos_is_found(sentence, tmp_path):
    shutil.copytree(tokenizer.DEFAULT_PATH, tmp_path / "tokenizer")
    file = tmp_path / "tokenizer" / "tokenizer.json"
    file.write_text(file.read_text().replace("<|eos|>", "<|end|>"))
    assert "<|eos|>" in sentence("--model.tokenizer_path", str(tmp_path / "tokenizer"))


def test_a_checkpoint_of_another_model_is_found(sentence, tmp_path):
    config = load_config(["--job.config_file", str(tmp_path / "run.toml")])
    args = asdict(model_args(config.model)) | {"dim": 1}
    write_checkpoint(tmp_path / "dump", 3, model={"name": "nanocoder", "args": args}, data={})
    found = sentence()
    assert "model.args.dim" in found and "step-3" in found


def write_checkpoint(dump, step: int, **state) -> None:
    folder = dump / "checkpoint" / f"step-{step}"
    folder.mkdir(parents=True)
    (folder / ".metadata").touch()
    write_state(folder, {"step": step, **state})


def test_a_run_whose_last_step_was_cut_cannot_be_extended(sentence, tmp_path):
    # It once went on as if that step had been full, and ended short of its total.
    config = load_config(["--job.config_file", str(tmp_path / "run.toml")])
    model = {"name": "nanocoder", "args": asdict(model_args(config.model))}
    data = data_fingerprint(config.data, config.training, config.debug.seed, tokenizer.load_tokenizer())
    write_checkpoint(tmp_path / "dump", 4, model=model, data=data, tokens_seen=1000)
    assert sentence("--training.total_tokens", "1000") is None
    for length in (["--training.total_tokens", "2048"], ["--training.total_tokens", "1024"], ["--training.steps", "5"]):
        found = sentence(*length)
        assert "training.total_tokens" in found and "1,000" in found and "checkpoint.initial_load_path" in found
    write_checkpoint(tmp_path / "dump", 5, model=model, data=data, tokens_seen=5 * 256)
    assert sentence("--training.total_tokens", "2048") is None


def test_a_wrong_number_is_reported_before_any_library_is_loaded():
    code = """
import sys
from titan_loom.config import load_config
from titan_loom.errors import UserError
from titan_loom.preflight import preflight
try:
    preflight(load_config(["--training.steps", "0"]), 1)
except UserError:
    sys.exit(len({"torch", "pyarrow", "tokenizers"} & set(sys.modules)))
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
