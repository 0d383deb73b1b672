"""The training loop, top to bottom: what a run builds, what a step does, what a checkpoint holds.

What a step does to the model, once its batch is there, is in `training/model_trainer.py`.
"""

import gc
import json
import platform
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titan_loom import __version__
from titan_loom.config import JobConfig
from titan_loom.config.milestones import milestone_tags
from titan_loom.data.filters import count_by_reason
from titan_loom.data.loader import LaneLoader, data_fingerprint
from titan_loom.data.sources import Parts, list_sources
from titan_loom.data.tokenizer import load_tokenizer
from titan_loom.distributed.init import materialize
from titan_loom.distributed.process_group import (
    check_same_on_all_ranks,
    from_rank0,
    gather_objects,
    init_process_group,
    local_device,
    sum_over_ranks,
    tighten_timeout,
)
from titan_loom.errors import Interrupted, ReadError, RunError, UserError
from titan_loom.hub.outbox import Outbox
from titan_loom.hub.start import find_start, is_continued
from titan_loom.tools.inspect import check_fits
from titan_loom.tools.logging import logger
from titan_loom.tools.random import derive_seed
from titan_loom.training import batches, checkpoint_files
from titan_loom.training.checkpoint import CheckpointManager
from titan_loom.training.metrics import MetricsProcessor, StepRecord
from titan_loom.training.model_trainer import ModelTrainer
from titan_loom.training.run_folder import RunFolder
from titan_loom.training.signals import StopRequest
from titan_loom.training.validation import Validator


