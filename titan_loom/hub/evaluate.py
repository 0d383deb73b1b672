"""`titan-loom eval`: how well an export or a checkpoint predicts text and answers questions, by number of loops.

First the weights must give the validation loss that training recorded of them (`evaluate_gate.py`). Texts: each
document is read on its own, after the token that ends documents, in windows of `seq_len` tokens that do not overlap;
its own end is predicted as well. Bits per byte, which count the text's bytes in UTF-8, compare models of different
tokenizers.
"""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from titan_loom.data.lanes import IGNORED_LABEL
from titan_loom.data.tokenizer import Tokenizer
from titan_loom.data.train_tokenizer import documents
from titan_loom.errors import UserError
from titan_loom.hub.evaluate_caches import compare_caches
from titan_loom.hub.evaluate_gate import Parts, measure, read_record, validation_parts, verify
from titan_loom.hub.evaluate_tasks import check_tasks, run_tasks
from titan_loom.hub.generate import load


@dataclass(frozen=True, kw_only=True)
class EvalArgs:
    """Measure how well a model predicts text and answers questions."""

    path: Annotated[Path, tyro.conf.Positional]
    """An export, a checkpoint (a `step-N` folder) or a run, whose newest checkpoint is taken."""

    text: tuple[str, ...] = ()
    """What to predict: files or folders (parquet, jsonl, text), `embedded:code` or `embedded:prose`. Default: what
    training validated on, unless there are tasks."""

    tasks: tuple[str, ...] = ()
    """Multiple-choice tasks: files ending in .jsonl, with `context`, `choices` and `answer` (from 0) in every line, or
    tasks of lm-evaluation-harness; `loom` is seven of these."""

    num_loops: tuple[int, ...] = ()
    """Passes over the looped stack, a row of the table for each. Default: as trained."""

    seq_len: int | None = None
    """Tokens of a window of text. Default: the model's context, 1,024 at most."""

    max_documents: int = 100
    """Documents of text to read."""

    cache_tokens: int = 1024
    """Tokens, the first ones, on which the two caches of a LOOM are compared. The shared one reads them one at a time;
    0: no comparison."""

    config_file: Path | None = None
    """Configuration to read the validation's data by, when they are no longer where the run found them."""

    unverified: bool = False
    """Go on although nothing tells that these are the weights that training validated."""


class Result(NamedTuple):
    """What one number of loops gave."""

    num_loops: int | None
    nats: float
    tokens: int
    bytes: int

    @property
    def loss(self) -> float:
        """Mean over tokens, in nats."""
        return self.nats / self.tokens

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.bytes


def main(argv: list[str]) -> None:
    """Print tables of losses and of scores.

    Raises:
        UserError: for what cannot be loaded or read, and when there is no recorded validation to compare with.
        RunError: the weights do not give the loss that was recorded.
    """
    args = tyro.cli(
        EvalArgs, prog="titan-loom eval", args=argv, config=(tyro.conf.OmitArgPrefixes,), use_underscores=True
    )
    check_tasks(args.tasks)
    model, tokenizer = load_to_device(args)
    validation = None if args.unverified else _verify(args, model, tokenizer)
    if args.text or not args.tasks:
        parts, num_bytes = read_parts(args, model, tokenizer, validation)
        _print_losses(evaluate(args, model, parts, num_bytes))
        if args.cache_tokens and hasattr(model.config, "kv_cache"):
            _print_caches(args, model, parts)
    if args.tasks:
        _print_scores(args, model, tokenizer)


def load_to_device(args: EvalArgs) -> tuple[nn.Module, Tokenizer]:
    """The model, on the device to measure on, and its tokenizer. Raises UserError as `load`."""
    if min(args.num_loops, default=1) < 1:
        raise UserError(f"num_loops is {min(args.num_loops)}; it must be 1 or more")
    if args.cache_tokens < 0:
        raise UserError(f"cache_tokens is {args.cache_tokens}; it must be 0 or more")
    model, tokenizer = load(args.path, *args.num_loops[:1])
    return model.to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer


