"""What compiling the nanocoder's blocks costs at the start and gives afterwards, on this machine.

    python benchmarks/compile.py [--steps 5] [--micro_batch 4] [--seq_len 1024] [--dtype bfloat16]

Every row is a fresh process that takes real training steps (data, forward, backward, clipping, Muon + AdamW): eager,
compiled with an empty cache, compiled with the cache of the row before. Prints the seconds from the start of the
process to the end of its first step, the median tokens/s of the steps after it, and its ratio to eager. Then, on small
batches: the graphs that blocks cost in 50 steps in which every schedule moves and the number of loops is drawn anew.
Run it on an idle machine: the load is printed.
"""

import argparse
import json
import os
import statistics
import tempfile

from nanocoder_steps import add_options, describe_machine, in_process, take_steps, trainer, trainer_of

GRAPH_STEPS = 50

MOVING = """
components = ["model"]
[lr_scheduler]
warmup_steps = 20
total_steps = 1000
decay_ratio = 0.98
[optimizer]
final_weight_decay = 0.01
weight_decay_switch_tokens = 500
"""


def measure_steps(args: argparse.Namespace, folder: str) -> dict:
    """Seconds from the start of the process to the end of the first step, and tokens/s of the others."""
    run = trainer_of(args, folder)
    first_step, seconds = take_steps(run, args)
    run.close()
    return {"first_step": first_step, "tokens_per_second": args.micro_batch * args.seq_len / statistics.median(seconds)}


def count_graphs(args: argparse.Namespace, folder: str) -> dict:
    """Graphs of the blocks after the first step and after the last, and the numbers of loops that were run."""
    from torch._dynamo.utils import counters

    sampling = ["--model.loop_sampling", "uniform", "--model.loop_sampling_max", "4", "--training.z_loss", "1e-4"]
    sampling += ["--training.z_loss_until_tokens", "1000"]
    run = trainer(folder, *sampling, micro_batch=1, seq_len=64, dtype="float32", compile=True, more=MOVING)
    graphs, loops = [], set()
    for run.step in range(1, GRAPH_STEPS + 1):
        run.train_step()
        loops.add(run.loops.num_loops(run.step - 1))
        graphs.append((counters["stats"]["unique_graphs"], counters["aot_autograd"]["total"]))
    run.close()
    return {"first": graphs[0], "last": graphs[-1], "loops": sorted(loops)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    args = parser.parse_args()
    if args.child is not None:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps((count_graphs if args.child == "graphs" else measure_steps)(args, folder)))
        return

    print(describe_machine())
    print(f"nanocoder, {args.micro_batch} x {args.seq_len:,} tokens\n")
    print(f"{'dtype':10}{'mode':24}{'first step':>12}{'tokens/s':>10}{'of eager':>10}")
    for dtype in [args.dtype] if args.dtype else ["bfloat16", "float32"]:
        with tempfile.TemporaryDirectory() as cache:
            eager = None
            for mode, child in {"eager": "eager", "compiled, cold": "compiled", "compiled, warm": "compiled"}.items():
                result = in_process(args, child, dtype, cache)
                rate = result["tokens_per_second"]
                eager = eager or rate
                print(f"{dtype:10}{mode:24}{result['first_step']:11.1f}s{rate:10,.0f}{rate / eager:10.2f}", flush=True)
    with tempfile.TemporaryDirectory() as cache:
        graphs = in_process(args, "graphs", "float32", cache)
    print(f"\nof {GRAPH_STEPS} steps with {graphs['loops'][0]} to {graphs['loops'][-1]} loops, for all blocks")
    print(f"{'':24}{'graphs':>8}{'compiled':>10}")
    for name, key in {"after the first step": "first", "after the last": "last"}.items():
        print(f"{name:24}{graphs[key][0]:8}{graphs[key][1]:10}")
    print(f"\nload average {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()
