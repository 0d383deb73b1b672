"""`titan-loom convert`: checkpoints to folders that transformers loads, and back; on a CPU, in one process.

An export is written aside and gets its name once its own code, loaded from the folder, has given the trainer's logits.
Weights and logits are taken from one model, which is freed before the result is loaded, so that there is about one
model in memory at any time.
"""

import json
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from huggingface_hub import save_torch_state_dict
from torch import Tensor, nn

from titan_loom.config import JobConfig
from titan_loom.data.tokenizer import BOS, DEFAULT_PATH, EOS, PAD, Tokenizer, load_tokenizer
from titan_loom.errors import RunError, UserError
from titan_loom.hub.card import metrics_until, model_card, training_metadata
from titan_loom.hub.check import check_export, check_tokens
from titan_loom.hub.checkpoints import WAY_ON, find_checkpoint, read_tensors, write_checkpoint
from titan_loom.hub.exports import read_args, read_json, read_weights
from titan_loom.hub.families import code_files, decode_args, export_of, hf_classes, require_transformers, to_hf_config
from titan_loom.models import build_model
from titan_loom.tools.logging import logger
from titan_loom.training.checkpoint import make_empty
from titan_loom.training.checkpoint_files import STEP_FOLDER, checkpoint_folder, read_state

Dtype = Literal["float32", "bfloat16", "float16"]

MAX_SHARD_SIZE = "200MB"
"""Weights above this are written as several files with an index. Whoever casts what is loaded holds one file more."""

METADATA, METRICS, TOKENIZER = "training_metadata.json", "metrics.jsonl", "tokenizer.json"


@dataclass(frozen=True)
class ToHF:
    """Export a checkpoint for transformers."""

    checkpoint: Annotated[Path, tyro.conf.Positional]
    """A `step-N` folder, or the folder of a run, whose newest checkpoint is taken."""

    out: Annotated[Path, tyro.conf.Positional]
    """Folder to make."""

    dtype: Dtype = "float32"
    """dtype of the weights in the export."""

    tokenizer_path: str | None = None
    """Folder of the tokenizer, when it is no longer where the run found it."""


@dataclass(frozen=True)
class FromHF:
    """Make a checkpoint, to start a run from with checkpoint.initial_load_path, of an export."""

    folder: Annotated[Path, tyro.conf.Positional]
    """An export, or what transformers saved of one."""

    checkpoint: Annotated[Path, tyro.conf.Positional]
    """Folder to make."""


def main(argv: list[str]) -> None:
    """Convert as the command line `argv` says.

    Raises:
        UserError: what is to be converted is not there or damaged, or the result is there already.
        RunError: the result is not what it should be, or could not be written; nothing is left of it.
    """
    command = tyro.extras.subcommand_cli_from_dict(
        {"to-hf": ToHF, "from-hf": FromHF},
        prog="titan-loom convert",
        args=argv,
        config=(tyro.conf.OmitArgPrefixes,),
        use_underscores=True,
    )
    if isinstance(command, ToHF):
        to_hf(command.checkpoint, command.out, command.dtype, command.tokenizer_path)
        print(f"{command.out} gives the logits of {command.checkpoint}", file=sys.stderr)
    else:
        from_hf(command.folder, command.checkpoint)


