"""What the numbers of a configuration must satisfy among themselves, and with the number of processes.

Everything here needs the configuration only: no file, no model, no tensor. Each rule is one sentence for the person
who broke it.
"""

import re
from pathlib import PurePath

from titan_loom.config import job_config
from titan_loom.config.bounds import check_bounds
from titan_loom.config.milestones import milestone_tags
from titan_loom.errors import UserError

MAX_STEPS = 10**9
RUN_FILES = [".lock", ".config.toml", "config.toml", "hf", "logs", "metrics.jsonl", "metrics.jsonl.writing"]
RUN_FILES += ["from_hub", "outbox", "report"]
"""What else a run keeps in `job.dump_folder`."""

_REPO_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)


def check(config: job_config.JobConfig, world_size: int) -> None:
    """Check `config` for a run of `world_size` processes.

    Raises:
        UserError: the first rule that is broken, with the key, the value and what is allowed.
    """
    check_bounds(config)
    _check_length(config.training)
    _check_world_size(config.parallelism.expected_world_size, world_size)
    _check_degrees(config.parallelism, world_size)
    _check_batch(config.training, world_size)
    _check_lanes(config.data.lanes, config.training.global_batch_size, world_size)
    _check_sources(config.data)
    _check_packing(config.data, config.training)
    _check_stages(config.data, config.training)
    _check_loop_sampling(config.model)
    _check_segments(config.training)
    _check_learning_rate(config.lr_scheduler, config.training)
    _check_token_switches(config.optimizer, config.training)
    _check_activation_checkpoint(config.activation_checkpoint)
    _check_compile(config.compile)
    _check_checkpoint(config.checkpoint)
    _check_hub(config.hub, config.checkpoint, config.training)
    if config.validation.enable and config.validation.path is None and config.data.holdout_percent == 0:
        raise UserError(
            "validation.enable is true, but validation.path is not set and data.holdout_percent is 0; one of them must "
            "say what to evaluate"
        )
    _check_folder("checkpoint.folder", config.checkpoint.folder)
    _check_folder("metrics.save_tb_folder", config.metrics.save_tb_folder)
    _check_apart(config.checkpoint.folder, config.metrics.save_tb_folder)


def _check_length(training: job_config.Training) -> None:
    if (training.steps is None) == (training.total_tokens is None):
        found = "neither is set" if training.steps is None else f"they are {training.steps} and {training.total_tokens}"
        raise UserError(f"exactly one of training.steps and training.total_tokens must be set; {found}")
    if training.num_steps > MAX_STEPS:
        key = "steps" if training.total_tokens is None else "total_tokens"
        raise UserError(
            f"training.{key} is {getattr(training, key)}; a run may have at most {MAX_STEPS:,} steps, and this one "
            f"would have {training.num_steps:,}"
        )


def _check_world_size(expected: int | None, world_size: int) -> None:
    if expected not in (None, world_size):
        raise UserError(f"parallelism.expected_world_size is {expected}; this run has {_processes(world_size)}")


