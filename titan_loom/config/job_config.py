"""One dataclass per TOML section; `JobConfig` holds them all.

The docstring under a field is its manual: `--help` prints it. Names follow TorchTitan v0.2.2 where the meaning is the
same. Nothing here needs torch, so a configuration is read and checked before any worker starts.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from titan_loom.config.bounds import (
    AboveOne,
    AboveOneOrInfinite,
    BelowHundred,
    BelowOne,
    Fraction,
    NotNegative,
    Positive,
    PositiveOrInfinite,
    at_most,
)

MAX_SECONDS = at_most(10**9)  # longer ones are beyond what the libraries can wait


@dataclass(frozen=True, kw_only=True)
class Job:
    config_file: str | None = None
    """TOML file that describes the run (command line only)."""

    dump_folder: str | None = None
    """Folder of everything the run writes. Default: `./outputs/<config file's stem>`, from the caller's folder."""

    description: str = ""
    """One line for the log."""

    overwrite: bool = False
    """Let `checkpoint.resume = false` delete the checkpoints and metrics that `dump_folder` already holds."""


@dataclass(frozen=True, kw_only=True)
class Model:
    name: str = "nanocoder"
    """Model family."""

    flavor: str = "debug"
    """Named size and variant within the family."""

    tokenizer_path: str | None = None
    """Folder with `tokenizer.json`. Default: the 8,192-entry tokenizer that ships with titan_loom."""

    expected_parameters: Positive[int] | None = None
    """Refuse to start unless the model has exactly this many parameters (a tied head counts once)."""

    loop_sampling: Literal["fixed", "uniform", "poisson-lognormal"] = "fixed"
    """Passes over the looped stack: always `model.args.num_loops`, or drawn for every step from the seed and the step.
    `uniform`: from `loop_sampling_min` to `loop_sampling_max`. `poisson-lognormal` (arXiv 2502.05171): 1 + Poisson(r),
    r log-normal with sigma 0.5 and mean `loop_sampling_mean` - 1, then cut to the same range."""

    loop_sampling_min: Positive[int] = 1
    """Fewest loops drawn."""

    loop_sampling_max: Positive[int] | None = None
    """Most loops drawn; needed unless `loop_sampling` is `fixed`. Memory and time have to suffice for it."""

    loop_sampling_mean: AboveOne[float] | None = None
    """Mean of `poisson-lognormal` before the cut, above 1. Default: `model.args.num_loops`."""

    args: dict[str, Any] = field(default_factory=dict)
    """`[model.args]`: any field of the flavor, overridden (`--model.args.num_loops 4`); checked for name and type."""


