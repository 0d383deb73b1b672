"""Training throughput of the nanocoder flavor on this machine, eager and compiled, against its own matrix rate.

    python benchmarks/throughput.py [--steps 5] [--micro_batch 4] [--seq_len 1024]

Each row is a fresh process that takes real training steps (data, forward, backward, clipping, Muon + AdamW) on the
embedded text. Prints the median tokens/s, the model's FLOP/s as a share of the measured rate of large matrix products
in the same dtype, the time from the start of the process to the end of the first step, and where a step's time goes.
Run it on an idle machine: the load at the start is printed. bf16 is the dtype to look at where the processor computes
in it; elsewhere float32 is faster.
"""

import argparse
import json
import statistics
import tempfile
import time
from itertools import islice

from nanocoder_steps import add_options, answer, describe_machine, start_process, timed_steps, trainer_of


def matrix_rate(dtype: str, size: int = 2048, repeats: int = 5) -> float:
    """Best rate of square matrix products in `dtype`, FLOP/s."""
    import torch

    a, b = (torch.randn(size, size, dtype=getattr(torch, dtype)) for _ in range(2))
    a @ b
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times)


def measure(args: argparse.Namespace) -> dict:
    """Take steps in this process."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        run = trainer_of(args, folder)
        steps = timed_steps(run)
        next(steps)
        first_step = time.time() - args.started
        seconds = list(islice(steps, args.steps))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            run.step += 1
            run.train_step()
        total = sum(event.self_cpu_time_total for event in profile.key_averages())
        top = sorted(profile.key_averages(), key=lambda event: -event.self_cpu_time_total)[:8]
        rate = args.micro_batch * args.seq_len / statistics.median(seconds)
        found = {
            "tokens_per_second": rate,
            "flops": rate * run.model.flops_per_token(args.seq_len),
            "first_step": first_step,
            "top": [(event.key, event.self_cpu_time_total / total) for event in top],
        }
        run.close()
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    args = parser.parse_args()
    if args.child is not None:
        print(json.dumps(measure(args)))
        return

    print(describe_machine())
    print(f"{'dtype':10}{'mode':10}{'tokens/s':>10}{'GFLOP/s':>10}{'of rate':>16}{'first step':>12}")
    for dtype in [args.dtype] if args.dtype else ["bfloat16", "float32"]:
        peak = matrix_rate(dtype)
        for mode in ("eager", "compiled"):
            with tempfile.TemporaryDirectory() as cache:  # a cold start, whatever ran before
                result = answer(start_process(args, mode, dtype, cache))
            rate, flops = result["tokens_per_second"], result["flops"]
            share = f"{100 * flops / peak:.0f}% of {peak / 1e9:,.0f}"
            print(f"{dtype:10}{mode:10}{rate:10,.0f}{flops / 1e9:10,.0f}{share:>16}{result['first_step']:11.1f}s")
            for name, share in result["top"]:
                print(f"    {100 * share:5.1f} %  {name}", flush=True)


if __name__ == "__main__":
    main()
