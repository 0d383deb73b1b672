"""`titan-loom eval`: how well an export or a checkpoint predicts text, for one or several numbers of loops.

Each document is read on its own, after the token that ends documents, in windows of `seq_len` tokens that do not
overlap; its own end is predicted as well. Bits per byte, which count the text's bytes in UTF-8, compare models of
different tokenizers.
"""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import torch.nn.functional as F
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from titan_loom.data.tokenizer import Tokenizer
from titan_loom.data.train_tokenizer import documents
from titan_loom.errors import UserError
from titan_loom.hub.generate import load


@dataclass(frozen=True, kw_only=True)
class EvalArgs:
    """Measure how well a model predicts text."""

    path: Annotated[Path, tyro.conf.Positional]
    """An export, a checkpoint (a `step-N` folder) or a run, whose newest checkpoint is taken."""

    text: tuple[str, ...]
    """What to predict: files or folders (parquet, jsonl, text), `embedded:code` or `embedded:prose`."""

    num_loops: tuple[int, ...] = ()
    """Passes over the looped stack, a row of the table for each. Default: as trained."""

    seq_len: int | None = None
    """Tokens of a window. Default: the model's context, 1,024 at most."""

    max_documents: int = 100
    """Documents to read."""


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
    """Print a table of losses. Raises UserError for what cannot be loaded or read."""
    args = tyro.cli(
        EvalArgs, prog="titan-loom eval", args=argv, config=(tyro.conf.OmitArgPrefixes,), use_underscores=True
    )
    results = evaluate(args)
    table = Table("loops", "loss", "perplexity", "bits per byte")
    for result in results:
        loops = "as trained" if result.num_loops is None else str(result.num_loops)
        table.add_row(loops, f"{result.loss:.4f}", f"{math.exp(result.loss):.3f}", f"{result.bits_per_byte:.4f}")
    print(f"{results[0].tokens:,} tokens, {results[0].bytes:,} bytes", file=sys.stderr)
    Console().print(table)


def evaluate(args: EvalArgs) -> list[Result]:
    """A result for each number of loops. Raises as `main`."""
    model, tokenizer = load(args.path, *args.num_loops[:1])
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    context = model.config.max_position_embeddings
    seq_len = min(context, 1024) if args.seq_len is None else args.seq_len
    if not 0 < seq_len <= context:
        raise UserError(f"seq_len is {seq_len}; it must be from 1 to the model's context, {context}")
    if min(args.num_loops, default=1) < 1:
        raise UserError(f"num_loops is {min(args.num_loops)}; it must be 1 or more")
    texts = list(islice(documents(args.text), args.max_documents))
    if not texts:
        raise UserError(f"text is {args.text}, which holds no document")
    return [_measure(model, tokenizer, texts, seq_len, num_loops) for num_loops in args.num_loops or (None,)]


@torch.no_grad()
def _measure(model: nn.Module, tokenizer: Tokenizer, texts: list[str], seq_len: int, num_loops: int | None) -> Result:
    nats, tokens = 0.0, 0
    for ids in tokenizer.encode_batch(texts):
        for inputs, labels in _windows([tokenizer.eos_id, *ids.tolist()], seq_len):
            logits = model(inputs.to(model.device), use_cache=False, num_loops=num_loops).logits
            nats += F.cross_entropy(logits[0].float(), labels.to(model.device), reduction="sum").item()
            tokens += len(labels)
    return Result(num_loops, nats, tokens, sum(len(text.encode()) for text in texts))


def _windows(ids: list[int], seq_len: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs, (1, n), and labels, (n,), of each window of at most `seq_len` tokens."""
    for start in range(0, len(ids) - 1, seq_len):
        window = torch.tensor(ids[start : start + seq_len + 1])
        yield window[None, :-1], window[1:]