@dataclass(frozen=True, kw_only=True)
class Source:
    path: str = ""
    """`embedded:code` or `embedded:prose` (made from the running Python's standard library), a local file or folder
    (parquet, jsonl, text, a pack of `titan-loom pack`), or a dataset on the Hub as `owner/name`."""

    pack: str | None = None
    """Folder of the source's pack: before the run the source is tokenised into it, unless that was done, and then read
    from it. A pack of other files or settings is refused. Once it is made, the Hub is not asked for anything."""

    config: str | None = None
    """Configuration (subset) of a Hub dataset, as its card names them. Default: the card's default, or all files."""

    split: str = "train"
    """Split of a Hub dataset."""

    revision: str | None = None
    """Branch, tag or commit of a Hub dataset; resolved once, recorded in the checkpoint and reused. Default: `main`."""

    format: str = "text"
    """How a row becomes documents: `text` (column `text`), `repository` (`repo_path` and `files`, the layout of
    stack-v3) or `file` (`file_path` and `content`; what a folder of text files gives)."""

    share: Positive[float] = 1.0
    """Share of the run's supervised tokens, relative to the other shares. Exact: read as a decimal fraction."""

    encode_batch_size: Annotated[Positive[int], at_most(1 << 16)] = 16
    """Documents per tokenizer call. Affects speed and memory only, never the tokens."""

    languages: list[str] = field(default_factory=list)
    """Keep documents in these languages only, in any case of letters (`Python, rust`). For files: the column
    `language`, else the file's name; for text: the column `language`."""

    min_chars: NotNegative[int] = 0
    """Drop documents with less content than this many characters."""

    max_chars: Positive[int] | None = None
    """Drop documents with more content than this many characters."""

    licenses: list[str] = field(default_factory=list)
    """Keep documents under these licences only, in any case of letters (`MIT, Apache-2.0`). One without a licence is
    dropped, and one with several unless all are in the list."""

    license_column: str = "license"
    """Column that holds the licence, a string or a list of strings; `files.license` is the field of each file."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    tokens: Positive[int] | None = None
    """Length in supervised tokens. It ends before the first sequence (or step, as `data.mix_unit`) that begins at or
    after them. Only the last may leave it out, which lasts to the end of the run."""

    shares: dict[str, NotNegative[float]] = field(default_factory=dict)
    """Share of each source in place of its own; a source that is not named gives nothing. Each stage is mixed on its
    own, exactly."""


@dataclass(frozen=True, kw_only=True)
class Streaming:
    read_timeout_seconds: Annotated[Positive[float], MAX_SECONDS] = 60.0
    """Seconds that one request to the Hub (for at most 4 MiB) may take before it is given up and made again."""

    failures_per_hour: NotNegative[int] = 60
    """Failed requests that a process forgives each source within an hour, after which the run ends. Waiting times
    double from 1 s to 60 s, so that an outage of about an hour is survived."""

    report_seconds: Annotated[Positive[float], MAX_SECONDS] = 30.0
    """A read that takes longer is named in the log, and again each time that so many seconds have passed."""


@dataclass(frozen=True, kw_only=True)
class Data:
    lanes: Positive[int] = 4
    """Independent token streams. A divisor of the global batch and a multiple of the data-parallel degree; part of the
    data's definition: another number of lanes is another order."""

    window: Annotated[Positive[int], at_most(1 << 20)] = 256  # rows in memory
    """Rows that are shuffled together. Larger mixes better and holds more rows in memory: per lane, source, part."""

    open_parts: Positive[int] = 2
    """Parts of a source that a lane reads in turn."""

    mix_unit: Literal["sequence", "step"] = "sequence"
    """What the sources are mixed in: one `sequence` (every batch holds every source in its share) or one `step`."""

    packing: Literal["stream", "first_fit"] = "stream"
    """How documents become sequences. `stream`: laid end to end and cut, no token is lost. `first_fit`: cut into chunks
    of at most seq_len + 1 tokens, of which a sequence takes whole ones, each as a document of its own, and the rest is
    padding. Shares then are shares of sequences, and the length of the run is given in steps."""

    document_mask: bool = False
    """Keep the documents of a sequence apart: attention, positions and n-grams stop at their ends. Batches, labels and
    token counts stay as they are. With `packing = "first_fit"` they are always apart."""

    holdout_percent: BelowHundred = 0.0
    """Percentage of the documents that are never trained on, chosen by a hash of each document's key: the same ones
    whether a source is streamed or packed, whatever the seed."""

    stages: list[Stage] = field(default_factory=list)
    """`[[data.stages]]`: shares that change during the run, in order. Empty: the sources' own shares all along."""

    streaming: Streaming = field(default_factory=Streaming)

    sources: dict[str, Source] = field(default_factory=dict)
    """`[data.sources.<name>]`: where documents come from. Order matters: it breaks ties of the mixing."""

    @property
    def isolates_documents(self) -> bool:
        """Whether the documents of a sequence are kept apart."""
        return self.document_mask or self.packing == "first_fit"


@dataclass(frozen=True, kw_only=True)
class Dataloader:
    num_workers: NotNegative[int] = 0
    """Processes per rank that read and tokenise. Lowered, with a log line, to a divisor of the rank's lanes. 0: in the
    training process."""

    prefetch_factor: Annotated[Positive[int], at_most(1 << 10)] = 2  # asked for one by one before the first comes
    """Steps that every lane of a worker reads ahead (`num_workers > 0`)."""

    pin_memory: bool = True
    """Copy batches through page-locked memory (CUDA only)."""


