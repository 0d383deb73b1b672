"""What a configuration trains: parameters, layers, visits, optimizer groups, FLOPs. Allocates nothing."""

import json
from collections.abc import Iterable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_loom.config.job_config import JobConfig
from titan_loom.errors import UserError
from titan_loom.models import build_model, model_args
from titan_loom.optim.groups import assign_groups
from titan_loom.optim.optimizers import plan_groups
from titan_loom.tools.device import total_memory
from titan_loom.training.loops import LoopPlan


def inspect(config: JobConfig) -> dict[str, Any]:
    """The facts about the model of `config`, as plain data that JSON can hold.

    Returns:
        `parameters` (part -> count; `total`, `transformer`, `ngram` and more), `num_layers`, `num_visits`,
        `flops_per_token` (at `training.seq_len`) and `groups` (name -> tensors, parameters, optimizer, lr and
        weight_decay at the start).

    Raises:
        UserError: `[model]` describes no model, or one of another size than `model.expected_parameters`.
    """
    args = model_args(config.model)
    with torch.device("meta"):
        model = build_model(args)
    check_expected_parameters(model, config.model.expected_parameters)
    loops = LoopPlan(config.model, config.training, args, config.debug.seed)
    groups = plan_groups(assign_groups(model.named_parameters(), model.group_rules()), config.optimizer)
    return {
        "parameters": model.parameter_parts(),
        "num_layers": args.num_layers,
        "num_visits": args.num_visits,
        "flops_per_token": sum(
            model.flops_per_token(config.training.seq_len, None, loops.backprop_loops, segment)
            for segment in loops.segments(None)
        ),
        "groups": {
            group.name: {key: value for key, value in group.describe().items() if key != "name"} for group in groups
        },
    }


def check_expected_parameters(model: nn.Module, expected: int | None) -> None:
    """Refuse a model that has not exactly `expected` parameters, when that is set.

    Raises:
        UserError: with both numbers.
    """
    found = model.parameter_parts()["total"]
    if expected is not None and found != expected:
        raise UserError(f"model.expected_parameters is {expected:,} but the model of [model] has {found:,} parameters")


def check_fits(model: nn.Module, device: torch.device) -> None:
    """Refuse a model, sharded and not yet allocated, whose weights alone exceed the memory of the device.

    Raises:
        UserError: with the number of parameters and both sizes.
    """
    needed, total = local_bytes(model.parameters()) / 2**30, total_memory(device) / 2**30
    if needed > total:
        raise UserError(
            f"[model] describes {model.parameter_parts()['total']:,} parameters, {needed:,.1f} GiB in each process; "
            f"this device has {total:,.1f} GiB: choose a smaller model.flavor or model.args"
        )


def local_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of what this process holds of `tensors`, which may be sharded (DTensor)."""
    return sum((tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes for tensor in tensors)


def main(config: JobConfig, as_json: bool) -> None:
    """Print `inspect(config)` as tables, or as one JSON object."""
    facts = inspect(config)
    if as_json:
        print(json.dumps(facts))
        return
    console = Console()
    title = f"{config.model.name} {config.model.flavor}"
    parts = Table("part", "parameters", title=title)
    for part, count in facts["parameters"].items():
        parts.add_row(part, f"{count:,}")
    groups = Table("group", "tensors", "parameters", "optimizer", "lr", "weight decay", title="optimizer groups")
    for name, group in facts["groups"].items():
        groups.add_row(
            name,
            str(group["tensors"]),
            f"{group['parameters']:,}",
            group["optimizer"],
            f"{group['lr']:g}",
            f"{group['weight_decay']:g}",
        )
    console.print(parts, _schedule_table(config), groups, sep="\n")
    flops, seq_len = facts["flops_per_token"], config.training.seq_len
    console.print(f"{flops:,} FLOPs per token, forward and backward, in sequences of {seq_len:,} tokens")


def _schedule_table(config: JobConfig) -> Table:
    args = model_args(config.model)
    notes = args.visit_notes()
    table = Table("stage", "visits", "layers", "added", title=f"{args.num_layers} layers, {args.num_visits} visits")
    start = 0
    for stage, layers, _ in args.stages():
        visits = range(start, start + len(layers))
        added = [notes[visit] for visit in visits if visit in notes]
        table.add_row(stage, str(len(visits)), " ".join(map(str, layers)), ", ".join(added))
        start = visits.stop
    return table
