"""A step of Muon for the matrices of the nanocoder's blocks, against `torch.optim.Muon` on sharded parameters.

    python benchmarks/muon.py [--repeats 5]

Two gloo processes with one thread each hold every matrix by rows, as FSDP2 does. The optimizers take turns, so that all
see the same machine; one process with one and with two threads stands beside them. Prints the median times, how many
times faster each is than torch's sharded step, and where a step's time goes. Run it on an idle machine: the load is
printed.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from titan_loom.optim import muon
from titan_loom.optim.newton_schulz import lacks_products

# q, k, v, o, gate, up, down of a block with dim 256, two key and value heads of 64 and ffn_dim 700.
SHAPES = [(256, 256), (128, 256), (128, 256), (256, 256), (700, 256), (700, 256), (256, 700)] * 8
OPTIMIZERS = {
    "torch.optim.Muon": torch.optim.Muon,
    "ours, Newton-Schulz in bf16": partial(muon.Muon, ns_dtype="bfloat16"),
    "ours, Newton-Schulz in fp32": partial(muon.Muon, ns_dtype="float32"),
}
REFERENCE = ("torch.optim.Muon", 2, 1)


def measure(rank: int, num_processes: int, num_threads: int, repeats: int, folder: str) -> None:
    """Time every optimizer as one of the processes; rank 0 writes seconds and the seconds of each phase as JSON."""
    torch.set_num_threads(num_threads)
    # A file store stays behind when its processes end; it lies in a temporary folder.
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_processes)
    mesh = init_device_mesh("cpu", (num_processes,))
    optimizers = {name: create(parameters(mesh)) for name, create in OPTIMIZERS.items()}
    seconds, phases = defaultdict(list), defaultdict(lambda: defaultdict(list))
    for repeat in range(repeats + 1):
        for name, optimizer in optimizers.items():
            with stopwatches() as elapsed:
                dist.barrier()
                start = time.perf_counter()
                optimizer.step()
                dist.barrier()
                seconds[name].append(time.perf_counter() - start)
            if repeat == 0:  # the first step allocates the momentum
                seconds[name].clear()
                continue
            for phase, value in elapsed.items():
                phases[name][phase].append(value)
    if rank == 0:
        (Path(folder) / "results.json").write_text(json.dumps({"seconds": seconds, "phases": phases}))
    dist.barrier()
    dist.destroy_process_group()


def parameters(mesh) -> list[nn.Parameter]:
    """The matrices with a gradient; sharded by rows, or plain tensors in a single process."""
    generator = torch.Generator().manual_seed(0)

    def random(shape):
        whole = torch.randn(shape, generator=generator)
        return whole if mesh.size() == 1 else distribute_tensor(whole, mesh, [Shard(0)])

    result = [nn.Parameter(random(shape)) for shape in SHAPES]
    for parameter in result:
        parameter.grad = random(parameter.shape)
    return result


@contextmanager
def stopwatches():
    """Collects the seconds of each phase that `Muon` names for the profiler, whose own overhead would be counted."""
    elapsed = defaultdict(float)

    @contextmanager
    def stopwatch(phase):
        start = time.perf_counter()
        yield
        elapsed[phase.removeprefix("Muon: ")] += time.perf_counter() - start

    original, muon.record_function = muon.record_function, stopwatch
    yield elapsed
    muon.record_function = original


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="timed steps; the median counts")
    repeats = parser.parse_args().repeats

    print(f"load average {os.getloadavg()[0]:.2f}, {os.cpu_count()} cores")
    print(f"bf16 products: {'by fp32, this CPU has no instruction' if lacks_products(torch.bfloat16) else 'native'}")
    print(f"{len(SHAPES)} matrices, {sum(m * n for m, n in SHAPES):,} parameters\n")
    medians, phases = {}, {}
    for num_processes, num_threads in ((2, 1), (1, 1), (1, 2)):
        with tempfile.TemporaryDirectory() as folder:
            args = (num_processes, num_threads, repeats, folder)
            torch.multiprocessing.spawn(measure, args, nprocs=num_processes)
            results = json.loads((Path(folder) / "results.json").read_text())
        for name in OPTIMIZERS:
            key = (name, num_processes, num_threads)
            medians[key] = statistics.median(results["seconds"][name])
            phases[key] = {phase: statistics.median(s) for phase, s in results["phases"].get(name, {}).items()}

    print(f"{'optimizer':30}{'processes':>10}{'threads':>9}{'ms':>8}{'times faster':>14}   of which ms on rank 0")
    for key, median in medians.items():
        parts = ", ".join(f"{phase} {1000 * value:.0f}" for phase, value in phases[key].items())
        name, num_processes, num_threads = key
        ratio = medians[REFERENCE] / median
        print(f"{name:30}{num_processes:10}{num_threads:9}{1000 * median:8.0f}{ratio:14.2f}   {parts}")
    print(f"\nload average {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()