@dataclass(frozen=True, kw_only=True)
class Training:
    local_batch_size: Positive[int] = 8
    """Sequences per device and micro-batch."""

    global_batch_size: Annotated[Positive[int], at_most(1 << 20)] = 8  # dealt to the sources one by one
    """Sequences per optimizer step over all devices; what exceeds `local_batch_size` x devices is accumulated."""

    seq_len: Positive[int] = 1024
    """Tokens per sequence."""

    steps: Positive[int] | None = None
    """Optimizer steps of the run. Excludes `total_tokens`; one of the two is needed."""

    total_tokens: Positive[int] | None = None
    """Supervised tokens of the run, met exactly: the last step is cut. Excludes `steps`."""

    max_norm: PositiveOrInfinite[float] = 1.0
    """Global gradient norm to clip to."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype of the stored parameters and of the optimizer's state."""

    enable_cpu_offload: bool = False
    """Keep the stored parameters, the reduced gradients and the optimizer's state in the host's memory, and step there:
    a GPU holds no more than gathered weights, accumulated gradients and activations, and waits for the host in every
    step."""

    mixed_precision_param: Literal["float32", "bfloat16"] = "bfloat16"
    """dtype of parameters and activations in forward and backward."""

    mixed_precision_reduce: Literal["float32", "bfloat16"] = "float32"
    """dtype of gradients while they are reduced."""

    z_loss: NotNegative[float] = 0.0
    """Coefficient of mean(logsumexp(logits)^2), added to the loss."""

    z_loss_until_tokens: Positive[int] | None = None
    """Supervised tokens after which the z-loss coefficient is 0."""

    router_z_loss: NotNegative[float] = 0.0
    """Coefficient of mean(logsumexp(router logits)^2), added to the loss (models with experts; arXiv 2202.08906)."""

    loss_chunk_tokens: Positive[int] = 16384
    """Tokens whose logits exist at one time."""

    backprop_loops: Positive[int] | None = None
    """Differentiate the last this many loops only; what runs before them keeps no activations. Default: all."""

    segment_loops: NotNegative[int] = 0
    """Train the loops in segments of this many (the last may be shorter), each with a loss, a backward pass and an
    optimizer step of its own, on from the detached state that the one before left: memory is that of one segment, for
    any number of loops. 0: one backward pass through all. Excludes `backprop_loops`."""

    allow_frozen_prelude: bool = False
    """Accept that `backprop_loops` leaves the layers before the loop without any gradient, for the whole run. They get
    none, rather than zeros: no optimizer moves or decays them."""

    gc_freq: Positive[int] = 50
    """Steps between garbage collections (automatic ones are off: ranks must not pause at different moments)."""

    dataloader: Dataloader = field(default_factory=Dataloader)

    @property
    def tokens_per_step(self) -> int:
        """Supervised tokens of a full step."""
        return self.global_batch_size * self.seq_len

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the run, the cut last one included."""
        if self.total_tokens is not None:
            return -(-self.total_tokens // self.tokens_per_step)
        assert self.steps is not None
        return self.steps


@dataclass(frozen=True, kw_only=True)
class MuonGroup:
    lr: NotNegative[float] = 0.02
    """Peak learning rate of the blocks' matrices."""

    weight_decay: NotNegative[float] | None = None
    """Decoupled weight decay. Default: `[optimizer] weight_decay`."""

    momentum: BelowOne = 0.95
    """Nesterov momentum."""

    ns_steps: Positive[int] = 5
    """Newton-Schulz iterations."""

    ns_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """dtype of the Newton-Schulz iteration, and of the matrices on their way to the rank that runs it."""

    ns_coefficients: Literal["quintic", "polar_express"] = "quintic"
    """Polynomials of the iteration."""

    adjust_lr: Literal["original", "match_rms_adamw"] = "original"
    """Scale of the rate by a matrix's shape: sqrt(max(1, rows / columns)), or 0.2 sqrt(max(rows, columns))."""


@dataclass(frozen=True, kw_only=True)
class EmbeddingsGroup:
    lr: NotNegative[float] = 0.002
    """Peak learning rate of the embedding (and of an untied head)."""

    weight_decay: NotNegative[float] | None = None
    """Decoupled weight decay. Default: `[optimizer] weight_decay`."""


@dataclass(frozen=True, kw_only=True)
class NgramGroup:
    lr: NotNegative[float] = 0.001
    """Peak learning rate of the n-gram memory."""

    weight_decay: NotNegative[float] | None = None
    """Decoupled weight decay, never on `injection_scales`. Default: `[optimizer] weight_decay`."""


