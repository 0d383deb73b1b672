"""Trains a tiny looped model in any layout, on batches drawn from the step, and counts what is communicated.

The global batch of a step is the same in every layout; each process takes its rows, each micro-batch its part of them.
"""

import hashlib
from collections import Counter
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from titan_loom.config import (
    ActivationCheckpoint,
    Compile,
    ControlsGroup,
    EmbeddingsGroup,
    Float8,
    MuonGroup,
    NgramGroup,
    Parallelism,
)
from titan_loom.config import Optimizer as OptimizerConfig
from titan_loom.distributed.compile import compiled
from titan_loom.distributed.init import materialize
from titan_loom.distributed.parallelize import parallelize
from titan_loom.models import build_model
from titan_loom.models.interface import Segment
from titan_loom.models.loom.args import LoomArgs
from titan_loom.models.nanocoder.args import NanoCoderArgs
from titan_loom.optim.groups import assign_groups
from titan_loom.optim.optimizers import Optimizers
from titan_loom.training.loss import chunk_losses, chunked_cross_entropy

# The nanocoder's schedule; neither the vocabulary nor the width divides by 2.
ARGS = NanoCoderArgs(
    vocab_size=61,
    dim=23,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    ffn_dim=20,
    prelude=2,
    loop=3,
    coda=3,
    num_loops=2,
    ngram_rows=53,
    ngram_dim=5,
    max_seq_len=32,
)
# Neither the width nor the number of experts divides by the processes. Four have a stack of experts by rows.
LOOM_ARGS = LoomArgs(
    vocab_size=61,
    dim=23,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    num_experts=3,
    num_shared_experts=1,
    top_k=2,
    expert_dim=12,
    num_loops=3,
    max_seq_len=32,
)
BATCH, SEQ = 16, 16
CLIP = 0.2  # below every gradient norm


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a run is laid out; the defaults are one process without anything."""

    world_size: int = 1
    replicate: int = 1
    micro_batches: int = 1
    reshard: str = "default"
    loop_unit: str = "auto"
    checkpoint: str = "none"
    per: str = "visit"
    compile: bool = False
    backend: str = "aot_eager"
    cpu_offload: bool = False
    float8: bool = False
    num_loops: int | None = None
    backprop_loops: int | None = None
    segment_loops: int = 0
    param_dtype: torch.dtype | None = None
    optimizer: str = "AdamW"
    args: NanoCoderArgs | LoomArgs = ARGS

    def segments(self) -> list[Segment | None]:
        """What a step trains in turn; None is all loops at once."""
        total, size = self.num_loops or self.args.num_loops, self.segment_loops
        return [Segment(start, min(start + size, total)) for start in range(0, total, size)] if size else [None]

    def __str__(self) -> str:
        changed = {key: value for key, value in vars(self).items() if value != getattr(Layout, key)}
        return " ".join(f"{key}={value}" for key, value in changed.items()) or "one process"


class Run:
    """A model and its optimizers in `layout`, in the process group that there is."""

    def __init__(self, layout: Layout, dtype: torch.dtype = torch.float32):
        self.layout = layout
        compile = Compile(enable=layout.compile, backend=layout.backend)
        with torch.device("meta"):
            self.model = build_model(layout.args).to(dtype)
        self.data_parallel = parallelize(
            self.model,
            torch.device("cpu"),
            parallelism=Parallelism(
                data_parallel_replicate_degree=layout.replicate,
                fsdp_reshard_after_forward=layout.reshard,
                fsdp_loop_unit=layout.loop_unit,
            ),
            activation_checkpoint=ActivationCheckpoint(mode=layout.checkpoint, per=layout.per),
            compile=compile,
            float8=Float8(enable=layout.float8, emulate=True),
            param_dtype=layout.param_dtype or dtype,
            reduce_dtype=dtype,
            cpu_offload=layout.cpu_offload,
            micro_batches=layout.micro_batches,
        )
        materialize(self.model, torch.device("cpu"), 0)
        self.chunk = compiled(chunk_losses, "loss", compile)
        groups = assign_groups(self.model.named_parameters(), self.model.group_rules())
        self.optimizers = Optimizers(
            groups,
            OptimizerConfig(
                name=layout.optimizer,
                lr=0.002,
                muon=MuonGroup(lr=0.002, ns_dtype="float32"),
                embeddings=EmbeddingsGroup(lr=0.002),
                ngram=NgramGroup(lr=0.002),
                controls=ControlsGroup(lr=0.002),
            ),
        )

    def weights_sha256(self) -> str:
        digest = hashlib.sha256()
        for _, parameter in self.model.named_parameters():
            digest.update(whole(parameter).contiguous().numpy().tobytes())
        return digest.hexdigest()

    def forward_backward(self, step: int, segment: Segment | None = None, carried: list[tuple] | None = None) -> float:
        """Gradients of the global batch of `step`; returns its loss. `carried` is what the segment before has left of
        each micro-batch, and then what this one leaves."""
        carried = [()] * self.layout.micro_batches if carried is None else carried
        layout, total = self.layout, torch.zeros((), dtype=torch.float64)
        tokens, labels = global_batch(step)
        num_tokens = int((labels != -100).sum())
        mine = slice(*(BATCH // dist.get_world_size() * (dist.get_rank() + i) for i in (0, 1)))
        parts = (t[mine].chunk(layout.micro_batches) for t in (tokens, labels))
        for i, (inputs, targets) in enumerate(zip(*parts, strict=True)):
            with self.data_parallel.micro_batch(last=i == layout.micro_batches - 1):
                output = self.model(
                    inputs, layout.num_loops, layout.backprop_loops, segment=segment, carried=carried[i]
                )
                losses = chunked_cross_entropy(
                    output.hidden,
                    self.model.head_weight,
                    targets,
                    z_coefficient=torch.tensor(1e-4),
                    chunk_tokens=48,
                    chunk=self.chunk,
                )
                (losses.loss_sum / num_tokens).backward()
            carried[i] = output.carried
            if output.expert_load is not None:
                self.load += output.expert_load
            total += losses.loss_sum.detach() / num_tokens
        dist.all_reduce(total)
        return total.item()

    def step(self, step: int) -> tuple[float, float]:
        """One step, with an optimizer step for each segment of loops; returns the loss and the gradient norm, before
        clipping, of the last of them."""
        carried, has_experts = [()] * self.layout.micro_batches, hasattr(self.model, "balance_experts")
        if has_experts:
            self.load = torch.zeros_like(self.model.router_bias_steps)
        self.optimizers.set_lr(min(1, (step + 1) / 4))
        for segment in self.layout.segments():
            self.optimizers.zero_grad()
            loss = self.forward_backward(step, segment, carried)
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
            self.optimizers.step()
        if has_experts:
            dist.all_reduce(self.load)
            self.model.balance_experts(self.load)
        return loss, whole(norm).item()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor of a DTensor, detached."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def global_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels of a step, (batch, seq) each; rows differ in how many labels are ignored."""
    stream = torch.randint(0, 61, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(step % 5))
    labels = stream[:, 1:].clone()
    for row in range(BATCH):
        labels[row, :row] = -100
    return stream[:, :-1], labels


