"""`titan-loom data <what>`: a look at the data of a configuration without training.

`preview` prints sequences as they will be trained on, `stats` measures each source, `hashes` gives the batch hashes
that training would write, `speed` times each stage of the path. All go through the code that training runs.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from titan_loom.config import JobConfig, load_config
from titan_loom.config.checks import check
from titan_loom.data.filters import REASONS, describe_counts
from titan_loom.data.lanes import LanePlan, open_stream
from titan_loom.data.loader import Batch, LaneLoader, batch_digests, build_plan, combine_digests, data_fingerprint
from titan_loom.data.packing import make_packs
from titan_loom.data.rows import RowStream
from titan_loom.data.source_reader import SourceReader
from titan_loom.data.sources import Parts, list_sources
from titan_loom.data.tokenizer import EOS_ID, Tokenizer, load_tokenizer
from titan_loom.errors import UserError

END_OF_DOCUMENT = "──── end of document ────"


class Given(NamedTuple):
    """What a report is about."""

    config: JobConfig
    tokenizer: Tokenizer
    listing: dict[str, Parts]


def main(argv: list[str]) -> None:
    """Raises UserError for a mistake in the command line or the configuration."""
    what, *rest = argv or [""]
    if what not in REPORTS:
        raise UserError(f"titan-loom data {what!r}: what to report must be one of {', '.join(REPORTS)}")
    report, options = REPORTS[what]
    parser = argparse.ArgumentParser(
        prog=f"titan-loom data {what}",
        description=report.__doc__,
        epilog="and as for training: --job.config_file X, overrides as --section.key value",
        allow_abbrev=False,
    )
    for name, default in options.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"default: {default}")
    values, overrides = parser.parse_known_args(rest)
    config = load_config(overrides)
    config = replace(config, parallelism=replace(config.parallelism, expected_world_size=None))
    check(config, 1)
    tokenizer = load_tokenizer(config.model.tokenizer_path)
    make_packs(config)
    listing = list_sources(config.data)
    # Checks what the numbers alone do not tell, as a start of training does.
    data_fingerprint(config.data, config.training, config.debug.seed, tokenizer, listing)
    report(Given(config, tokenizer, listing), **vars(values))


def preview(given: Given, sequences: int) -> None:
    """Print the first sequences of the run as text, with the end of each document on a line of its own."""
    names = list(given.config.data.sources)
    loader = _open_loader(given)
    rows = (
        (step, position, source, _pieces(batch, position))
        for step, batch in enumerate(loader, 1)
        for position, source in enumerate(batch.sources.tolist())
        if source >= 0
    )
    for step, position, source, pieces in islice(rows, sequences):
        print(f"━━━━ step {step}, position {position}, {names[source]}, {sum(map(len, pieces)):,} tokens ━━━━")
        print("".join(visible(given.tokenizer, tokens) for tokens in pieces))
    loader.close()


def _pieces(batch: Batch, row: int) -> list[np.ndarray]:
    """The tokens of a row: its inputs, or its chunks one by one, which end with a label."""
    num_tokens = int((batch.labels[row] >= 0).sum())
    inputs, labels = (t[row, :num_tokens].numpy() for t in (batch.inputs, batch.labels))
    if batch.positions is None:
        return [inputs]
    starts = np.flatnonzero(batch.positions[row, :num_tokens].numpy() == 0)
    return [
        np.append(chunk, after[-1])
        for chunk, after in zip(np.split(inputs, starts[1:]), np.split(labels, starts[1:]), strict=True)
    ]


def visible(tokenizer: Tokenizer, tokens: np.ndarray) -> str:
    """The text of `tokens`; where a document ends, a line says so (EOS written in a text stays what it is)."""
    pieces = np.split(tokens, np.flatnonzero(tokens == EOS_ID) + 1)
    return "".join(
        tokenizer.decode(piece[:-1]) + f"\n{END_OF_DOCUMENT}\n"
        if len(piece) and piece[-1] == EOS_ID
        else tokenizer.decode(piece)
        for piece in pieces
    )


def stats(given: Given, documents: int) -> None:
    """Measure each source on its first documents in training order (0: on all of them, once)."""
    plan = _plan(given)
    shares = plan.mixer.first_shares()
    table = Table("source", "documents", "tokens", "tokens a document", "bytes a token", "share", "filtered")
    for source, share in zip(plan.sources, shares, strict=True):
        num_documents, num_tokens, num_bytes, filtered = _measure(plan, source, documents or None)
        table.add_row(
            source.name,
            f"{num_documents:,}",
            f"{num_tokens:,}",
            f"{num_tokens / max(1, num_documents):,.1f}",
            f"{num_bytes / num_tokens:.3f}" if num_bytes else "packed",
            f"{100 * float(share):.3f} %",
            describe_counts(filtered),
        )
    Console().print(table)


def _measure(plan: LanePlan, source: SourceReader, limit: int | None) -> tuple[int, int, int, list[int]]:
    """Documents, tokens, bytes of text (0: unknown) and dropped documents of the first epoch, or its beginning."""
    filtered = [0] * len(REASONS)
    if source.pack is not None:
        kept = source.keep.holdout.keeps(source.pack.array("points"))
        filtered[REASONS.index("holdout")] = int((~kept).sum())
        return int(kept.sum()), int(np.diff(source.pack.array("starts"))[kept].sum()), 0, filtered
    texts = islice(_texts_of_epoch(plan, source, filtered), limit)
    num_documents = num_tokens = num_bytes = 0
    while batch := list(islice(texts, source.encode_batch_size)):
        num_documents += len(batch)
        num_tokens += sum(map(len, plan.tokenizer.encode_batch(batch)))
        num_bytes += sum(len(text.encode("utf-8", "replace")) for text in batch)
    return num_documents, num_tokens, num_bytes, filtered


def _texts_of_epoch(plan: LanePlan, source: SourceReader, filtered: list[int]) -> Iterator[str]:
    # One lane for all: in the order of training as far as one lane can have it, and each document once.
    for row, state in RowStream(source, replace(plan.order, lanes=1), 0):
        if state[0] > 0:
            return
        for _, document in source.documents(row, filtered):
            yield document.text


def hashes(given: Given, steps: int) -> None:
    """Print step and `batch_sha256` of the first steps, equal to what training with debug.hash_batches writes."""
    loader = _open_loader(given)
    for step in range(1, steps + 1):
        print(step, combine_digests(batch_digests(next(loader))), flush=True)
    loader.close()


def speed(given: Given, seconds: float) -> None:
    """Time each stage together with those before it, in one process and one lane, then whole batches as trained."""
    plan = _plan(given)
    table = Table("source", "up to stage", "rows/s", "documents/s", "MB of text/s", "tokens/s")
    for source in plan.sources:
        stages = {"sequences": _sequences} if source.pack else {"documents": _documents, "sequences": _sequences}
        for name, stage in stages.items():
            table.add_row(source.name, name, *_rates(stage(plan, source), seconds))
    loader = _open_loader(given)
    table.add_row("all", "batches", *_rates(((0, 0, 0, int((batch.labels >= 0).sum())) for batch in loader), seconds))
    loader.close()
    Console().print(table)


Work = tuple[int, int, int, int]
"""Rows, documents, bytes of text, tokens; 0 where a stage does not see them."""


def _documents(plan: LanePlan, source: SourceReader) -> Iterator[Work]:
    for row, _ in RowStream(source, plan.order, 0):
        texts = [document.text for _, document in source.documents(row, [0] * len(REASONS))]
        yield 1, len(texts), sum(len(text.encode("utf-8", "replace")) for text in texts), 0


def _sequences(plan: LanePlan, source: SourceReader) -> Iterator[Work]:
    stream = open_stream(plan, source, 0)
    while True:
        yield 0, 0, 0, sum(len(chunk) - 1 for chunk in stream.read_row(plan.seq_len))


def _rates(work: Iterator[Work], seconds: float) -> list[str]:
    next(work)  # opens files and compiles what is compiled once
    totals, start = np.zeros(4), time.perf_counter()
    while (spent := time.perf_counter() - start) < seconds:
        totals += next(work)
    rows, documents, text, tokens = totals / spent
    return [
        f"{rate:,.{digits}f}" if rate else ""
        for rate, digits in ((rows, 1), (documents, 1), (text / 1e6, 2), (tokens, 0))
    ]


def _open_loader(given: Given) -> LaneLoader:
    """All lanes of the run in one rank, from the first step on."""
    data, dataloader = given.config.data, given.config.training.dataloader
    order = _order(given.config)
    return LaneLoader(data, dataloader, given.tokenizer, **order, dp_rank=0, dp_degree=1, listing=given.listing)


def _plan(given: Given) -> LanePlan:
    return build_plan(given.config.data, given.tokenizer, **_order(given.config), listing=given.listing)


def _order(config: JobConfig) -> dict[str, int | None]:
    training = config.training
    return {
        "seed": config.debug.seed,
        "seq_len": training.seq_len,
        "global_batch_size": training.global_batch_size,
        "steps": training.num_steps,
        "total_tokens": training.total_tokens,
    }


REPORTS: dict[str, tuple[Callable[..., None], dict[str, int | float]]] = {
    "preview": (preview, {"sequences": 4}),
    "stats": (stats, {"documents": 1000}),
    "hashes": (hashes, {"steps": 10}),
    "speed": (speed, {"seconds": 3.0}),
}
"""By name: the report, and its options with their defaults."""