@dataclass(frozen=True, kw_only=True)
class ControlsGroup:
    lr: NotNegative[float] = 0.002
    """Peak learning rate of everything with at most one dimension: norms, gates, scales."""

    weight_decay: NotNegative[float] = 0.0
    """Decoupled weight decay."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    name: Literal["Muon", "AdamW"] = "Muon"
    """Optimizer of the blocks' matrices. The other groups use AdamW either way."""

    lr: NotNegative[float] = 8e-4
    """Peak learning rate of the blocks' matrices when `name = "AdamW"`; `[optimizer.muon]` holds Muon's."""

    beta1: BelowOne = 0.9
    """AdamW's decay of the first moment."""

    beta2: BelowOne = 0.95
    """AdamW's decay of the second moment."""

    eps: Positive[float] = 1e-8
    """AdamW's epsilon."""

    weight_decay: NotNegative[float] = 0.1
    """Decoupled weight decay of every group that does not set its own."""

    final_weight_decay: NotNegative[float] | None = None
    """Weight decay once `weight_decay_switch_tokens` have been seen; groups with their own are scaled alike."""

    weight_decay_switch_tokens: Positive[int] | None = None
    """Supervised tokens seen before the first step that uses `final_weight_decay`."""

    implementation: Literal["for-loop", "foreach", "fused"] = "fused"
    """AdamW's implementation."""

    muon: MuonGroup = field(default_factory=MuonGroup)
    embeddings: EmbeddingsGroup = field(default_factory=EmbeddingsGroup)
    ngram: NgramGroup = field(default_factory=NgramGroup)
    controls: ControlsGroup = field(default_factory=ControlsGroup)


@dataclass(frozen=True, kw_only=True)
class LRScheduler:
    warmup_steps: NotNegative[int] | None = None
    """Steps of linear warm-up, the first at 1 / warmup_steps. Excludes `warmup_tokens`. Default: 0. A shorter run
    cuts it to its length."""

    warmup_tokens: NotNegative[int] | None = None
    """Warm-up in supervised tokens, rounded up to steps. Excludes `warmup_steps`."""

    total_steps: Positive[int] | None = None
    """Length of the schedule. Default: the length of the run. Set it when a run will be extended."""

    decay_ratio: Fraction = 0.15
    """Fraction of the steps, at the end, in which the rate decays."""

    decay_type: Literal["linear", "sqrt", "cosine"] = "cosine"
    """Shape of the decay."""

    min_lr_factor: Fraction = 0.0
    """Fraction of the peak rate where the decay ends."""

    decay_end: Literal["after_last_step", "last_step"] = "after_last_step"
    """Where `min_lr_factor` is reached: `after_last_step` lets the last step still learn when it is 0."""


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    data_parallel_replicate_degree: Positive[int] = 1
    """Copies of the parameters. With `data_parallel_shard_degree` = 1 this is DDP, with more it is HSDP."""

    data_parallel_shard_degree: int = -1
    """Ranks that share one copy of the parameters (FSDP2); -1: all that the copies leave."""

    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """When gathered parameters are freed: `never` before backward has used them last, once for each optimizer step (one
    all-gather); `always` after forward too, for a looped block after its last visit, and in every micro-batch (two
    all-gathers, less memory). `default`: `never` while all parameters gathered take at most 4 GiB, else `always`."""

    fsdp_loop_unit: Literal["auto", "block", "stack"] = "auto"
    """What of the looped stack is communicated together: each `block` (large ones overlap with computation), or the
    whole `stack` (fewer messages). `auto`: the stack while it takes at most 64 MiB."""

    expected_world_size: Positive[int] | None = None
    """Refuse to start with any other number of processes."""


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpoint:
    mode: Literal["none", "full", "selective"] = "none"
    """What backward computes again rather than keeps: nothing, everything, or all but the results of matrix products
    and attention."""

    per: Literal["visit", "loop"] = "visit"
    """What `full` computes again at a time. `visit`: memory grows by one hidden state for each execution of a layer.
    `loop`: one for each pass over the looped stack, but that pass's activations exist together."""


@dataclass(frozen=True, kw_only=True)
class Compile:
    enable: bool = False
    """Compile with torch.compile; one graph serves all blocks, the loop stays in eager. Kernels are kept between runs
    in torch's cache (`TORCHINDUCTOR_CACHE_DIR`, by default in the temporary folder)."""

    components: list[Literal["model", "loss"]] = field(default_factory=lambda: ["model", "loss"])
    """What is compiled: the blocks, the loss of a chunk of tokens."""

    backend: str = "inductor"
    """torch.compile's backend."""

    mode: Literal["default", "reduce-overhead", "max-autotune-no-cudagraphs"] = "default"
    """torch.compile's mode, for `backend = "inductor"`. `reduce-overhead` replays the blocks as CUDA graphs, for models
    so small that a GPU waits for the host, and takes memory for it; on a CPU it is `default`."""