class Trainer(ModelTrainer):
    """A run: everything that one configuration describes, from the process group to the last checkpoint.

    Raises:
        UserError: a mistake in the configuration that only shows with the model and the data at hand.
    """

    def __init__(self, config: JobConfig):
        training, device = config.training, local_device()
        init_process_group(config.comm, device)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        check_same_on_all_ranks(asdict(replace(config, job=replace(config.job, config_file=None))))
        self.stop = StopRequest()
        torch.use_deterministic_algorithms(config.debug.deterministic)
        gc.disable()

        self.tokenizer = load_tokenizer(config.model.tokenizer_path)
        super().__init__(config, device, self.tokenizer.eos_id if config.data.isolates_documents else None)
        self.num_steps = training.num_steps
        self.run_folder: RunFolder | None = None  # rank 0 holds it
        self.outbox: Outbox | None = None  # rank 0 holds it, with a repository to push to
        self.data_fingerprint, self.listing, start, self.run_id = from_rank0(self._open_run_folder)
        self.milestones = milestone_tags(config.hub.milestones, training) if config.hub.repo_id else {}

        self.build_model()
        check_fits(self.model, torch.device("cpu") if training.enable_cpu_offload else device)
        materialize(self.model, device, config.debug.seed, cpu_offload=training.enable_cpu_offload)
        self.build_optimizers()

        self.tokens_seen = 0
        self.source_tokens = dict.fromkeys(config.data.sources, 0)
        self.lane_states: dict[int, str] | None = None
        self.checkpoints = CheckpointManager(
            checkpoint_files.checkpoint_folder(config), config.checkpoint, self.model, self.optimizers
        )
        if start is not None:
            self.checkpoints.load(start)
            if not start.model_only:
                self._restore(start.state)
        from_rank0(self._claim_run_folder, start.path if is_continued(config, start) else None)

        self.last_saved = self.step
        self.loader = LaneLoader(
            config.data,
            training.dataloader,
            self.tokenizer,
            seed=config.debug.seed,
            seq_len=training.seq_len,
            global_batch_size=training.global_batch_size,
            steps=self.num_steps,
            total_tokens=training.total_tokens,
            dp_rank=self.rank,
            dp_degree=self.world_size,
            start_step=self.step,
            lane_states=self.lane_states,
            listing=self.listing,
        )
        self.metrics = MetricsProcessor(
            config.metrics,
            Path(config.job.dump_folder),
            device=device,
            source_names=list(config.data.sources),
            total_steps=self.num_steps,
            start_step=self.step,
        )
        self.validator: Validator | None = None
        if config.validation.enable:
            self.validator = Validator(
                config.validation,
                config.data,
                self.tokenizer,
                seed=config.debug.seed,
                seq_len=training.seq_len,
                listing=self.listing,
                device=device,
                loss=self.loss,
            )
        self._log_summary()

    def _open_run_folder(self) -> tuple[dict[str, Any], dict[str, Parts], checkpoint_files.Start | None, str]:
        """On rank 0: take the folder and decide, now that nobody else writes to it, what to continue from; list the
        sources for all ranks, at the commits of the run that is continued. Nothing is changed yet, but what the Hub has
        and this folder lacks is added."""
        config = self.config
        self.run_folder = RunFolder(config)
        start, run_id = find_start(config, asdict(self.args))
        saved = {} if start is None or start.model_only else start.state["data"]
        commits = {name: saved.get(f"data.sources.{name}.commit", "") for name in config.data.sources}
        listing = list_sources(config.data, commits)
        fingerprint = data_fingerprint(config.data, config.training, config.debug.seed, self.tokenizer, listing)
        checkpoint_files.check_same_data(start, fingerprint)
        return fingerprint, listing, start, run_id

    def _claim_run_folder(self, checkpoint: Path | None) -> None:
        """On rank 0, once what the run starts from is loaded and nothing can be lost: make the folder this run's, and
        push what waits, `checkpoint` too if the run goes on from it."""
        if not self.config.checkpoint.resume and self.config.job.overwrite:
            self.run_folder.clear(self.config)
        else:
            self.run_folder.set_aside_after(self.config, self.step)
        if self.step < self.num_steps:
            self.run_folder.write_config(self.config)
        if self.config.hub.repo_id is not None:
            self.outbox = Outbox(self.config)
            if checkpoint is not None:  # killed between saving it and queueing it
                self.outbox.add(checkpoint)

    def _log_summary(self) -> None:
        config, training = self.config, self.config.training
        parts = self.model.parameter_parts()
        logger.info(
            f"Model {config.model.name} {config.model.flavor} size: {parts['total']:,} total parameters ("
            + ", ".join(f"{name} {count:,}" for name, count in parts.items() if name != "total")
            + ")"
        )
        logger.info(f"Layers in execution order: {' '.join(map(str, self.args.visits()))}")
        logger.info(f"Loops: {self.loops.describe()}")
        for group in self.optimizers.describe():
            logger.info(
                f"Optimizer group {group['name']}: {group['optimizer']}, {group['tensors']} tensors, "
                f"{group['parameters']:,} parameters, lr {group['lr']:g}, weight decay {group['weight_decay']:g}"
            )
        logger.info(f"Schedule: {self.learning_rate.describe()}")
        logger.info(
            f"Trainer is initialized with local batch size {training.local_batch_size}, global batch size "
            f"{training.global_batch_size}, gradient accumulation steps {self.micro_batches}, sequence length "
            f"{training.seq_len}, {training.tokens_per_step:,} tokens per step, total steps {self.num_steps}, "
            f"{config.data.lanes} lanes on {self.world_size} processes ({self.device.type})"
        )
        if config.data.isolates_documents:
            logger.info("Documents inside a sequence are kept apart: attention, positions, n-grams")

    def train(self) -> None:
        """Train to the last step, saving on the way.

        Raises:
            Interrupted: asked to stop by a signal; the step that was running has been finished and saved.
            UserError, ReadError: a source cannot be read any further; what was trained so far has been saved.
            RunError: the guard ends the run, or a checkpoint or the metrics could not be written.
            RuntimeError: a data worker died.
        """
        logger.info(f"Training starts at step {self.step + 1}")
        first_step = self.step + 1
        while self.step < self.num_steps:
            self.step += 1
            try:
                stopping = self.train_step()
            except (UserError, ReadError, Interrupted):  # no data for this step, as all ranks know
                self.step -= 1
                if self.config.checkpoint.enable and self.step > self.last_saved:
                    self.save()
                raise
            if self.step == first_step:
                tighten_timeout(self.config.comm, self.device)
            if self.should_validate():
                self.validate()
            # The first step of a process warms up and compiles: its time is nobody else's.
            if self.step == first_step or self.metrics.should_flush(self.step):
                self.metrics.flush()
            if self.should_save(stopping):
                self.save()
            if stopping:
                raise Interrupted(f"stopped by {self.stop.reason or 'another rank'} after step {self.step}")
            if self.step % self.config.training.gc_freq == 0:
                gc.collect(1)
        if self.config.debug.sample_tokens > 0:
            logger.info(f"Sample: {self.sample(self.config.debug.sample_tokens)}")
        logger.info(f"Training completed: {self.step} steps, {self.tokens_seen:,} tokens")

    def sample(self, num_tokens: int) -> str:
        """The start of a document, each token the most likely one, by whole forward passes of one length."""
        ids = torch.full((1, min(num_tokens, self.args.max_seq_len) + 1), self.tokenizer.eos_id, device=self.device)
        with self.data_parallel.evaluation():
            for i in range(ids.shape[1] - 1):
                ids[0, i + 1] = self.model.logits(self.model(ids[:, :-1]).hidden[0, i]).argmax()
        return self.tokenizer.decode(ids[0, 1:].tolist())

    def train_step(self) -> bool:
        """One step: an optimizer step for each segment of loops, all on one batch and at one learning rate.

        Returns whether any rank was asked to stop, the same on every rank.
        """
        config, index = self.config, self.step - 1  # schedules count from 0
        torch.manual_seed(derive_seed(config.debug.seed, "step", index))
        started = time.perf_counter()
        batch = batches.next_batch(self.loader, self.step, self.stop, config.data.streaming.report_seconds)
        data_wait = time.perf_counter() - started
        self.lane_states = batch.lane_states

        num_sources = self.num_sources
        counts = [*batches.supervised_tokens(batch, num_sources), bool(self.stop), *batch.filtered.flatten().tolist()]
        counts = sum_over_ranks(counts)
        source_counts, stop_requests, filtered = counts[:num_sources], counts[num_sources], counts[num_sources + 1 :]
        num_tokens = sum(source_counts)
        weight_decay = self.weight_decay(self.tokens_seen)
        self.z_coefficient.fill_(self.z_loss(self.tokens_seen))
        self.optimizers.set_lr(self.learning_rate.lr_factor(index))
        self.optimizers.set_weight_decay(weight_decay)

        num_loops = self.loops.num_loops(index)
        segments = self.train_segments(batch, num_tokens, num_loops)

        self.tokens_seen += num_tokens
        for name, count in zip(self.source_tokens, source_counts, strict=True):
            self.source_tokens[name] += count
        self.metrics.record(
            StepRecord(
                step=self.step,
                segments=segments,
                source_counts=source_counts,
                tokens_seen=self.tokens_seen,
                source_tokens=dict(self.source_tokens),
                lr=self.optimizers.lr(),
                weight_decay=weight_decay,
                num_loops=num_loops or self.args.num_loops,
                flops=num_tokens * self.flops_per_token(num_loops, segments),
                data_wait=data_wait,
                filtered=count_by_reason(list(self.source_tokens), filtered),
                source_wait=batch.read_seconds,
                extra={"batch_sha256": batches.global_sha256(batch)} if config.debug.hash_batches else {},
            )
        )
        self.guard.count(is_accepted=segments[-1].spike is None)
        if segments[-1].spike is not None:
            self.after_spike(segments[-1].spike)
        return stop_requests > 0

    def after_spike(self, spike: str) -> None:
        """Do what `[guard]` says about a step that was not trained to its end. Data, schedules and counts go on.

        Raises:
            RunError: the run is to end, now or after so many steps in a row.
        """
        guard, what = self.config.guard, f"{spike} in step {self.step}"
        if guard.action == "abort" or self.guard.skipped_in_a_row > guard.max_consecutive_skips:
            self.metrics.flush()
            newest = f"the newest checkpoint is of step {self.last_saved}" if self.last_saved else "nothing was saved"
            raise RunError(f"{what}; {newest}")
        if guard.action == "rollback" and (step := self._roll_back()) is not None:
            logger.warning(f"{what}: went back to the weights of step {step}")
        else:
            logger.warning(f"{what}: its update was skipped")

    def _roll_back(self) -> int | None:
        """Load the weights and optimizers of the last regular checkpoint; returns its step, None when there is none."""
        interval = self.config.checkpoint.interval
        try:
            start = from_rank0(checkpoint_files.find_rollback, self.checkpoints.folder, self.step, interval)
            if start is None:
                return None
            self.checkpoints.load(start)
        except UserError as error:  # damaged; nothing of this must be saved
            raise RunError(str(error)) from error
        self.guard.roll_back(start.state["guard"], start.state["step"] + 1, self.step)
        return start.state["step"]

    def should_validate(self) -> bool:
        due = self.step == self.num_steps or self.step % self.config.validation.freq == 0
        return self.validator is not None and due

    def validate(self) -> None:
        """Evaluate the held-out rows; nothing that training depends on is touched."""
        started = time.perf_counter()
        losses = self.validator.run(self.model, self.data_parallel)
        self.metrics.add_validation(losses, self.validator.num_tokens, time.perf_counter() - started)

    def should_save(self, stopping: bool) -> bool:
        checkpoint = self.config.checkpoint
        due = self.step == self.num_steps or self.step % checkpoint.interval == 0 or self.step in self.milestones
        return checkpoint.enable and (stopping or due)

    def save(self) -> None:
        """Save everything that the next step depends on."""
        self.metrics.flush()
        self.metrics.sync()
        self.checkpoints.save(self.step, self._state())
        if self.outbox is not None:
            self.outbox.add(self.checkpoints.folder / f"step-{self.step}")
        self.last_saved = self.step
        self.metrics.reset_clock()

    def _state(self) -> dict[str, Any]:
        of_lanes = [item for states in gather_objects(self.lane_states) for item in states.items()]
        return {
            "run_id": self.run_id,
            "step": self.step,
            "tokens_seen": self.tokens_seen,
            "source_tokens": self.source_tokens,
            "seed": self.config.debug.seed,  # every random stream derives from it and the step
            "model": {"name": self.config.model.name, "args": asdict(self.args)},
            "data": self.data_fingerprint,
            "lanes": {lane: json.loads(state) for lane, state in of_lanes},
            "guard": self.guard.state_dict(),
            "optimizer_groups": self.optimizers.describe(),
            "config": asdict(self.config),
            "versions": {
                "titan_loom": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        }

    def _restore(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.tokens_seen = state["tokens_seen"]
        self.source_tokens = {name: state["source_tokens"][name] for name in self.source_tokens}
        self.lane_states = {int(lane): json.dumps(lane_state) for lane, lane_state in state["lanes"].items()}
        self.guard.load_state_dict(state["guard"])

    def close(self) -> None:
        """Stop the data workers, finish the logs, leave the process group; then, so that no rank waits for it, push
        what a run that is complete has not pushed yet."""
        self.loader.close()
        self.metrics.close()
        dist.destroy_process_group()
        if self.outbox is not None:
            if self.last_saved == self.num_steps:
                self.outbox.flush(self.stop)
            self.outbox.close()
        if self.run_folder is not None:
            self.run_folder.close()
