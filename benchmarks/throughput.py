"""Training throughput of the nanocoder flavor on this machine, eager and compiled, against its own matrix rate.

    python benchmarks/throughput.py [--steps 5] [--micro_batch 4] [--seq_len 1024]

Each mode is a fresh process that takes real training steps (data, forward, backward, clipping, Muon + AdamW) on the
embedded text in bf16. Prints the median tokens/s, the model's FLOP/s as a share of the measured bf16 rate of large
matrix products, the time from the start of the process to the end of the first step, and where a step's time goes.
Run it on an idle machine: the load at the start is printed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

STARTED = time.time()


def matrix_rate(size: int = 2048, repeats: int = 5) -> float:
    """Best bf16 rate of square matrix products, FLOP/s."""
    import torch

    a, b = (torch.randn(size, size, dtype=torch.bfloat16) for _ in range(2))
    a @ b
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times)


def measure(args: argparse.Namespace) -> None:
    """Take steps in this process and print one JSON object."""
    import torch

    from titan_loom.config.loading import load_config
    from titan_loom.trainer import Trainer

    with tempfile.TemporaryDirectory() as folder, open(os.path.join(folder, "run.toml"), "w") as file:
        file.write(
            f"""
            [job]
            dump_folder = "{folder}/run"
            [model]
            flavor = "nanocoder"
            [data]
            lanes = 1
            [data.sources.code]
            path = "embedded:code"
            format = "repository"
            [training]
            steps = 1000
            local_batch_size = {args.micro_batch}
            global_batch_size = {args.micro_batch}
            seq_len = {args.seq_len}
            [compile]
            enable = {str(args.mode == "compiled").lower()}
            [checkpoint]
            enable = false
            """
        )
        file.flush()
        trainer = Trainer(load_config(["--job.config_file", file.name]))
        seconds = []
        for _ in range(args.steps + 2):
            trainer.step += 1
            start = time.perf_counter()
            trainer.train_step()
            seconds.append(time.perf_counter() - start)
            if trainer.step == 1:
                first_step = time.time() - args.started
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            trainer.step += 1
            trainer.train_step()
        tokens = args.micro_batch * args.seq_len
        total = sum(event.self_cpu_time_total for event in profile.key_averages())
        top = sorted(profile.key_averages(), key=lambda event: -event.self_cpu_time_total)[:8]
        rate = tokens / statistics.median(seconds[2:])
        print(
            json.dumps(
                {
                    "tokens_per_second": rate,
                    "flops": rate * trainer.model.flops_per_token(args.seq_len),
                    "first_step": first_step,
                    "top": [(event.key, event.self_cpu_time_total / total) for event in top],
                }
            )
        )
        trainer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="timed steps; the median counts")
    parser.add_argument("--micro_batch", type=int, default=4)
    parser.add_argument("--seq_len", type=int, default=1024)
    parser.add_argument("--mode", choices=["eager", "compiled"], help="measure one mode in this process")
    parser.add_argument("--started", type=float, default=STARTED, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.mode is not None:
        return measure(args)

    print(f"load average {os.getloadavg()[0]:.2f}, {os.cpu_count()} cores")
    peak = matrix_rate()
    print(f"bf16 matrix products of 2048 x 2048: {peak / 1e9:,.0f} GFLOP/s\n")
    print(f"{'mode':10}{'tokens/s':>10}{'ratio':>8}{'GFLOP/s':>10}{'of rate':>9}{'first step':>12}")
    eager = None
    for mode in ("eager", "compiled"):
        command = [sys.executable, __file__, "--mode", mode, "--started", str(time.time())]
        command += ["--steps", str(args.steps), "--micro_batch", str(args.micro_batch), "--seq_len", str(args.seq_len)]
        with tempfile.TemporaryDirectory() as cache:  # a cold start, whatever ran before
            environment = os.environ | {"LOG_RANK": "", "TORCHINDUCTOR_CACHE_DIR": cache}
            output = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
        result = json.loads(output.splitlines()[-1])
        eager = eager or result["tokens_per_second"]
        print(
            f"{mode:10}{result['tokens_per_second']:10,.0f}{result['tokens_per_second'] / eager:8.2f}"
            f"{result['flops'] / 1e9:10,.0f}{100 * result['flops'] / peak:8.1f}%{result['first_step']:11.1f}s"
        )
        for name, share in result["top"]:
            print(f"    {100 * share:5.1f} %  {name}")


if __name__ == "__main__":
    main()