@dataclass(frozen=True, kw_only=True)
class Float8:
    enable: bool = False
    """Compute the blocks' linear layers in float8, except what `filter_fqns` names. Pays for large layers on a GPU that
    has it, compiled. Needs torchao (`pip install 'titan-loom[float8]'`)."""

    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    """How values are scaled: one factor for a tensor (fastest), one for a row, one for a row and weight gradients in
    full precision (most accurate)."""

    filter_fqns: list[str] = field(default_factory=list)
    """Leave out linear layers with one of these in their name (`attention.output, feed_forward`). Those with a
    dimension that is no multiple of 16 are left out too, and counted in the log."""

    emulate: bool = False
    """Give float8's numbers on a device that does not have it, slowly."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    enable: bool = True
    """Save checkpoints. The last step is always saved."""

    folder: str = "checkpoint"
    """Folder of the checkpoints inside `[job] dump_folder`."""

    interval: Positive[int] = 500
    """Steps between checkpoints."""

    keep_latest_k: NotNegative[int] = 10
    """Complete checkpoints to keep, snapshots not counted; 0 keeps all, else at least 2. The newest regular one, which
    `[guard]` goes back to, stays whatever a stop or a milestone has saved since."""

    snapshot_interval: NotNegative[int] = 0
    """Checkpoints of the multiples of this are snapshots, which `keep_latest_k` leaves alone; a multiple of `interval`.
    0: none."""

    keep_latest_snapshots: NotNegative[int] = 0
    """Snapshots to keep; 0 keeps all. The two newest checkpoints stay, whatever they are."""

    load_step: int = -1
    """Step to resume from; -1 is the newest complete one."""

    resume: bool = True
    """Continue what `dump_folder` holds. If false, a folder with checkpoints is an error without `job.overwrite`."""

    initial_load_path: str | None = None
    """Checkpoint (a `step-N` folder) to start from when there is nothing to resume, or `hf://owner/name[@revision]`: an
    export on the Hub or, without `initial_load_model_only`, the training state that lies beside it."""

    initial_load_model_only: bool = True
    """Take only the weights from `initial_load_path`, not optimizers, data position and counters."""

    last_save_in_hf: bool = False
    """When the run is over, export its last checkpoint for transformers, as `titan-loom convert to-hf` does, to
    `hf/step-N` inside `[job] dump_folder`. Needs the extra `export`."""

    export_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """dtype of the weights in exports."""


@dataclass(frozen=True, kw_only=True)
class Hub:
    repo_id: str | None = None
    """Repository on the Hub, `owner/name`, that milestones are pushed to, as exports with a tag each; it is made when
    there is none. The token is the one that `hf auth login` or `HF_TOKEN` gives. Needs the extra `export`."""

    private: bool = True
    """Whether a repository that is made can be seen by its owner only."""

    milestones: list[str] = field(default_factory=lambda: [f"{percent}%" for percent in range(5, 101, 5)])
    """When: `"25%"` of the steps (tag `checkpoint-025pct`), `"1000 steps"` (`checkpoint-1000steps`) or
    `"2_000_000 tokens"` (`checkpoint-2000000tokens`; rounded up to a step). A checkpoint is saved there as well."""

    push_training_state: bool = False
    """Push optimizers, data position and counters too, as safetensors and JSON in `training_state/`, so that another
    machine can go on. Two to three times the size of the weights in fp32."""

    resume: bool = False
    """Go on from the training state in `repo_id` when it is newer than what `job.dump_folder` holds."""

    overwrite: bool = False
    """Replace what another run has pushed to `repo_id`."""

    flush_seconds: Annotated[NotNegative[float], MAX_SECONDS] = 600.0
    """How long the end of the run waits for what is not pushed yet. The next start pushes the rest."""

    timeout_seconds: Annotated[Positive[float], MAX_SECONDS] = 60.0
    """Silence of the Hub after which a request has failed. It is tried again while the run goes on."""


@dataclass(frozen=True, kw_only=True)
class Guard:
    enable: bool = False
    """Do not train on spikes of the loss, judged for each segment of loops against the average of those accepted
    before it. Without it, only on losses and gradients that are not finite. The thresholds are for batches of a million
    tokens; smaller ones need wider ones."""

    action: Literal["skip", "rollback", "abort"] = "skip"
    """What follows a spike. `skip`: no update, the step's remaining segments are not run. `rollback`: weights and
    optimizers go back to the last regular checkpoint, the run goes on with the next step and its data (without a
    checkpoint: `skip`). `abort`: the run ends, saving nothing."""

    max_consecutive_skips: NotNegative[int] = 10
    """Steps in a row that may be skipped or rolled back; one more ends the run."""

    delta_warmup_steps: NotNegative[int] = 0
    """First steps that are not tested for `delta`."""

    ema_decay: BelowOne = 0.9
    """Decay of the average of the accepted losses."""

    delta: PositiveOrInfinite[float] = 0.18
    """A loss this far above the average is a spike, if it is `relative_delta` above it, too."""

    relative_delta: PositiveOrInfinite[float] = 0.06
    """As a fraction of the average."""

    max_delta: PositiveOrInfinite[float] = 1.5
    """A loss this far above the average is a spike, also in the warm-up."""

    max_ratio: AboveOneOrInfinite[float] = 1.09
    """A loss this many times the average is a spike, also in the warm-up."""


@dataclass(frozen=True, kw_only=True)
class Validation:
    enable: bool = False
    """Evaluate documents that training never reads, at the end of the run and on the way; always the same rows."""

    freq: Positive[int] = 500
    """Steps between evaluations."""

    steps: Positive[int] = 8
    """Micro-batches that are evaluated, over all ranks."""

    local_batch_size: Positive[int] = 8
    """Sequences of a micro-batch."""

    path: str | None = None
    """What to evaluate, as the path of a source. Default: what `data.holdout_percent` keeps from training, in the
    sources' own shares."""

    format: str = "text"
    """Format of `path`, as that of a source."""


