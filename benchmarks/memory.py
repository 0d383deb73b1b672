"""What looping costs in memory: activations kept for backward, by number of loops and mode, and the loss's peak.

    python benchmarks/memory.py

One process, fp32, nanocoder on 2 x 256 tokens. Kept: every storage that autograd holds after forward, once, parameters
aside. Selective checkpointing in eager keeps its tensors beside autograd: of that mode it is what forward leaves
allocated, which is up to 1 MiB more, for the output. The loss: 16,384 tokens and 8,192 entries, the peak of what is
allocated over forward and backward.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from titan_loom.config import ActivationCheckpoint, Compile
from titan_loom.distributed.activation_checkpoint import apply_activation_checkpoint
from titan_loom.distributed.compile import apply_compile
from titan_loom.distributed.fake import Meter
from titan_loom.distributed.init import materialize
from titan_loom.models import build_model
from titan_loom.models.nanocoder import FLAVORS
from titan_loom.training.loss import chunked_cross_entropy

LOOPS = (1, 2, 4, 8)
MODES = {
    "none": ActivationCheckpoint(),
    "full, per visit": ActivationCheckpoint(mode="full"),
    "full, per loop": ActivationCheckpoint(mode="full", per="loop"),
    "selective": ActivationCheckpoint(mode="selective"),
}
MIB = 2**20


def build(config: ActivationCheckpoint, compile: bool) -> nn.Module:
    torch._dynamo.reset()
    with torch.device("meta"):
        model = build_model(FLAVORS["nanocoder"])
    apply_activation_checkpoint(model, config)
    apply_compile(model, Compile(enable=compile, backend="aot_eager"), torch.device("cpu"))
    materialize(model, torch.device("cpu"), 0)
    return model


def kept(model: nn.Module, num_loops: int, backprop_loops: int | None = None) -> float:
    """MiB that autograd keeps after forward."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.zeros(2, 256, dtype=torch.int64), num_loops, backprop_loops)
    return sum(storage.nbytes() for storage in storages.values()) / MIB


def left(model: nn.Module, num_loops: int) -> float:
    """MiB that an eager forward leaves allocated, its output included."""
    with Meter() as meter:
        for parameter in model.parameters():
            parameter.view_as(parameter)  # so that the meter has seen it before
        before = meter.live
        output = model(torch.zeros(2, 256, dtype=torch.int64), num_loops)  # noqa: F841, it keeps the graph alive
        return (meter.live - before) / MIB


def loss_peak(loss: Callable) -> float:
    """MiB allocated at most in forward and backward of `loss(hidden, weight, labels)`."""
    hidden = torch.randn(16_384, 256, requires_grad=True)
    weight = torch.randn(8_192, 256, requires_grad=True)
    labels = torch.randint(0, 8_192, (16_384,))
    with Meter() as meter:
        loss(hidden, weight, labels).backward()
    return meter.peak / MIB


def chunked(chunk_tokens: int) -> Callable:
    return lambda hidden, weight, labels: (
        chunked_cross_entropy(hidden, weight, labels, z_coefficient=torch.zeros(()), chunk_tokens=chunk_tokens).loss_sum
    )


def main() -> None:
    print(f"{'MiB kept, by loops':34}" + "".join(f"{n:>9}" for n in LOOPS))
    for name, config in MODES.items():
        for compile in (False, True):
            model = build(config, compile)
            measure = left if config.mode == "selective" and not compile else kept
            row = [measure(model, n) for n in LOOPS]
            print(f"{name + (', compiled' if compile else ''):34}" + "".join(f"{mib:9.1f}" for mib in row), flush=True)
    model = build(MODES["none"], False)
    row = [kept(model, n, 1) for n in LOOPS]
    print(f"{'none, last loop differentiated':34}" + "".join(f"{mib:9.1f}" for mib in row))

    print(f"\n{'loss of 16,384 x 8,192':34}{'peak MiB':>9}{'of full':>9}")
    full = loss_peak(lambda hidden, weight, labels: F.cross_entropy(hidden @ weight.T, labels, reduction="sum"))
    print(f"{'full logits':34}{full:9.0f}{1:9.2f}")
    for chunk_tokens in (4_096, 2_048, 1_024):
        peak = loss_peak(chunked(chunk_tokens))
        print(f"{f'chunks of {chunk_tokens:,} tokens':34}{peak:9.0f}{peak / full:9.2f}", flush=True)


if __name__ == "__main__":
    main()
