"""Tiny training runs for tests: real trainers on real text, in the processes of `tests/processes.py`."""

import json
from pathlib import Path

from tests import processes

SMALL = """
[model]
flavor = "debug"
[model.args]
dim = 32
num_heads = 2
num_kv_heads = 1
head_dim = 16
ffn_dim = 48
prelude = 1
loop = 1
coda = 1
ngram_rows = 101
ngram_dim = 8
[data]
lanes = 4
window = 4
[data.sources.code]
path = "embedded:code"
format = "repository"
share = 0.75
[data.sources.prose]
path = "embedded:prose"
share = 0.25
[training]
local_batch_size = 2
global_batch_size = 8
seq_len = 64
steps = 20
mixed_precision_param = "float32"
z_loss = 1e-4
[lr_scheduler]
total_steps = 20
warmup_steps = 4
[debug]
hash_batches = true
"""


LOOM = (
    '[model]\nname = "loom"\n[model.args]\ndim = 32\nnum_kv_heads = 1\nhead_dim = 16\nexpert_dim = 32\n'
    + SMALL[SMALL.index("[data]") :]
)


def train(folder: Path, *overrides: str, world_size: int = 1, config: str = SMALL) -> list[dict]:
    """Train `config` with `overrides` (`--section.key`, value, ...) in `folder`; the lines of its metrics.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "small.toml").write_text(config)
    argv = ["--job.config_file", str(folder / "small.toml"), "--job.dump_folder", str(folder / "run"), *overrides]
    processes.run(_train, world_size, argv)
    return metrics(folder)


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def _train(argv: list[str]) -> None:
    from titan_loom.config.loading import load_config
    from titan_loom.trainer import Trainer

    trainer = Trainer(load_config(argv))
    try:
        trainer.train()
    finally:
        trainer.close()