@dataclass(frozen=True, kw_only=True)
class Diagnostics:
    enable: bool = False
    """Write to `metrics.jsonl` what the loops do to the stream and which experts they use, as `loop/...` and
    `expert/...`, from a pass of its own over the step's first micro-batch. Other steps cost nothing."""

    interval: Positive[int] = 100
    """Steps between two of them."""

    gradients: bool = False
    """The norm of the gradient in the stream after each visit as well, taken from the training pass."""


@dataclass(frozen=True, kw_only=True)
class Metrics:
    log_freq: Positive[int] = 10
    """Steps between log lines; the window that a line averages over."""

    enable_tensorboard: bool = False
    """Write TensorBoard events."""

    save_tb_folder: str = "tb"
    """Folder of the TensorBoard events inside `[job] dump_folder`."""

    disable_color_printing: bool = False
    """Plain step lines, also on a terminal."""


@dataclass(frozen=True, kw_only=True)
class Comm:
    mode: Literal["default", "fake"] = "default"
    """`fake`: nothing is trained. This process takes rank 0's step among `NGPU` x `NNODES` processes on tensors without
    memory, and prints the bytes that a rank holds and communicates. Neither data nor a tokenizer is read."""

    init_timeout_seconds: Annotated[Positive[int], MAX_SECONDS] = 300
    """Timeout of collectives until the first step is done."""

    train_timeout_seconds: Annotated[Positive[int], MAX_SECONDS] = 100
    """Timeout of collectives afterwards (CUDA)."""


@dataclass(frozen=True, kw_only=True)
class Debug:
    seed: int = 0
    """The one seed: initial weights, data order and every other random stream derive from it."""

    deterministic: bool = False
    """Deterministic kernels only (slower on a GPU)."""

    hash_batches: bool = False
    """Write `batch_sha256`, a hash of each step's whole global batch, to `metrics.jsonl`."""

    sample_tokens: NotNegative[int] = 0
    """Tokens of a document that the finished run writes to the log, always the most likely one; 0: none."""


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """A training run. Every key can be set in the TOML file or as `--section.key value`; the command line wins."""

    job: Job = field(default_factory=Job)
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    training: Training = field(default_factory=Training)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    parallelism: Parallelism = field(default_factory=Parallelism)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    float8: Float8 = field(default_factory=Float8)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    hub: Hub = field(default_factory=Hub)
    guard: Guard = field(default_factory=Guard)
    validation: Validation = field(default_factory=Validation)
    diagnostics: Diagnostics = field(default_factory=Diagnostics)
    metrics: Metrics = field(default_factory=Metrics)
    comm: Comm = field(default_factory=Comm)
    debug: Debug = field(default_factory=Debug)