def _check_degrees(parallelism: job_config.Parallelism, world_size: int) -> None:
    replicate, shard = parallelism.data_parallel_replicate_degree, parallelism.data_parallel_shard_degree
    if shard == 0 or shard < -1:
        raise UserError(
            f"parallelism.data_parallel_shard_degree is {shard}; it must be -1 (all that is left) or greater than 0"
        )
    if world_size % replicate:
        raise UserError(
            f"parallelism.data_parallel_replicate_degree is {replicate}; it must divide the number of processes = "
            f"{world_size}: {_or(_divisors(world_size))}"
        )
    if shard not in (-1, world_size // replicate):
        raise UserError(
            f"parallelism.data_parallel_shard_degree is {shard}; times data_parallel_replicate_degree = {replicate} it "
            f"must be the number of processes = {world_size}: -1 or {world_size // replicate}"
        )


def _check_batch(training: job_config.Training, world_size: int) -> None:
    batch, unit = training.global_batch_size, training.local_batch_size * world_size
    if batch % unit:
        nearest = [multiple for multiple in (batch // unit * unit, (batch // unit + 1) * unit) if multiple]
        raise UserError(
            f"training.global_batch_size is {batch}; it must be a multiple of training.local_batch_size times the "
            f"number of processes, {training.local_batch_size} x {world_size} = {unit}, such as {_or(nearest)}"
        )


def _check_lanes(lanes: int, batch: int, world_size: int) -> None:
    if batch % lanes or lanes % world_size:
        allowed = [n for n in range(world_size, batch + 1, world_size) if batch % n == 0]
        raise UserError(
            f"data.lanes is {lanes}; it must divide training.global_batch_size = {batch} and be a multiple of the "
            f"number of processes = {world_size}: {_or(allowed)}"
        )


def _check_sources(data: job_config.Data) -> None:
    if not data.sources:
        raise UserError("data.sources is empty; a run needs at least one [data.sources.<name>] with a path")
    for name, source in data.sources.items():
        key = f"data.sources.{name}"
        if not source.path:
            raise UserError(f"{key}.path is not set; it must be a file, a folder, a dataset or `embedded:<name>`")
        if source.max_chars is not None and source.max_chars < source.min_chars:
            raise UserError(f"{key}.max_chars is {source.max_chars}; it must be min_chars = {source.min_chars} or more")


def _check_packing(data: job_config.Data, training: job_config.Training) -> None:
    if data.packing == "first_fit" and training.total_tokens is not None:
        raise UserError(
            f"training.total_tokens is {training.total_tokens}; with data.packing = 'first_fit', whose padding is not "
            "known before, the length of the run must be given as training.steps"
        )


def _check_stages(data: job_config.Data, training: job_config.Training) -> None:
    for i, stage in enumerate(data.stages):
        key = f"data.stages.{i}"
        if unknown := stage.shares.keys() - data.sources.keys():
            raise UserError(f"{key}.shares names {min(unknown)!r}; the sources are: {', '.join(data.sources)}")
        if not any(stage.shares.values()):
            raise UserError(f"{key}.shares gives no source a share; at least one must be greater than 0")
        if stage.tokens is None and stage is not data.stages[-1]:
            raise UserError(f"{key}.tokens is not set; only the last stage may leave it out")
    if data.stages and data.stages[-1].tokens is not None:
        found = sum(stage.tokens for stage in data.stages)
        needed = training.total_tokens or training.num_steps * training.tokens_per_step
        if found < needed:
            raise UserError(
                f"data.stages have {found:,} tokens together; the run has {needed:,}, and the last stage may leave out "
                "its tokens to last to the end"
            )


def _check_loop_sampling(model: job_config.Model) -> None:
    if model.loop_sampling == "fixed":
        return
    if model.loop_sampling_max is None or model.loop_sampling_max < model.loop_sampling_min:
        found = "not set" if model.loop_sampling_max is None else model.loop_sampling_max
        raise UserError(
            f"model.loop_sampling_max is {found}; with loop_sampling = {model.loop_sampling!r} it must be at least "
            f"loop_sampling_min = {model.loop_sampling_min}"
        )


def _check_segments(training: job_config.Training) -> None:
    if training.segment_loops and training.backprop_loops is not None:
        raise UserError(
            f"training.segment_loops is {training.segment_loops} and training.backprop_loops is "
            f"{training.backprop_loops}; only one of them can be set"
        )


def _check_learning_rate(schedule: job_config.LRScheduler, training: job_config.Training) -> None:
    if schedule.warmup_steps is not None and schedule.warmup_tokens is not None:
        raise UserError(
            f"lr_scheduler.warmup_steps is {schedule.warmup_steps} and lr_scheduler.warmup_tokens is "
            f"{schedule.warmup_tokens}; only one of them can be set"
        )
    total = schedule.total_steps or training.num_steps
    if total < training.num_steps and schedule.min_lr_factor == 0:
        raise UserError(
            f"lr_scheduler.total_steps is {total}; it must be at least the run's {training.num_steps} steps, or the "
            "rest of them would have a learning rate of 0"
        )


def _check_token_switches(optimizer: job_config.Optimizer, training: job_config.Training) -> None:
    final, switch = optimizer.final_weight_decay, optimizer.weight_decay_switch_tokens
    if (final is None) != (switch is None):
        missing = "final_weight_decay" if final is None else "weight_decay_switch_tokens"
        raise UserError(
            f"optimizer.{missing} is not set; final_weight_decay and weight_decay_switch_tokens go together"
        )
    if final is not None and optimizer.weight_decay == 0:
        raise UserError(
            f"optimizer.weight_decay is 0 and optimizer.final_weight_decay is {final}; groups are scaled by the ratio "
            "of the two, so weight_decay must be greater than 0"
        )
    if training.z_loss_until_tokens is not None and training.z_loss == 0:
        raise UserError(
            f"training.z_loss_until_tokens is {training.z_loss_until_tokens} but training.z_loss is 0; it must be "
            "greater than 0 to be switched off"
        )


def _check_activation_checkpoint(activation_checkpoint: job_config.ActivationCheckpoint) -> None:
    if activation_checkpoint.mode == "selective" and activation_checkpoint.per == "loop":
        raise UserError(
            "activation_checkpoint.per is 'loop'; with mode = 'selective', which keeps results inside every visit, it "
            "must be 'visit'"
        )


def _check_compile(compile: job_config.Compile) -> None:
    if compile.enable and not compile.components:
        raise UserError('compile.components is empty; it must name "model", "loss" or both when compile.enable is true')
    if compile.mode != "default" and compile.backend != "inductor":
        raise UserError(
            f"compile.mode is {compile.mode!r}; with compile.backend = {compile.backend!r} it must be 'default'"
        )


def _check_checkpoint(checkpoint: job_config.Checkpoint) -> None:
    if checkpoint.keep_latest_k == 1:
        raise UserError("checkpoint.keep_latest_k is 1; it must be 0 (keep all) or at least 2")
    if checkpoint.snapshot_interval % checkpoint.interval:
        raise UserError(
            f"checkpoint.snapshot_interval is {checkpoint.snapshot_interval}; it must be 0 or a multiple of "
            f"checkpoint.interval = {checkpoint.interval}, since only what is saved can be kept"
        )
    if checkpoint.keep_latest_snapshots and not checkpoint.snapshot_interval:
        raise UserError(
            f"checkpoint.keep_latest_snapshots is {checkpoint.keep_latest_snapshots}; it needs "
            "checkpoint.snapshot_interval, which is 0"
        )
    if checkpoint.load_step < -1:
        raise UserError(f"checkpoint.load_step is {checkpoint.load_step}; it must be -1 (the newest) or a step")
    if checkpoint.load_step >= 0 and not checkpoint.resume:
        raise UserError(
            f"checkpoint.load_step is {checkpoint.load_step}; it needs checkpoint.resume = true, which is false"
        )
    if checkpoint.last_save_in_hf and not checkpoint.enable:
        raise UserError("checkpoint.last_save_in_hf is true; it needs checkpoint.enable = true, which is false")


def _check_hub(hub: job_config.Hub, checkpoint: job_config.Checkpoint, training: job_config.Training) -> None:
    milestone_tags(hub.milestones, training)
    if hub.repo_id is None:
        if hub.resume:
            raise UserError("hub.resume is true but hub.repo_id is not set; it must say where the training state is")
        return
    if not _REPO_ID.fullmatch(hub.repo_id):
        raise UserError(f"hub.repo_id is {hub.repo_id!r}; it must be a repository on the Hub, owner/name")
    if not checkpoint.enable:
        raise UserError(f"hub.repo_id is {hub.repo_id!r}; it needs checkpoint.enable = true, which is false")


def _check_folder(key: str, folder: str) -> None:
    path = PurePath(folder)
    if path == PurePath() or path.is_absolute() or ".." in path.parts or "\0" in folder:
        raise UserError(f"{key} is {folder!r}; it must name a folder inside job.dump_folder")
    if path.parts[0] in RUN_FILES:
        raise UserError(
            f"{key} is {folder!r}; it must be another name than what the run keeps beside it: {', '.join(RUN_FILES)}"
        )


def _check_apart(checkpoints: str, tensorboard: str) -> None:
    one, other = PurePath(checkpoints), PurePath(tensorboard)
    if one.is_relative_to(other) or other.is_relative_to(one):
        raise UserError(
            f"checkpoint.folder is {checkpoints!r} and metrics.save_tb_folder is {tensorboard!r}; neither may be in "
            "the other"
        )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _processes(world_size: int) -> str:
    return "1 process" if world_size == 1 else f"{world_size} processes"


def _or(values: list[int]) -> str:
    return " or ".join([", ".join(map(str, values[:-1])), str(values[-1])] if len(values) > 1 else map(str, values))
