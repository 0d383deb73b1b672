"""Checkpoints of tiny models, and their exports, for tests: every parameter is drawn at random."""

import json
from dataclasses import asdict
from pathlib import Path

import torch

from titan_loom.hub import convert
from titan_loom.hub.checkpoints import write_checkpoint
from titan_loom.models import ModelArgs, build_model
from titan_loom.models.loom.args import LoomArgs
from titan_loom.models.nanocoder.args import NanoCoderArgs

TINY = NanoCoderArgs(
    dim=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_dim=24,
    prelude=1,
    loop=2,
    coda=1,
    num_loops=2,
    ngram_rows=53,
    ngram_dim=5,
    max_seq_len=64,
)
TINY_LOOM = LoomArgs(
    vocab_size=8192,
    dim=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    num_experts=6,
    num_shared_experts=1,
    top_k=2,
    expert_dim=16,
    num_loops=3,
    max_seq_len=64,
)


def randomize(model: torch.nn.Module) -> None:
    """Draw every parameter and buffer so that it matters."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + 0.1)
        for buffer in model.buffers():
            buffer.copy_(torch.randint(-99, 99, buffer.shape, generator=generator))


def make_checkpoint(path: Path, args: ModelArgs = TINY, step: int = 3) -> torch.nn.Module:
    """Write a checkpoint of `step` without a run; returns its model."""
    model = build_model(args)
    randomize(model)
    state = {
        "run_id": "abc",
        "step": step,
        "tokens_seen": 384,
        "source_tokens": {"code": 300, "prose": 84},
        "model": {"name": "loom" if isinstance(args, LoomArgs) else "nanocoder", "args": asdict(args)},
        "data": {"data.sources.code.path": "owner/code", "data.sources.code.commit": "c0ffee"},
        "lanes": {"0": {"row": 1}},
        "config": {"model": {"tokenizer_path": None}},
    }
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    lines = [json.dumps({"step": step, "loss": 9.0 - step}) for step in (1, 2, 3, 4)]
    write_checkpoint(path, state, tensors, {"metrics.jsonl": "\n".join(lines).encode()})
    return model


def export(folder: Path, args: ModelArgs = TINY) -> Path:
    """The export of such a checkpoint."""
    make_checkpoint(folder / "checkpoint", args)
    convert.to_hf(folder / "checkpoint", folder / "export")
    return folder / "export"