def to_hf(checkpoint: Path, out: Path, dtype: Dtype = "float32", tokenizer_path: str | None = None) -> None:
    """Export the checkpoint at `checkpoint` to `out`, which appears when it has been checked. Raises as `main`."""
    require_transformers("titan-loom convert to-hf")
    _require_absent(out)
    checkpoint = find_checkpoint(checkpoint)
    state = read_state(checkpoint, WAY_ON)
    name = state["model"]["name"]
    args = decode_args(name, state["model"]["args"])
    tokenizer = tokenizer_of(checkpoint, state, tokenizer_path)
    aside = out.with_name(f".{out.name}.writing")
    tokens = check_tokens(args.vocab_size, args.max_seq_len)
    try:
        make_empty(aside)
        model = load_model(checkpoint, state, args)
        metrics = metrics_of(checkpoint, state)
        metadata = training_metadata(state)
        card = model_card(metadata, sum(p.numel() for p in model.parameters()), dtype, metrics)
        (aside / "README.md").write_text(card)
        (aside / METADATA).write_text(json.dumps(metadata, indent=1) + "\n")
        if metrics:
            (aside / METRICS).write_text(metrics)
        _write_config(aside, name, args, dtype)
        _write_tokenizer(aside, tokenizer, args.max_seq_len)
        _round(model, dtype)
        expected = _logits(model, tokens)
        _write_weights(aside, name, model, dtype)
        del model
        check_export(aside, name, tokens, expected)
        aside.rename(out)
    except OSError as error:
        raise RunError(f"{out} could not be written: {error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def export_folder(config: JobConfig, step: int) -> Path:
    return Path(config.job.dump_folder) / "hf" / f"step-{step}"


def export_last(config: JobConfig, step: int) -> None:
    """What `[checkpoint] last_save_in_hf` asks for, once the run is over, at `step`. Raises as `main`."""
    out = export_folder(config, step)
    shutil.rmtree(out, ignore_errors=True)  # of a run that this one replaced
    to_hf(checkpoint_folder(config) / out.name, out, config.checkpoint.export_dtype, config.model.tokenizer_path)
    logger.info(f"Exported the last checkpoint to {out}")


def load_model(checkpoint: Path, state: dict[str, Any], args: Any) -> nn.Module:
    """The trainer's model with the weights of `checkpoint`, in fp32 on the CPU, as it is evaluated."""
    with torch.device("meta"):
        model = build_model(args)
    model.to_empty(device="cpu")
    read_tensors(checkpoint, state, {f"model.{name}": tensor for name, tensor in model.state_dict().items()})
    return model.eval()  # what training alone drops, an export does not


def _require_absent(path: Path) -> None:
    if path.exists():
        raise UserError(f"{path} exists already; choose another folder or delete it first")


def _write_config(folder: Path, name: str, args: Any, dtype: Dtype) -> None:
    prefix = export_of(name).NAME
    config = hf_classes(name).config(
        **to_hf_config(name, args),
        dtype=dtype,
        architectures=[f"{prefix}ForCausalLM"],
        auto_map={
            "AutoConfig": f"configuration_{name}.{prefix}Config",
            "AutoModelForCausalLM": f"modeling_{name}.{prefix}ForCausalLM",
        },
    )
    (folder / "config.json").write_text(config.to_json_string())
    for file in code_files(name):
        shutil.copy(file, folder)


def _write_tokenizer(folder: Path, tokenizer: Tokenizer, max_seq_len: int) -> None:
    """The tokenizer and, since they speak of the same special tokens, the configuration of `generate`."""
    from transformers import GenerationConfig

    ids = {"pad": tokenizer.id_of(PAD), "bos": tokenizer.id_of(BOS), "eos": tokenizer.eos_id}
    tokens = {"pad": PAD, "bos": BOS, "eos": EOS}
    config = {
        **json.loads((DEFAULT_PATH / "tokenizer_config.json").read_text()),
        **{f"{kind}_token": tokens[kind] if ids[kind] is not None else None for kind in tokens},
        "model_max_length": max_seq_len,
    }
    (folder / TOKENIZER).write_text(tokenizer.text, "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    if ids["pad"] is None:
        ids["pad"] = tokenizer.eos_id  # something to fill batches with
    GenerationConfig(**{f"{kind}_token_id": i for kind, i in ids.items()}).save_pretrained(folder)


def _round(model: nn.Module, dtype: Dtype) -> None:
    """Give the model, in place, the values that an export in `dtype` has."""
    for tensor in _tensors(model):
        tensor.data.copy_(tensor.data.to(getattr(torch, dtype)))


def _write_weights(folder: Path, name: str, model: nn.Module, dtype: Dtype) -> None:
    for tensor in _tensors(model):
        tensor.data = tensor.data.to(getattr(torch, dtype))
    tensors = dict(export_of(name).to_hf_tensor(*item) for item in model.state_dict().items())
    save_torch_state_dict(tensors, folder, max_shard_size=MAX_SHARD_SIZE, metadata={"format": "pt"})


def _tensors(model: nn.Module) -> list[Tensor]:
    return [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()]


@torch.no_grad()
def _logits(model: nn.Module, tokens: Tensor) -> Tensor:
    return model.logits(model(tokens).hidden)


def tokenizer_of(checkpoint: Path, state: dict[str, Any], path: str | None) -> Tokenizer:
    """The tokenizer that the run trained with, found in the checkpoint, at `path` or where the run had it."""
    if path is None and (checkpoint / TOKENIZER).exists():
        path = str(checkpoint)
    elif path is None:
        path = state["config"]["model"]["tokenizer_path"]
    tokenizer = load_tokenizer(path)
    if tokenizer.sha256 != state["data"].get("tokenizer", tokenizer.sha256):
        raise UserError(f"tokenizer_path is {path!r}, but {checkpoint} was trained with another tokenizer")
    return tokenizer


def metrics_of(checkpoint: Path, state: dict[str, Any]) -> str:
    """The run's metrics up to the checkpoint; empty when they are neither in it nor in its run's folder."""
    for folder in (checkpoint, checkpoint.parent.parent):
        if (folder / METRICS).is_file():
            return metrics_until((folder / METRICS).read_text(), state["step"])
    return ""


def from_hf(folder: Path, checkpoint: Path) -> None:
    """Make the checkpoint `checkpoint`, in fp32, of the export in `folder`. Raises as `main`."""
    _require_absent(checkpoint)
    name, args = read_args(folder)
    state = read_json(folder / METADATA) if (folder / METADATA).exists() else _untrained()
    state |= {"model": {"name": name, "args": asdict(args)}, "lanes": {}}
    if STEP_FOLDER.fullmatch(checkpoint.name) and checkpoint.name != f"step-{state['step']}":
        raise UserError(
            f"{checkpoint} would be of step {state['step']}; choose the name step-{state['step']} or another"
        )
    tensors = {f"model.{key}": tensor for key, tensor in read_weights(folder, name, args).items()}
    others = {file: (folder / file).read_bytes() for file in (TOKENIZER, METRICS) if (folder / file).exists()}
    try:
        write_checkpoint(checkpoint, state, tensors, others)
    except OSError as error:
        raise RunError(f"{checkpoint} could not be written: {error}") from error


def _untrained() -> dict[str, Any]:
    """The state of weights whose training is on no record."""
    config = {"model": {"tokenizer_path": None}}
    return {"step": 0, "tokens_seen": 0, "source_tokens": {}, "seed": 0, "data": {}, "config": config, "versions": {}}
