"""Everything about a run that can be checked, or packed, without tensors, once, before a worker starts.

The launcher calls it first, so that a mistake costs a second and not an allocation of accelerators.
"""

import os
from contextlib import closing
from dataclasses import asdict, replace

from titan_loom.config import JobConfig
from titan_loom.config.checks import check
from titan_loom.errors import UserError


def preflight(config: JobConfig, world_size: int) -> None:
    """Check the configuration, the model's arguments, the tokenizer, the run's folder, the sources and the checkpoint
    to start from, and pack the sources that are to be read from packs. A fake run needs no more than the first two.

    Raises:
        UserError: the first mistake, in one sentence.
    """
    check(config, world_size)

    # Late, so that a mistake in the numbers is reported before any library is loaded.
    from titan_loom.models import model_args

    args = model_args(config.model)
    if config.training.seq_len > args.max_seq_len:
        raise UserError(
            f"training.seq_len is {config.training.seq_len}; it must be at most the model's context, "
            f"model.args.max_seq_len = {args.max_seq_len}"
        )

    from titan_loom.training.loops import LoopPlan

    LoopPlan(config.model, config.training, args, config.debug.seed)
    if config.comm.mode == "fake":
        return

    from titan_loom.data.documents import get_format
    from titan_loom.data.loader import data_fingerprint
    from titan_loom.data.packing import make_packs
    from titan_loom.data.sources import is_on_hub, list_sources
    from titan_loom.data.tokenizer import check_tokenizer, load_tokenizer
    from titan_loom.distributed.compile import check_backend
    from titan_loom.hub.families import require_transformers
    from titan_loom.hub.start import without_hub
    from titan_loom.training.checkpoint_files import find_start
    from titan_loom.training.run_folder import check_can_be_written
    from titan_loom.training.validation import list_validation

    check_backend(config.compile)
    tokenizer = load_tokenizer(config.model.tokenizer_path)
    check_tokenizer(tokenizer, args.vocab_size)
    for name, source in config.data.sources.items():
        get_format(name, source.format)
    check_can_be_written(config)
    if config.checkpoint.last_save_in_hf:
        require_transformers("checkpoint.last_save_in_hf")
    if config.hub.repo_id is not None:
        require_transformers("hub.repo_id")
    make_packs(config)
    # Listing finds a missing or empty folder as well. Datasets on the Hub are listed once, by rank 0 of the run.
    local = {name: source for name, source in config.data.sources.items() if source.pack or not is_on_hub(source.path)}
    listing = list_sources(replace(config.data, sources=local))
    validation_path = config.validation.path if config.validation.enable else None
    if validation_path is not None and not is_on_hub(validation_path):
        list_validation(config.validation, config.data)
    fingerprint = None
    if len(listing) == len(config.data.sources):
        fingerprint = data_fingerprint(config.data, config.training, config.debug.seed, tokenizer, listing)
    find_start(without_hub(config), asdict(args), fingerprint)


def is_finished(config: JobConfig) -> bool:
    """Whether `job.dump_folder` holds the whole run already; says so on stdout, and then pushes what the run could not
    push and makes the export that it lacks.

    Raises:
        UserError, RunError: the export cannot be made.
    """
    from titan_loom.hub.outbox import push_what_waits
    from titan_loom.training.checkpoint_files import finished_step

    step = finished_step(config)
    if step is not None and os.environ.get("RANK", "0") == "0":
        print(
            f"The run in {config.job.dump_folder} has finished: it is at step {step} of {config.training.num_steps}. "
            "Raise training.steps (or total_tokens) to extend it, unless its last step was cut to meet a total, "
            "or choose another job.dump_folder.",
            flush=True,
        )
        push_what_waits(config)
        if config.checkpoint.last_save_in_hf:
            _export_what_lacks(config, step)
    return step is not None


def _export_what_lacks(config: JobConfig, step: int) -> None:
    from titan_loom.hub.convert import export_folder, export_last
    from titan_loom.training.run_folder import RunFolder

    with closing(RunFolder(config)):  # another host may be at it
        if not export_folder(config, step).exists():
            export_last(config, step)
