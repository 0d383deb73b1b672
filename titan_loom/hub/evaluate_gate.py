"""Before anything is scored: the weights at hand give the validation loss that training recorded of them.

The rows are read again as the run read them, and go through the very model that will be scored, each document alone
where training kept documents apart.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_loom.config import JobConfig, load_config
from titan_loom.config.loading import decode, without_none
from titan_loom.data.lanes import IGNORED_LABEL
from titan_loom.data.sources import list_sources
from titan_loom.data.tokenizer import Tokenizer
from titan_loom.errors import ReadError, RunError, UserError
from titan_loom.hub.card import metrics_until
from titan_loom.hub.checkpoints import WAY_ON, find_checkpoint
from titan_loom.hub.convert import METADATA, METRICS, metrics_of
from titan_loom.hub.exports import read_json
from titan_loom.models.layers.document_mask import positions_by_eos
from titan_loom.training.checkpoint_files import read_state
from titan_loom.training.validation import list_validation, read_rows

MAX_GAP = 0.005
"""Nats by which the loss may differ from the recorded one: what another precision and another device may make of it."""

Parts = list[tuple[Tensor, Tensor]]
"""Inputs and labels, (n,) int64 each, of what is read alone."""


class Record(NamedTuple):
    """What training left on record of a model."""

    state: dict[str, Any]
    loss: float | None
    """Of the validation at the model's own step, when there was one."""


def read_record(path: Path) -> Record:
    """The record of the export, checkpoint or run at `path`. Raises UserError when there is none or it is damaged."""
    if (path / "config.json").exists():
        if not (path / METADATA).exists():
            raise UserError(f"{path} has no {METADATA}, which tells how it was validated; --unverified goes on without")
        state, file = read_json(path / METADATA), path / METRICS
        metrics = metrics_until(file.read_text(), state["step"]) if file.exists() else ""
    else:
        checkpoint = find_checkpoint(path)
        state = read_state(checkpoint, WAY_ON)
        metrics = metrics_of(checkpoint, state)
    last = json.loads(metrics.splitlines()[-1]) if metrics else {}
    return Record(state, last.get("validation/loss") if last.get("step") == state["step"] else None)


def verify(model: nn.Module, record: Record, parts: Parts) -> float:
    """The loss on `parts`, those of the recorded validation. Raises RunError when it is another than the recorded."""
    nats, tokens = measure(model, parts)
    loss = nats / tokens
    if not abs(loss - record.loss) <= MAX_GAP:  # nor NaN
        raise RunError(
            f"the validation loss is {loss:.4f}, but training recorded {record.loss:.4f} at step "
            f"{record.state['step']}, which is more than {MAX_GAP} off: these are not the weights or the data of then, "
            "and nothing was scored"
        )
    return loss


def validation_parts(record: Record, tokenizer: Tokenizer, config_file: Path | None) -> Parts:
    """The rows that training validated on, by the recorded configuration or by that in `config_file`.

    Raises UserError when they cannot be read here.
    """
    if config_file is None:
        config = decode(JobConfig, without_none(record.state["config"]))
    else:
        config = load_config(["--job.config_file", str(config_file)])
    try:
        rows, labels, positions = _read(config, record.state, tokenizer)
    except (UserError, ReadError) as error:
        raise UserError(
            f"the validation of step {record.state['step']} cannot be read again: {error}; name a configuration that "
            "finds its data by --config_file, or go on without by --unverified and --text or --tasks"
        ) from error
    parts = []
    for tokens, targets, places in zip(rows, labels, positions, strict=True):
        lengths = torch.diff((places == 0).nonzero().flatten(), append=torch.tensor([len(places)])).tolist()
        parts += zip(tokens.split(lengths), targets.split(lengths), strict=True)
    return [(tokens, targets) for tokens, targets in parts if (targets != IGNORED_LABEL).any()]


def _read(config: JobConfig, state: dict[str, Any], tokenizer: Tokenizer) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, labels and positions in what is read alone, each (rows, seq_len) int64."""
    listing = None
    if config.validation.path is None:
        commits = {name: state["data"].get(f"data.sources.{name}.commit", "") for name in config.data.sources}
        listing = list_sources(list_validation(config.validation, config.data)[0], commits)
    seed, seq_len = config.debug.seed, config.training.seq_len
    batch = read_rows(config.validation, config.data, tokenizer, seed, seq_len, listing)
    positions = batch.positions
    if positions is None:
        positions = torch.arange(seq_len).expand_as(batch.inputs)
        if config.data.isolates_documents:
            positions = positions_by_eos(batch.inputs, tokenizer.eos_id)
    return batch.inputs, batch.labels, positions


@torch.no_grad()
def measure(model: nn.Module, parts: Parts, num_loops: int | None = None) -> tuple[float, int]:
    """The sum of the cross-entropy over `parts`, in nats, and the number of tokens that were predicted."""
    nats, count = 0.0, 0
    for tokens, labels in parts:
        logits = model(tokens[None].to(model.device), use_cache=False, num_loops=num_loops).logits[0]
        nats += F.cross_entropy(logits.float(), labels.to(model.device), reduction="sum").item()
        count += int((labels != IGNORED_LABEL).sum())
    return nats, count
