"""`[comm] mode = "fake"`: rank 0 of any number of ranks, in one process and without memory, data or network.

The trainer's own code builds, shards and steps the model, on tensors that have a shape but no elements, in a process
group whose collectives return at once. So the layout of a cluster is checked, and its memory and traffic measured, on
the machine where one writes the configuration. What runs is the CPU's code in eager mode, without float8: kernels of a
GPU and of the compiler keep less, so what is counted for activations is an upper bound.
"""

from collections import Counter
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Column, Table
from torch._subclasses.fake_tensor import FakeTensorMode

from titan_loom.config import Compile, Diagnostics, Float8, JobConfig
from titan_loom.data.loader import Batch
from titan_loom.distributed.fake import Meter, init_fake_process_group
from titan_loom.tools.inspect import local_bytes
from titan_loom.tools.logging import init_logger
from titan_loom.training.model_trainer import ModelTrainer

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What an optimizer step takes of rank 0, which holds the most. All in bytes but `padding` and `calls`."""

    parameters: int
    gradients: int
    optimizer_state: int
    peak: int
    """At the fullest moment, with activations, gathered weights and temporaries."""
    padding: float
    """What sharding adds to the parameters so that they divide by the ranks, as a fraction of them."""
    calls: dict[str, int]
    """Collectives by kind."""
    nbytes: dict[str, int]
    """The whole tensors of these collectives, summed, by kind."""


def main(config: JobConfig, world_size: int) -> None:
    """Print the plan of `config` for `world_size` processes."""
    init_logger()
    found = plan(config, world_size)
    rest = found.peak - found.parameters - found.gradients - found.optimizer_state
    place = " (of the host)" if config.training.enable_cpu_offload else ""
    memory = {
        f"parameters{place}": found.parameters,
        f"gradients{place}": found.gradients,
        f"optimizer state{place}": found.optimizer_state,
        "activations, gathered weights, temporaries": rest,
        "memory at the peak": found.peak,
    }
    table = Table(f"rank 0 of {world_size}", Column("MiB", justify="right"), Column("calls a step", justify="right"))
    for name, nbytes in memory.items():
        table.add_row(name, f"{nbytes / MIB:,.1f}")
    table.add_section()
    for kind, calls in found.calls.items():
        table.add_row(kind, f"{found.nbytes[kind] / MIB:,.1f}", str(calls))
    Console().print(table, f"Sharding pads the parameters by {100 * found.padding:.1f} %.", sep="\n")


def plan(config: JobConfig, world_size: int) -> Plan:
    """Take the step of rank 0 of `world_size` that `config` describes, on fake tensors.

    Raises:
        UserError: a mistake in the configuration that only shows with the model at hand.
    """
    init_fake_process_group(world_size)
    trainer = _FakeTrainer(config)
    accumulation = trainer.micro_batches
    peak, *totals = trainer.take_step(min(2, accumulation))
    if accumulation > 2:  # what the second micro-batch has added, every other one adds
        _, *of_one = trainer.take_step(1)
        for total, single in zip(totals, of_one, strict=True):
            total.update({kind: (accumulation - 2) * (total[kind] - single[kind]) for kind in total})
    calls, nbytes = totals
    parameters = list(trainer.model.parameters())
    units = trainer.data_parallel.units
    padded = sum(unit.numel for unit in [*units.of_blocks, units.root])
    result = Plan(
        parameters=local_bytes(parameters),
        gradients=local_bytes(parameter.grad for parameter in parameters if parameter.grad is not None),
        optimizer_state=local_bytes(trainer.optimizers.named_states().values()),
        peak=peak,
        padding=padded / sum(parameter.numel() for parameter in parameters) - 1,
        calls=calls,
        nbytes=nbytes,
    )
    del parameters
    trainer.close()
    return result


class _FakeTrainer(ModelTrainer):
    """The trainer's model and optimizers on fake tensors, and the bytes that a step takes."""

    def __init__(self, config: JobConfig):
        fake = replace(config.comm, mode="fake")
        config = replace(config, comm=fake, compile=Compile(), float8=Float8(), diagnostics=Diagnostics())
        super().__init__(config, torch.device("cpu"), document_eos=0 if config.data.isolates_documents else None)
        self.guard = SimpleNamespace(judge=lambda *_: None)  # there are no values to judge
        self.build_model()
        # FSDP2 takes no meta tensors; until here the parameters are, and the mode has to accept them.
        self._fake, self._meter = FakeTensorMode(allow_non_fake_inputs=True), Meter()
        with self._fake, self._meter:
            self.model.to_empty(device=self.device)
            self.build_optimizers()
            # The optimizers get their state, which every step but the first has from its beginning.
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            self.optimizers.step()
            self.optimizers.zero_grad()

    def take_step(self, micro_batches: int) -> tuple[int, Counter, Counter]:
        """A step of so many micro-batches, with the most loops that the configuration may draw.

        Returns:
            The peak in bytes; calls and bytes by kind of collective.
        """
        training, loops = self.config.training, self.loops
        rows = training.local_batch_size * micro_batches
        self._meter.reset()
        with self._fake, self._meter:
            batch = Batch(
                inputs=torch.zeros(rows, training.seq_len, dtype=torch.int64),
                labels=torch.zeros(rows, training.seq_len, dtype=torch.int64),
                positions=None,
                sources=torch.zeros(rows, dtype=torch.int64),
                lane_states={},
                filtered=None,
                read_seconds={},
            )
            self.train_segments(batch, training.tokens_per_step, None if loops.sampling == "fixed" else loops.maximum)
        return self._meter.peak, self._meter.calls, self._meter.nbytes

    def close(self) -> None:
        dist.destroy_process_group()
