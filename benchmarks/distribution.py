"""What a looped layer costs to communicate: our wrappings of nanocoder against one `fully_shard` for each block.

    python benchmarks/distribution.py [--repeats 5] [--num_loops 2]

Two gloo processes with one thread each, fp32, one micro-batch of 1 x 256 tokens. Counts and bytes are those of one step
of forward and backward; times are medians, the wrappings taking turns, and mean something on an idle machine only.
"""

import argparse
import os
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests import processes
from tests.layouts import Collectives
from titan_loom.config import ActivationCheckpoint, Compile, Float8, Parallelism
from titan_loom.distributed.init import materialize
from titan_loom.distributed.parallelize import parallelize
from titan_loom.models import build_model
from titan_loom.models.nanocoder import FLAVORS

WRAPPINGS = {
    "naive, freed after every visit": True,
    "naive, freed after backward": False,
    "ours, by block": Parallelism(fsdp_loop_unit="block"),
    "ours, by block, freed after forward": Parallelism(fsdp_loop_unit="block", fsdp_reshard_after_forward="always"),
    "ours, the loop as one": Parallelism(fsdp_loop_unit="stack"),
    "ours, DDP": Parallelism(data_parallel_replicate_degree=2),
}


def wrap(wrapping: bool | Parallelism):
    """A wrapped nanocoder, and what has to surround its micro-batches."""
    with torch.device("meta"):
        model = build_model(FLAVORS["nanocoder"])
    device = torch.device("cpu")
    if isinstance(wrapping, bool):
        for module in [*model.blocks, model]:
            fully_shard(module, reshard_after_forward=wrapping)
            module.set_force_sum_reduction_for_comms(True)
        data_parallel = SimpleNamespace(micro_batch=lambda last: nullcontext())
    else:
        data_parallel = parallelize(
            model,
            device,
            parallelism=wrapping,
            activation_checkpoint=ActivationCheckpoint(),
            compile=Compile(),
            float8=Float8(),
            param_dtype=torch.float32,
            reduce_dtype=torch.float32,
            cpu_offload=False,
            micro_batches=1,
        )
    materialize(model, device, 0)
    return model, data_parallel


def measure(repeats: int, num_loops: int) -> dict[str, dict]:
    dist.init_process_group("gloo")
    models = {name: wrap(wrapping) for name, wrapping in WRAPPINGS.items()}
    tokens = torch.randint(0, 8192, (1, 256), generator=torch.Generator().manual_seed(dist.get_rank()))
    results = {name: {"seconds": []} for name in models}
    for repeat in range(repeats + 1):
        for name, (model, data_parallel) in models.items():
            model.zero_grad()
            dist.barrier()
            start = time.perf_counter()
            with Collectives() if repeat == 0 else nullcontext() as collectives, data_parallel.micro_batch(last=True):
                model(tokens, num_loops).hidden.square().mean().backward()
            if repeat == 0:
                results[name]["count"] = [collectives.count[kind] for kind in Collectives.KINDS]
                results[name]["bytes"] = sum(collectives.bytes[kind] for kind in Collectives.KINDS)
            else:
                results[name]["seconds"].append(time.perf_counter() - start)
    dist.destroy_process_group()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--num_loops", type=int, default=2)
    args = parser.parse_args()
    processes.TIMEOUT_SECONDS = 280
    results = processes.run(measure, 2, args.repeats, args.num_loops)[0]
    print(f"load average {os.getloadavg()[0]:.2f}, {os.cpu_count()} cores, {args.num_loops} loops")
    print(
        f"{'wrapping':38}{'all-gather':>11}{'reduce-scatter':>16}{'all-reduce':>12}{'MiB':>8}{'ms':>8}{'of naive':>10}"
    )
    naive = statistics.median(next(iter(results.values()))["seconds"])
    for name, result in results.items():
        gathers, scatters, reduces = result["count"]
        seconds = statistics.median(result["seconds"])
        print(
            f"{name:38}{gathers:11}{scatters:16}{reduces:12}{result['bytes'] / 2**20:8.0f}{1000 * seconds:8.0f}"
            f"{seconds / naive:10.2f}"
        )


if __name__ == "__main__":
    main()
