"""`titan-loom pack`: tokenises a configured source once, in parallel, into a pack; joins packs; verifies them.

The source is cut into parts that do not depend on the number of workers. A part is finished when its `.json` is there,
so whatever ends the command costs at most the parts that were being made; starting it again goes on with the others.
"""

import argparse
import fcntl
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from titan_loom.config import JobConfig, load_config
from titan_loom.data.filters import REASONS, key_point
from titan_loom.data.packs import Pack, is_pack, open_pack, verify
from titan_loom.data.readers import Shard
from titan_loom.data.retry import Access
from titan_loom.data.source_reader import SourceReader
from titan_loom.data.sources import is_on_hub, list_parts, source_settings
from titan_loom.data.tokenizer import Tokenizer, load_tokenizer
from titan_loom.data.workers import leave_when_closed
from titan_loom.errors import RunError, UserError
from titan_loom.tools.logging import logger

NUM_PARTS = 32
"""Fewer parts than this are cut by rows: enough to share out and to lose little."""

COPY_BYTES = 1 << 24


@dataclass(frozen=True, kw_only=True)
class PartJob:
    """What every part of a source is made with."""

    source: SourceReader
    tokenizer: Tokenizer
    dtype: str
    folder: Path
    """Of the unfinished pack's parts."""


def main(argv: list[str]) -> None:
    """`pack`, `pack merge` and `pack verify`. Raises UserError for a mistake in command line or configuration."""
    parser = argparse.ArgumentParser(
        prog="titan-loom pack",
        description="Tokenise a source once (with --job.config_file X and overrides), join packs, or verify them.",
        allow_abbrev=False,
    )
    parser.add_argument("--source", help="the [data.sources.<name>] to pack; needed when there are several")
    parser.add_argument("--out", help="folder of the new pack")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes (default: %(default)s)")
    options, rest = parser.parse_known_args(argv)
    is_overrides = not rest or rest[0].startswith("--")
    what, paths = ("pack", []) if is_overrides else (rest[0], rest[1:])
    if what not in ("pack", "merge", "verify"):
        raise UserError(f"titan-loom pack {what!r}: it must be merge, verify or the options of a configuration")
    if what != "verify" and not options.out:
        raise UserError("--out is not set; it must be the folder of the new pack")
    if what == "pack":
        config = load_config(rest)
        names = list(config.data.sources)
        if options.source is None and len(names) != 1:
            raise UserError(f"--source is not set; it must be one of [data.sources]: {', '.join(names)}")
        made = pack(config, options.source or names[0], Path(options.out), max(1, options.workers))
    else:
        packs = [open_pack("pack", path) for path in paths]
        if not packs:
            raise UserError(f"titan-loom pack {what} names no pack; give at least one folder")
        if what == "verify":
            for each in packs:
                verify(each)
            return print(f"{len(packs)} packs are whole")
        made = merge(packs, Path(options.out))
    print(f"{made.num_documents:,} documents, {made.num_tokens:,} tokens in {made.path}")


def make_packs(config: JobConfig) -> None:
    """Make the packs that `config` reads from and that are not there yet. Raises UserError as `pack` does."""
    for name, source in config.data.sources.items():
        if source.pack is None:
            continue
        out = Path(source.pack).expanduser()
        if is_pack(str(out)):
            pack(config, name, out, 1, f"data.sources.{name}.pack")  # checks that it is this one
            continue
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            lock = open(f"{out}.lock", "w")
        except OSError as error:
            reason = f"it must be a folder that can be written to: {error.strerror}"
            raise UserError(f"data.sources.{name}.pack is {source.pack!r}; {reason}") from error
        with lock:  # every host comes here, and the folder may be shared: the first makes it, the others wait
            fcntl.lockf(lock, fcntl.LOCK_EX)
            logger.info(f"Packing data source {name} into {out}")
            pack(config, name, out, os.cpu_count(), f"data.sources.{name}.pack")


