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
import os
import statistics
import subprocess
import sys
import tempfile
import time

STARTED = time.time()


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
            mixed_precision_param = "{args.dtype}"
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
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], help="dtype of parameters and activations")
    parser.add_argument("--mode", choices=["eager", "compiled"], help="measure one mode in this process")
    parser.add_argument("--started", type=float, default=STARTED, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.mode is not None:
        return measure(args)

    native = "yes" if bf16_instructions() else "no"
    print(f"load average {os.getloadavg()[0]:.2f}, {os.cpu_count()} cores, bf16 instructions: {native}")
    print(f"{'dtype':10}{'mode':10}{'tokens/s':>10}{'GFLOP/s':>10}{'of rate':>16}{'first step':>12}")
    for dtype in [args.dtype] if args.dtype else ["bfloat16", "float32"]:
        peak = matrix_rate(dtype)
        for mode in ("eager", "compiled"):
            result = measure_in_process(args, dtype, mode)
            rate, flops = result["tokens_per_second"], result["flops"]
            share = f"{100 * flops / peak:.0f}% of {peak / 1e9:,.0f}"
            print(f"{dtype:10}{mode:10}{rate:10,.0f}{flops / 1e9:10,.0f}{share:>16}{result['first_step']:11.1f}s")
            for name, share in result["top"]:
                print(f"    {100 * share:5.1f} %  {name}", flush=True)


def bf16_instructions() -> bool:
    """Whether the processor multiplies bf16 (AMX or AVX-512 BF16)."""
    with open("/proc/cpuinfo") as file:
        flags = file.read().split()
    return "amx_bf16" in flags or "avx512_bf16" in flags


def measure_in_process(args: argparse.Namespace, dtype: str, mode: str) -> dict:
    command = [sys.executable, __file__, "--mode", mode, "--dtype", dtype, "--started", str(time.time())]
    command += ["--steps", str(args.steps), "--micro_batch", str(args.micro_batch), "--seq_len", str(args.seq_len)]
    with tempfile.TemporaryDirectory() as cache:  # a cold start, whatever ran before
        environment = os.environ | {"LOG_RANK": "", "TORCHINDUCTOR_CACHE_DIR": cache}
        output = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    return json.loads(output.splitlines()[-1])


if __name__ == "__main__":
    main()
