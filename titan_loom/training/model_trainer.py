"""The model of a run and what is done to it in a step: its layout, its optimizers, forward and backward.

Losses are sums divided by the supervised tokens of the whole global batch, and gradients are summed over ranks and
micro-batches, so that neither depends on how the batch is spread.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from titan_loom.config import JobConfig
from titan_loom.data.lanes import IGNORED_LABEL
from titan_loom.data.loader import Batch
from titan_loom.distributed.compile import compiled
from titan_loom.distributed.parallelize import parallelize
from titan_loom.models import build_model, model_args
from titan_loom.models.interface import Observer, Segment
from titan_loom.optim.clipping import clip_gradients
from titan_loom.optim.groups import assign_groups
from titan_loom.optim.optimizers import Optimizers
from titan_loom.optim.schedules import Schedule, TokenSwitch
from titan_loom.tools.inspect import check_expected_parameters
from titan_loom.training import batches
from titan_loom.training.batches import MicroBatch
from titan_loom.training.diagnostics import GradientObserver, diagnose
from titan_loom.training.guard import Guard
from titan_loom.training.loops import LoopPlan
from titan_loom.training.loss import chunk_losses, chunked_cross_entropy
from titan_loom.training.metrics import SegmentRecord


class ModelTrainer:
    """Trains a model on the batches that it is given; knows nothing of data, folders and checkpoints.

    Needs the process group. After `build_model` the parameters are to be allocated, then comes `build_optimizers`: so a
    mistake is found before the memory is taken.

    Args:
        document_eos: the token that ends a document, if documents inside a sequence are to be kept apart.
    """

    def __init__(self, config: JobConfig, device: torch.device, document_eos: int | None):
        training = config.training
        self.config, self.device, self.document_eos = config, device, document_eos
        self.step = 0
        self.num_sources = len(config.data.sources)
        self.micro_batches = training.global_batch_size // (training.local_batch_size * dist.get_world_size())
        self.args = model_args(config.model)
        self.loops = LoopPlan(config.model, training, self.args, config.debug.seed)
        self.guard = Guard(config.guard)

    def build_model(self) -> None:
        """Build the model on the meta device and lay it out over the processes."""
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
            float8=self.config.float8,
            param_dtype=getattr(torch, training.mixed_precision_param),
            reduce_dtype=getattr(torch, training.mixed_precision_reduce),
            cpu_offload=training.enable_cpu_offload,
            micro_batches=self.micro_batches,
        )
        self.loss = partial(
            chunked_cross_entropy,
            chunk_tokens=training.loss_chunk_tokens,
            chunk=compiled(chunk_losses, "loss", self.config.compile),
        )

    def build_optimizers(self) -> None:
        """Build the optimizers of the allocated parameters, and what changes during the run."""
        training, optimizer = self.config.training, self.config.optimizer
        groups = assign_groups(self.model.named_parameters(), self.model.group_rules())
        self.optimizers = Optimizers(groups, optimizer)
        self.learning_rate = Schedule(self.config.lr_scheduler, training)
        self.weight_decay = TokenSwitch(
            optimizer.weight_decay, optimizer.final_weight_decay, optimizer.weight_decay_switch_tokens
        )
        self.z_loss = TokenSwitch(training.z_loss, 0.0, training.z_loss_until_tokens)
        # A tensor, so that a change of its value is no reason to compile anything again.
        self.z_coefficient = torch.zeros((), device=self.device)

    def train_segments(self, batch: Batch, num_tokens: int, num_loops: int | None) -> list[SegmentRecord]:
        """Train on this rank's share of a global batch with `num_tokens` supervised tokens, segment by segment.

        The routers' balance follows the experts' load of the whole step. A segment whose loss is a spike is not trained
        on, and ends the step.
        """
        rows = self.config.training.local_batch_size
        micro_batches = batches.micro_batches(batch, rows, self.device, self.document_eos)
        measured, observer = self._diagnose(micro_batches[0], num_loops)
        records, loads = [], []
        for i, segment in enumerate(self.loops.segments(num_loops)):
            self.optimizers.zero_grad()
            sums, load = self.forward_backward(micro_batches, num_tokens, num_loops, segment, observer)
            grad_norm = clip_gradients(self.model, self.config.training.max_norm)
            spike = self.guard.judge(self.step, i, sums[:3].sum(), num_tokens, grad_norm)
            records.append(SegmentRecord(segment, sums, grad_norm, spike, measured if i == 0 else {}))
            if spike is not None:
                return records
            self.optimizers.step()
            loads += [] if load is None else [load]
        if loads:
            load = torch.stack(loads).sum(0)
            dist.all_reduce(load)
            self.model.balance_experts(load)
        return records

    def forward_backward(
        self,
        micro_batches: list[MicroBatch],
        num_tokens: int,
        num_loops: int | None,
        segment: Segment | None,
        observer: Observer | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Accumulate the gradients of one segment of loops (None: all of them) over this rank's micro-batches, the
        first of which `observer` sees.

        Returns:
            sums: fp32 (3 + num_sources,), over this rank's tokens: cross-entropy, weighted z-loss, weighted z-loss of
                the routers, and the cross-entropy of each source.
            load: int64 (layers, experts), this rank's tokens at each expert; None without experts.
        """
        sums = torch.zeros(3 + self.num_sources, device=self.device)
        load = None
        for i, micro_batch in enumerate(micro_batches):
            with self.data_parallel.micro_batch(last=i == len(micro_batches) - 1):
                output = self.model(
                    micro_batch.inputs,
                    num_loops,
                    self.loops.backprop_loops,
                    micro_batch.documents,
                    segment=segment,
                    carried=micro_batch.carried,
                    observer=observer if i == 0 else None,
                )
                losses = self.loss(
                    output.hidden, self.model.head_weight, micro_batch.labels, z_coefficient=self.z_coefficient
                )
                router_z = torch.zeros((), device=self.device)
                if output.router_z is not None:
                    supervised = micro_batch.labels != IGNORED_LABEL
                    router_z = self.config.training.router_z_loss * (output.router_z * supervised).sum()
                ((losses.loss_sum + router_z) / num_tokens).backward()
            micro_batch.carried = output.carried
            if output.expert_load is not None:
                load = output.expert_load.long() if load is None else load + output.expert_load.long()
            sums[0] += losses.ce.sum()
            sums[1] += self.z_coefficient * losses.z.sum()
            sums[2] += router_z.detach()
            sums[3:] += micro_batch.source_sums(losses.ce, self.num_sources)
        return sums, load

    def _diagnose(
        self, micro_batch: MicroBatch, num_loops: int | None
    ) -> tuple[dict[str, Tensor], GradientObserver | None]:
        """What `[diagnostics]` wants to know in this step, and who adds to it while the step is taken."""
        config = self.config.diagnostics
        if not config.enable or self.step % config.interval:
            return {}, None
        measured = diagnose(self.model, self.data_parallel, micro_batch, num_loops, self.loss)
        return measured, GradientObserver(measured) if config.gradients else None

    def flops_per_token(self, num_loops: int | None, segments: list[SegmentRecord]) -> int:
        """Of a step that trained `segments`, forward and backward."""
        seq_len, backprop_loops = self.config.training.seq_len, self.loops.backprop_loops
        return sum(
            self.model.flops_per_token(seq_len, num_loops, backprop_loops, record.segment) for record in segments
        )
