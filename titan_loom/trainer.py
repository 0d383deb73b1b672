"""The training loop, top to bottom: what a run builds, what a step does, what a checkpoint holds.

Losses are sums divided by the supervised tokens of the whole global batch, and gradients are summed over ranks and
micro-batches, so that neither depends on how the batch is spread.
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
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_loom import __version__
from titan_loom.config import JobConfig
from titan_loom.data.filters import count_by_reason
from titan_loom.data.lanes import IGNORED_LABEL
from titan_loom.data.loader import (
    Batch,
    Fetch,
    LaneLoader,
    batch_digests,
    combine_digests,
    data_fingerprint,
)
from titan_loom.data.sources import Parts, list_sources
from titan_loom.data.tokenizer import load_tokenizer
from titan_loom.distributed.compile import compiled
from titan_loom.distributed.parallelize import parallelize
from titan_loom.distributed.process_group import (
    check_same_on_all_ranks,
    first_error,
    from_rank0,
    init_process_group,
    leave_process_group,
    local_device,
    ranks_where,
    sum_over_ranks,
    tighten_timeout,
)
from titan_loom.errors import Interrupted, ReadError, RunError, UserError
from titan_loom.models import build_model, model_args
from titan_loom.models.layers.document_mask import Documents, documents_at, positions_by_eos
from titan_loom.optim.groups import assign_groups
from titan_loom.optim.optimizers import build_optimizers
from titan_loom.optim.schedules import Schedule, TokenSwitch
from titan_loom.tools.inspect import check_expected_parameters
from titan_loom.tools.logging import logger
from titan_loom.tools.random import derive_seed
from titan_loom.training import checkpoint_files
from titan_loom.training.checkpoint import CheckpointManager
from titan_loom.training.loops import LoopPlan
from titan_loom.training.loss import chunk_losses, chunked_cross_entropy
from titan_loom.training.metrics import MetricsProcessor, StepRecord
from titan_loom.training.run_folder import RunFolder
from titan_loom.training.signals import StopRequest

MAX_SECONDS_ALONE = 60.0
"""A rank that waits for data meets the others this often, well within the timeout of collectives."""


class Trainer:
    """A run: everything that one configuration describes, from the process group to the last checkpoint.

    Raises:
        UserError: a mistake in the configuration that only shows with the model and the data at hand.
    """

    def __init__(self, config: JobConfig):
        self.config = config
        training = config.training
        self.num_steps = training.num_steps
        self.device = local_device()
        init_process_group(config.comm, self.device)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.micro_batches = training.global_batch_size // (training.local_batch_size * self.world_size)
        check_same_on_all_ranks(asdict(replace(config, job=replace(config.job, config_file=None))))
        self.stop = StopRequest()
        torch.use_deterministic_algorithms(config.debug.deterministic)
        gc.disable()

        self.args = model_args(config.model)
        self.loops = LoopPlan(config.model, training, self.args, config.debug.seed)
        self.tokenizer = load_tokenizer(config.model.tokenizer_path)
        self.run_folder: RunFolder | None = None  # rank 0 holds it
        self.data_fingerprint, self.listing, start = from_rank0(self._open_run_folder)

        self._build_model()
        groups = assign_groups(self.model.named_parameters(), self.model.group_rules())
        self.optimizers = build_optimizers(groups, config.optimizer)
        self._build_schedules()

        self.step = 0
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
        from_rank0(self._claim_run_folder)

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
            device=self.device,
            source_names=list(config.data.sources),
            total_steps=self.num_steps,
            start_step=self.step,
        )
        self._log_summary()

    def _open_run_folder(self) -> tuple[dict[str, Any], dict[str, Parts], checkpoint_files.Start | None]:
        """On rank 0: take the folder and decide, now that nobody else writes to it, what to continue from; list the
        sources for all ranks, at the commits of the run that is continued. Nothing is changed yet."""
        config = self.config
        self.run_folder = RunFolder(config)
        start = checkpoint_files.find_start(config, asdict(self.args))
        saved = {} if start is None or start.model_only else start.state["data"]
        commits = {name: saved.get(f"data.sources.{name}.commit", "") for name in config.data.sources}
        listing = list_sources(config.data, commits)
        fingerprint = data_fingerprint(config.data, config.training, config.debug.seed, self.tokenizer, listing)
        checkpoint_files.check_same_data(start, fingerprint)
        return fingerprint, listing, start

    def _claim_run_folder(self) -> None:
        """On rank 0, once what the run starts from is loaded and nothing can be lost: make the folder this run's."""
        if not self.config.checkpoint.resume and self.config.job.overwrite:
            self.run_folder.clear(self.config)
        else:
            self.run_folder.set_aside_after(self.config, self.step)
        if self.step < self.num_steps:
            self.run_folder.write_config(self.config)

    def _build_model(self) -> None:
        training = self.config.training
        with torch.device("meta"):
            self.model = build_model(self.args).to(getattr(torch, training.dtype))
        check_expected_parameters(self.model, self.config.model.expected_parameters)
        self.data_parallel = parallelize(
            self.model,
            self.device,
            parallelism=self.config.parallelism,
            activation_checkpoint=self.config.activation_checkpoint,
            compile=self.config.compile,
            param_dtype=getattr(torch, training.mixed_precision_param),
            reduce_dtype=getattr(torch, training.mixed_precision_reduce),
            micro_batches=self.micro_batches,
            seed=self.config.debug.seed,
        )
        self.chunk_losses = compiled(chunk_losses, "loss", self.config.compile)

    def _build_schedules(self) -> None:
        training, optimizer = self.config.training, self.config.optimizer
        self.learning_rate = Schedule(self.config.lr_scheduler, training)
        self.weight_decay = TokenSwitch(
            optimizer.weight_decay, optimizer.final_weight_decay, optimizer.weight_decay_switch_tokens
        )
        self.z_loss = TokenSwitch(training.z_loss, 0.0, training.z_loss_until_tokens)
        # A tensor, so that a change of its value is no reason to compile anything again.
        self.z_coefficient = torch.zeros((), device=self.device)

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
            RunError: a loss is not finite, or a checkpoint or the metrics could not be written.
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
            # The first step of a process warms up and compiles: its time is nobody else's.
            if self.step == first_step or self.metrics.should_flush(self.step):
                self.flush_metrics()
            if self.should_save(stopping):
                self.save()
            if stopping:
                raise Interrupted(f"stopped by {self.stop.reason or 'another rank'} after step {self.step}")
            if self.step % self.config.training.gc_freq == 0:
                gc.collect(1)
        logger.info(f"Training completed: {self.step} steps, {self.tokens_seen:,} tokens")

    def train_step(self) -> bool:
        """One optimizer step. Returns whether any rank was asked to stop, the same on every rank."""
        index = self.step - 1  # schedules count from 0
        torch.manual_seed(derive_seed(self.config.debug.seed, "step", index))
        started = time.perf_counter()
        batch = self._next_batch()
        data_wait = time.perf_counter() - started
        self.lane_states = batch.lane_states

        counts = [*self._supervised_tokens(batch), bool(self.stop), *batch.filtered.flatten().tolist()]
        counts = sum_over_ranks(counts)
        num_sources = len(self.source_tokens)
        source_counts, stop_requests, filtered = counts[:num_sources], counts[num_sources], counts[num_sources + 1 :]
        num_tokens = sum(source_counts)
        weight_decay = self.weight_decay(self.tokens_seen)
        self.z_coefficient.fill_(self.z_loss(self.tokens_seen))
        self.optimizers.set_lr(self.learning_rate.lr_factor(index))
        self.optimizers.set_weight_decay(weight_decay)

        num_loops = self.loops.num_loops(index)
        self.optimizers.zero_grad()
        sums = self.forward_backward(batch, num_tokens, num_loops)
        grad_norm = self._clip()
        self.optimizers.step()

        self.tokens_seen += num_tokens
        for name, count in zip(self.source_tokens, source_counts, strict=True):
            self.source_tokens[name] += count
        self.metrics.record(
            StepRecord(
                step=self.step,
                sums=sums,
                grad_norm=grad_norm,
                source_counts=source_counts,
                tokens_seen=self.tokens_seen,
                source_tokens=dict(self.source_tokens),
                lr=self.optimizers.lr(),
                weight_decay=weight_decay,
                num_loops=num_loops or self.args.num_loops,
                flops=num_tokens
                * self.model.flops_per_token(self.config.training.seq_len, num_loops, self.loops.backprop_loops),
                data_wait=data_wait,
                filtered=count_by_reason(list(self.source_tokens), filtered),
                source_wait=batch.read_seconds,
                extra={"batch_sha256": self._batch_sha256(batch)} if self.config.debug.hash_batches else {},
            )
        )
        return stop_requests > 0

    def _next_batch(self) -> Batch:
        """This rank's batch, when every rank has one. While one has not, the others neither hang nor time out.

        Raises on all ranks alike:
            UserError, ReadError: the first of those that a rank met.
            Interrupted: asked to stop while a rank was waiting for data.
        """
        fetch = Fetch(self.loader)
        while True:
            fetch.join(min(self.config.data.streaming.report_seconds, MAX_SECONDS_ALONE))
            waiting, failed, stopping = sum_over_ranks([fetch.is_alive(), fetch.error is not None, bool(self.stop)])
            if failed:
                raise first_error(fetch.error)
            if not waiting:
                return fetch.batch
            if stopping:
                raise Interrupted(f"stopped by {self.stop.reason or 'another rank'} while waiting for data")
            logger.warning(f"Step {self.step} waits for the data of ranks {ranks_where(fetch.is_alive())}")

    def forward_backward(self, batch: Batch, num_tokens: int, num_loops: int | None = None) -> Tensor:
        """Accumulate the gradients of this rank's share of a global batch with `num_tokens` supervised tokens.

        `num_loops`: passes over the looped stack; default: as the model is configured.

        Returns:
            fp32 (2 + num_sources,), sums over this rank's tokens: cross-entropy, weighted z-loss, and the
            cross-entropy of each source.
        """
        training = self.config.training
        sums = torch.zeros(2 + len(self.source_tokens), device=self.device)
        positions = [] if batch.positions is None else [batch.positions]
        tensors = (batch.inputs, batch.labels, batch.sources, *positions)
        micro_batches = zip(*(t.split(training.local_batch_size) for t in tensors), strict=True)
        for i, micro_batch in enumerate(micro_batches):
            inputs, labels, sources, *positions = (t.to(self.device, non_blocking=True) for t in micro_batch)
            documents = self._documents(inputs, labels, *positions)
            with self.data_parallel.micro_batch(last=i == self.micro_batches - 1):
                # (batch, seq, dim)
                hidden = self.model(inputs, num_loops, self.loops.backprop_loops, documents)
                losses = chunked_cross_entropy(
                    hidden.flatten(0, 1),
                    self.model.head_weight,
                    labels.flatten(),
                    z_coefficient=self.z_coefficient,
                    chunk_tokens=training.loss_chunk_tokens,
                    chunk=self.chunk_losses,
                )
                (losses.loss_sum / num_tokens).backward()
            sums[0] += losses.ce.sum()
            sums[1] += self.z_coefficient * losses.z.sum()
            # Rows without a source (-1) have no supervised token and add zero to whichever entry they meet.
            sums[2:].index_add_(0, sources.clamp(min=0), losses.ce.view_as(labels).sum(1))
        return sums

    def _documents(self, inputs: Tensor, labels: Tensor, positions: Tensor | None = None) -> Documents | None:
        """The documents of a micro-batch, if they are kept apart; `positions` if its batch has them."""
        if not self.config.data.isolates_documents:
            return None
        if positions is None:
            positions = positions_by_eos(inputs, self.tokenizer.eos_id)
        return documents_at(positions, labels == IGNORED_LABEL)

    def _clip(self) -> Tensor:
        """Clip the gradients by their global norm, and return it: summed in fp64, since fp32 sums of a million squares
        differ by 1e-4 with the number of shards."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        norms = [torch.linalg.vector_norm(parameter.grad, dtype=torch.float64) for parameter in parameters]
        grad_norm = torch.linalg.vector_norm(torch.stack(norms)).float()
        torch.nn.utils.clip_grads_with_norm_(parameters, self.config.training.max_norm, grad_norm)
        return grad_norm.full_tensor() if isinstance(grad_norm, DTensor) else grad_norm

    def _supervised_tokens(self, batch: Batch) -> list[int]:
        """This rank's supervised tokens by source."""
        by_row = (batch.labels != IGNORED_LABEL).sum(1)
        return [int(by_row[batch.sources == source].sum()) for source in range(len(self.source_tokens))]

    def _batch_sha256(self, batch: Batch) -> str:
        digests: list[list[bytes]] = [[] for _ in range(self.world_size)]
        dist.all_gather_object(digests, batch_digests(batch))
        return combine_digests([digest for rank in digests for digest in rank])

    def flush_metrics(self) -> None:
        """Write out the metrics, and stop when they show that training has failed."""
        failed_step = self.metrics.flush()
        if failed_step is not None:
            newest = f"the newest checkpoint is of step {self.last_saved}" if self.last_saved else "nothing was saved"
            raise RunError(f"the loss or the gradient norm of step {failed_step} is not finite; {newest}")

    def should_save(self, stopping: bool) -> bool:
        checkpoint = self.config.checkpoint
        due = stopping or self.step == self.num_steps or self.step % checkpoint.interval == 0
        return checkpoint.enable and due

    def save(self) -> None:
        """Save everything that the next step depends on."""
        self.flush_metrics()
        self.metrics.sync()
        self.checkpoints.save(self.step, self._state())
        self.last_saved = self.step
        self.metrics.reset_clock()

    def _state(self) -> dict[str, Any]:
        lanes: list[dict[int, str]] = [{} for _ in range(self.world_size)]
        dist.all_gather_object(lanes, self.lane_states)
        return {
            "step": self.step,
            "tokens_seen": self.tokens_seen,
            "source_tokens": self.source_tokens,
            "seed": self.config.debug.seed,  # every random stream derives from it and the step
            "model": {"name": self.config.model.name, "args": asdict(self.args)},
            "data": self.data_fingerprint,
            "lanes": {lane: json.loads(state) for states in lanes for lane, state in states.items()},
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

    def close(self) -> None:
        """Stop the data workers, finish the logs, leave the process group."""
        self.loader.close()
        self.metrics.close()
        if self.run_folder is not None:
            self.run_folder.close()
        mesh = self.data_parallel.mesh
        self.model = self.optimizers = self.checkpoints = self.data_parallel = None
        leave_process_group(mesh)