def pack(config: JobConfig, name: str, out: Path, workers: int, key: str = "--out") -> Pack:
    """Pack source `name` of `config` into folder `out`, which `key` gave, going on where an earlier call for it was
    ended.

    Raises UserError for a source that there is not or that cannot be packed, and for a folder that holds anything else.
    """
    source = config.data.sources.get(name)
    if source is None:
        raise UserError(f"--source is {name!r}; it must be one of [data.sources]: {', '.join(config.data.sources)}")
    if is_pack(source.path):
        raise UserError(f"data.sources.{name}.path = {source.path!r} is a pack already")
    source = replace(source, pack=None)
    tokenizer, access = load_tokenizer(config.model.tokenizer_path), Access(name, config.data.streaming)
    origin = source_settings(source)
    if is_pack(str(out)) and is_on_hub(source.path):  # a commit does not change
        return _finished(out, origin, tokenizer, key)
    parts = list_parts(name, source, access, _commit_in(out))
    origin |= {"commit": parts.commit, "parts": parts.digest()}
    if is_pack(str(out)):
        return _finished(out, origin, tokenizer, key)
    if len(parts.parts) < NUM_PARTS:
        parts = parts.counted(access)
    _start_folder(out, {"tokenizer": tokenizer.sha256, **origin}, key)
    job = PartJob(
        source=SourceReader(name, source, access),
        tokenizer=tokenizer,
        dtype="<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4",
        folder=out / "parts",
    )
    shards = parts.shards(NUM_PARTS)
    _make_parts(job, shards, workers)
    made = [json.loads(_marker(job.folder, number).read_text()) for number in range(len(shards))]
    filtered = {reason: sum(part["filtered"][i] for part in made) for i, reason in enumerate(REASONS)}
    logger.info(f"Joining {len(shards)} parts; documents left out by filters: {sum(filtered.values()):,}")
    files = [_part_files(job.folder, number) for number in range(len(shards))]
    result = _write_pack(
        out,
        [(tokens, *np.load(documents)) for tokens, documents in files],
        dtype=job.dtype,
        tokenizer=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        origin=[{**origin, "filtered": filtered}],
    )
    shutil.rmtree(job.folder)
    (out / "plan.json").unlink()
    return result


def merge(packs: list[Pack], out: Path) -> Pack:
    """Join packs of one tokenizer, in order, after verifying each.

    Raises UserError for packs of several tokenizers, a damaged one and a folder that holds anything.
    """
    for other in packs[1:]:
        if other.tokenizer != packs[0].tokenizer:
            raise UserError(
                f"{packs[0].path!r} and {other.path!r} are of two tokenizers: only packs of one can be merged"
            )
    _check_empty(out, "--out")
    for each in packs:
        verify(each)
    out.mkdir(parents=True, exist_ok=True)
    return _write_pack(
        out,
        [(f"{each.path}/tokens.bin", np.diff(each.array("starts")), each.array("points")) for each in packs],
        dtype=packs[0].dtype,
        tokenizer=packs[0].tokenizer,
        vocab_size=packs[0].vocab_size,
        origin=[entry for each in packs for entry in each.origin],
    )


def _finished(out: Path, origin: dict[str, Any], tokenizer: Tokenizer, key: str) -> Pack:
    """The pack that is in `out` already, if it is this one."""
    there = open_pack(key, str(out))
    (first, *others) = there.origin
    changed = [name for name, value in origin.items() if first.get(name) != value]
    changed += ["tokenizer"] * (there.tokenizer != tokenizer.sha256)
    if others or changed:
        reason = f" ({', '.join(changed)} differ)" if changed and not others else ""
        raise UserError(f"{key} is {str(out)!r}, which is a pack of something else{reason}: name another folder")
    shutil.rmtree(out / "parts", ignore_errors=True)
    (out / "plan.json").unlink(missing_ok=True)
    return there


def _commit_in(out: Path) -> str | None:
    """What the revision of a Hub dataset was resolved to when this pack was begun."""
    file = out / "plan.json"
    return (json.loads(file.read_text())["commit"] or None) if file.exists() else None


def _start_folder(out: Path, plan: dict[str, Any], key: str) -> None:
    file = out / "plan.json"
    if file.exists():
        if json.loads(file.read_text()) != plan:
            raise UserError(f"{key} is {str(out)!r}, which holds an unfinished pack of something else: delete it")
        return
    _check_empty(out, key)
    (out / "parts").mkdir(parents=True)
    aside = out / "parts" / "plan.writing"
    aside.write_text(json.dumps(plan, indent=2))
    aside.rename(file)


def _check_empty(out: Path, key: str) -> None:
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{key} is {str(out)!r}, which is not empty: name a new folder")


def _marker(folder: Path, number: int) -> Path:
    return folder / f"{number:06}.json"


def _part_files(folder: Path, number: int) -> tuple[Path, Path]:
    return folder / f"{number:06}.tokens", folder / f"{number:06}.documents.npy"