class Collectives(TorchDispatchMode):
    """Counts collectives, and the bytes of the largest tensor of each."""

    KINDS = ("all_gather", "reduce_scatter", "all_reduce")
    supports_higher_order_operators = True

    def __init__(self):
        super().__init__()
        self.count, self.bytes = Counter(), Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # without it torch compiles nothing while the mode is on, and says nothing

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace in ("c10d", "_c10d_functional"):
            name = op.name().replace("allgather", "all_gather").replace("allreduce", "all_reduce")
            kind = next((kind for kind in self.KINDS if kind in name), name)
            flat = torch.utils._pytree.tree_leaves((args, kwargs))
            self.count[kind] += 1
            self.bytes[kind] += max(t.nbytes for t in flat if isinstance(t, torch.Tensor))
        return op(*args, **(kwargs or {}))


def train(layouts: list[Layout], steps: int) -> list[dict]:
    """Train each of `layouts`, of as many processes as there are, one after another."""
    dist.init_process_group("gloo")
    results = []
    for layout in layouts:
        torch._dynamo.reset()
        run = Run(layout)
        sha256 = run.weights_sha256()
        losses, norms = zip(*(run.step(step) for step in range(steps)), strict=True)
        buffers = {name: buffer.tolist() for name, buffer in run.model.named_buffers()}
        results.append({"initial": sha256, "losses": losses, "norms": norms, "buffers": buffers})
    dist.destroy_process_group()
    return results
