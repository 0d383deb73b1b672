"""Whether the routers' bias evens out the experts' load: LOOM with a row planted in every router, 300 steps.

    python benchmarks/balance.py [--steps 300]

1 is added to every element of the first expert's row in all routers of a tiny model, which then trains on real text,
with the bias and with its rate at 0. Prints the coefficient of variation of the load over experts, averaged over
layers, in the first step and over the last 20. Exits 1 if the bias does not at least halve it. Takes about two minutes.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests import processes, runs

LAST = 20


def train(argv: list[str]) -> list[list[list[int]]]:
    """Train what `argv` says; the load of every step, (layers, experts)."""
    from titan_loom.config import load_config
    from titan_loom.trainer import Trainer

    trainer, loads = Trainer(load_config(argv)), []
    balance = trainer.model.balance_experts

    def watched(load: Tensor) -> None:
        loads.append(load.tolist())
        balance(load)

    trainer.model.balance_experts = watched
    for router in trainer.model.routers:
        router.data.to_local()[:, 0] += 1
    trainer.train()
    trainer.close()
    return loads


def variation(loads: list[list[list[int]]]) -> float:
    """Coefficient of variation of the summed loads over experts, averaged over layers."""
    load = torch.tensor(loads, dtype=torch.float64).sum(0)
    return (load.std(-1, correction=0) / load.mean(-1)).mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    processes.TIMEOUT_SECONDS = 1800
    last = []
    print(f"{'bias rate':>9}{'step 1':>9}{f'last {LAST}':>9}")
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "loom.toml"
        config.write_text(runs.LOOM)
        for rate in ("0", "0.002"):
            argv = ["--job.config_file", str(config), "--job.dump_folder", f"{folder}/{rate}"]
            argv += ["--model.args.balance_rate", rate, "--checkpoint.enable", "false"]
            argv += ["--optimizer.name", "AdamW", "--training.steps", str(steps), "--lr_scheduler.total_steps", "none"]
            [loads] = processes.run(train, 1, argv)
            last.append(variation(loads[-LAST:]))
            print(f"{rate:>9}{variation(loads[:1]):9.3f}{last[-1]:9.3f}", flush=True)
    sys.exit(last[1] > last[0] / 2)


if __name__ == "__main__":
    main()