def _make_parts(job: PartJob, shards: tuple[Shard, ...], workers: int) -> None:
    """Make the parts that are not there yet, in `workers` processes which take the next one in turn."""
    left = [(number, shard) for number, shard in enumerate(shards) if not _marker(job.folder, number).exists()]
    if len(left) < len(shards):
        logger.info(f"{len(shards) - len(left)} of {len(shards)} parts are there already")
    for number, _ in left:
        _part_files(job.folder, number)[0].unlink(missing_ok=True)
    # Not fork: this process has threads of pyarrow and tokenizers.
    context = multiprocessing.get_context("spawn")
    worker_end, lifeline = context.Pipe(duplex=False)
    columns = TextColumn("parts"), MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    with (
        ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(worker_end,)) as pool,
        lifeline,  # closed first, whatever happens: nobody waits for the parts that are being made
        Progress(*columns, console=Console(file=sys.stderr)) as progress,
    ):
        # Inherited: Ctrl-C is for this process, which then ends the others.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        running = {pool.submit(_make_next_parts, job, left) for _ in range(min(workers, len(left)))}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        task = progress.add_task("parts", total=len(shards))
        try:
            while running:
                ended, running = wait(running, timeout=0.2, return_when=FIRST_COMPLETED)
                for worker in ended:
                    worker.result()
                missing = sum(not _marker(job.folder, number).exists() for number, _ in left)
                progress.update(task, completed=len(shards) - missing)
        except BrokenProcessPool as error:
            raise RunError(
                "a process that packs has ended; finished parts are kept, start the command again"
            ) from error


def _start_worker(worker_end: Connection) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    leave_when_closed(worker_end)


def _make_next_parts(job: PartJob, parts: list[tuple[int, Shard]]) -> None:
    """Make those of `parts` that no other worker has begun."""
    for number, shard in parts:
        try:
            _part_files(job.folder, number)[0].touch(exist_ok=False)
        except FileExistsError:
            continue
        make_part(job, number, shard)


def make_part(job: PartJob, number: int, shard: Shard) -> None:
    """Tokenise the documents of `shard` into the files of part `number`."""
    filtered = [0] * len(REASONS)
    lengths, points = [], []
    tokens_file, documents_file = _part_files(job.folder, number)
    stream = (document for row in job.source.rows(shard) for _, document in job.source.documents(row, filtered))
    with open(tokens_file, "wb") as file:
        while batch := list(islice(stream, job.source.encode_batch_size)):
            encoded = job.tokenizer.encode_batch([document.text for document in batch])
            file.write(np.concatenate(encoded, dtype=job.dtype, casting="unsafe"))
            lengths += map(len, encoded)
            points += [key_point(document.key) for document in batch]
        os.fsync(file.fileno())
    np.save(documents_file, np.array([lengths, points], dtype="<u8"))
    aside = _marker(job.folder, number).with_suffix(".writing")
    aside.write_text(json.dumps({"documents": len(lengths), "filtered": filtered}))
    aside.rename(_marker(job.folder, number))


def _write_pack(
    out: Path, pieces: Iterable[tuple[str | Path, np.ndarray, np.ndarray]], *, dtype: str, **fields: Any
) -> Pack:
    """Write the files of a pack from pieces (file of tokens, lengths and points of its documents), metadata last."""
    lengths, points, checksum = [np.empty(0, "<i8")], [np.empty(0, "<u8")], hashlib.sha256()
    with open(out / "tokens.bin", "wb") as target:
        for tokens_file, piece_lengths, piece_points in pieces:
            lengths.append(piece_lengths.astype("<i8"))
            points.append(piece_points)
            with open(tokens_file, "rb") as file:
                for chunk in iter(partial(file.read, COPY_BYTES), b""):
                    checksum.update(chunk)
                    target.write(chunk)
        os.fsync(target.fileno())
    starts = np.concatenate([np.zeros(1, "<i8"), np.cumsum(np.concatenate(lengths))])
    sha256 = {"tokens.bin": checksum.hexdigest()}
    for name, array in (("starts.bin", starts), ("points.bin", np.concatenate(points))):
        (out / name).write_bytes(array.tobytes())
        sha256[name] = hashlib.sha256(array.tobytes()).hexdigest()
    made = Pack(
        path=str(out.resolve()),
        dtype=dtype,
        num_documents=len(starts) - 1,
        num_tokens=int(starts[-1]),
        sha256=sha256,
        **fields,
    )
    made.write_metadata()
    return made
