"""What compiling the nanocoder's blocks costs at the start and gives afterwards, on this machine.

    python benchmarks/compile.py [--steps 5] [--micro_batch 4] [--seq_len 1024] [--dtype bfloat16]

Every row is a fresh process that takes real training steps (data, forward, backward, clipping, Muon + AdamW): eager,
compiled with an empty cache, compiled with the cache of the row before. Prints the seconds from the start of the
process to the end of its first step; then, the processes taking turns step by step, the median of their tokens/s and of
the ratios to eager in each round. Then, on small batches: the graphs that blocks cost in 50 steps in which every
schedule moves and the number of loops is drawn anew. Run it on an idle machine: the load is printed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

from nanocoder_steps import add_options, answer, describe_machine, start_process, timed_steps, trainer, trainer_of

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


MODES = {"eager": "eager", "compiled, cold": "compiled", "compiled, warm": "compiled"}


def answer_with_steps(args: argparse.Namespace, folder: str) -> None:
    """Print the seconds from the start of the process to the end of the first step; then, for each line that is read,
    those of another step."""
    run = trainer_of(args, folder)
    steps = timed_steps(run)
    next(steps)
    print(time.time() - args.started, flush=True)
    for _ in sys.stdin:
        print(next(steps), flush=True)
    run.close()


def measure_steps(args: argparse.Namespace, dtype: str) -> None:
    """Print a row for each of `MODES`."""
    processes, first_steps = [], []
    with tempfile.TemporaryDirectory() as cache:
        for child in MODES.values():
            processes.append(start_process(args, child, dtype, cache))
            first_steps.append(answer(processes[-1]))
        rounds = [[_take_step(process) for process in processes] for _ in range(args.steps)]
        for process in processes:
            process.stdin.close()
            process.wait()
    for mode, first_step, seconds in zip(MODES, first_steps, zip(*rounds, strict=True), strict=True):
        rate = args.micro_batch * args.seq_len / statistics.median(seconds)
        ratio = statistics.median(of_round[0] / own for of_round, own in zip(rounds, seconds, strict=True))
        print(f"{dtype:10}{mode:24}{first_step:11.1f}s{rate:10,.0f}{ratio:10.2f}", flush=True)


def _take_step(process: subprocess.Popen) -> float:
    process.stdin.write("\n")
    process.stdin.flush()
    return answer(process)


def count_graphs(folder: str) -> dict:
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
            if args.child == "graphs":
                print(json.dumps(count_graphs(folder)))
            else:
                answer_with_steps(args, folder)
        return

    print(describe_machine())
    print(f"nanocoder, {args.micro_batch} x {args.seq_len:,} tokens\n")
    print(f"{'dtype':10}{'mode':24}{'first step':>12}{'tokens/s':>10}{'of eager':>10}")
    for dtype in [args.dtype] if args.dtype else ["bfloat16", "float32"]:
        measure_steps(args, dtype)
    with tempfile.TemporaryDirectory() as cache:
        graphs = answer(start_process(args, "graphs", "float32", cache))
    print(f"\nof {GRAPH_STEPS} steps with {graphs['loops'][0]} to {graphs['loops'][-1]} loops, for all blocks")
    print(f"{'':24}{'graphs':>8}{'compiled':>10}")
    for name, key in {"after the first step": "first", "after the last": "last"}.items():
        print(f"{name:24}{graphs[key][0]:8}{graphs[key][1]:10}")
    print(f"\nload average {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()