def _verify(args: EvalArgs, model: nn.Module, tokenizer: Tokenizer) -> Parts:
    """What training validated on, which has given the loss that it recorded. Raises as `main`."""
    record = read_record(args.path)
    if record.loss is None:
        raise UserError(
            f"{args.path} is of step {record.state['step']}, of which training recorded no validation loss (it does "
            "so with validation.enable, every validation.freq steps): --unverified goes on without comparing"
        )
    parts = validation_parts(record, tokenizer, args.config_file)
    loss = verify(model, record, parts)
    print(f"validation loss {loss:.4f}, recorded in training: {record.loss:.4f}", file=sys.stderr)
    return parts


def read_parts(
    args: EvalArgs, model: nn.Module, tokenizer: Tokenizer, validation: Parts | None = None
) -> tuple[Parts, int]:
    """The texts or, without any, the `validation`, and the bytes of what is predicted. Raises as `main`."""
    if args.text:
        return _read_texts(args, model.config.max_position_embeddings, tokenizer)
    parts = validation or validation_parts(read_record(args.path), tokenizer, args.config_file)
    return parts, sum(_num_bytes(labels, tokenizer) for _, labels in parts)


def evaluate(args: EvalArgs, model: nn.Module, parts: Parts, num_bytes: int) -> list[Result]:
    """A result for each number of loops."""
    return [Result(num_loops, *measure(model, parts, num_loops), num_bytes) for num_loops in args.num_loops or (None,)]


def _read_texts(args: EvalArgs, context: int, tokenizer: Tokenizer) -> tuple[Parts, int]:
    """The windows of the texts, and their bytes."""
    seq_len = min(context, 1024) if args.seq_len is None else args.seq_len
    if not 0 < seq_len <= context:
        raise UserError(f"seq_len is {seq_len}; it must be from 1 to the model's context, {context}")
    texts = list(islice(documents(args.text), args.max_documents))
    if not texts:
        raise UserError(f"text is {args.text}, which holds no document")
    encoded = ([tokenizer.eos_id, *ids.tolist()] for ids in tokenizer.encode_batch(texts))
    return [window for ids in encoded for window in _windows(ids, seq_len)], sum(len(text.encode()) for text in texts)


def _windows(ids: list[int], seq_len: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and labels, (n,), of each window of at most `seq_len` tokens."""
    for start in range(0, len(ids) - 1, seq_len):
        window = torch.tensor(ids[start : start + seq_len + 1])
        yield window[:-1], window[1:]


def _num_bytes(labels: Tensor, tokenizer: Tokenizer) -> int:
    """Bytes of the text that `labels` are of."""
    is_text = (labels != IGNORED_LABEL) & (labels != tokenizer.eos_id)
    return len(tokenizer.decode(labels[is_text].tolist()).encode())


def _print_losses(results: list[Result]) -> None:
    table = Table("loops", "loss", "perplexity", "bits per byte")
    for result in results:
        loss, bits = f"{result.loss:.4f}", f"{result.bits_per_byte:.4f}"
        table.add_row(_loops(result.num_loops), loss, f"{math.exp(result.loss):.3f}", bits)
    print(f"{results[0].tokens:,} tokens, {results[0].bytes:,} bytes", file=sys.stderr)
    Console().print(table)


def _print_caches(args: EvalArgs, model: nn.Module, parts: Parts) -> None:
    table = Table(
        "loops", "cache", f"bytes per token ({str(model.dtype).removeprefix('torch.')})", "loss", "difference"
    )
    for num_loops in args.num_loops or (None,):
        results, count = compare_caches(model, parts, args.cache_tokens, num_loops)
        for result in results:
            loss, difference = f"{result.loss:.4f}", f"{result.loss - results[0].loss:+.4f}"
            table.add_row(_loops(num_loops), result.kv_cache, f"{result.bytes_per_token:,}", loss, difference)
    print(f"caches, on the first {count:,} tokens:", file=sys.stderr)
    Console().print(table)


def _print_scores(args: EvalArgs, model: nn.Module, tokenizer: Tokenizer) -> None:
    table = Table("loops", "task", "questions", "acc", "acc_norm")
    for num_loops in args.num_loops or (None,):
        for score in run_tasks(args.tasks, model, tokenizer, num_loops):
            shares = ("" if share is None else f"{share:.4f}" for share in (score.acc, score.acc_norm))
            count = "" if score.count is None else f"{score.count:,}"
            table.add_row(_loops(num_loops), score.task, count, *shares)
    Console().print(table)


def _loops(num_loops: int | None) -> str:
    return "as trained" if num_loops is None else str(num_loops)
