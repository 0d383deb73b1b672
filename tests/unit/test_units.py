import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.layouts import ARGS
from titan_loom.config import Parallelism
from titan_loom.distributed import data_parallel, units
from titan_loom.distributed.units import plan_units
from titan_loom.errors import UserError
from titan_loom.models import build_model
from titan_loom.models.loom import FLAVORS as LOOM_FLAVORS
from titan_loom.models.nanocoder import FLAVORS

NANOCODER = FLAVORS["nanocoder"]
LIST = replace(ARGS, schedule=(0, 1, 1, 0), ngram_visits=(0,))


def plan(args=NANOCODER, *, shard: int = 64, replicate: int = 1, **parallelism) -> units.Units:
    with torch.device("meta"):
        model = build_model(args)
    mesh = SimpleNamespace(mesh_dim_names=("dp_replicate", "dp_shard"), shape=(replicate, shard))
    return plan_units(model, mesh, Parallelism(**parallelism), param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def layers(planned: units.Units) -> list[tuple[int, ...]]:
    return [unit.layers for unit in planned.of_blocks]


def test_a_small_looped_stack_is_one_unit_and_a_large_one_is_not(monkeypatch):
    assert layers(plan()) == [(0,), (1,), (2, 3, 4), (5,), (6,), (7,)]
    monkeypatch.setattr(units, "STACK_BYTES", 2**20)
    assert layers(plan()) == [(layer,) for layer in range(8)]
    assert layers(plan(fsdp_loop_unit="stack"))[2] == (2, 3, 4)


def test_a_stack_that_runs_once_is_not_one_unit():
    assert layers(plan(replace(NANOCODER, num_loops=1))) == [(layer,) for layer in range(8)]


def test_a_list_has_no_stack():
    assert layers(plan(LIST)) == [(0,), (1,)]
    with pytest.raises(UserError, match=r"parallelism\.fsdp_loop_unit is 'stack'; .* must be 'auto' or 'block'"):
        plan(LIST, fsdp_loop_unit="stack")


def test_bytes_include_the_rows_that_sharding_pads():
    traffic = plan(shard=1, replicate=2).traffic(1)
    assert traffic.all_gathers == traffic.reduce_scatters == 0
    assert (traffic.all_reduces, traffic.all_reduce_bytes) == (7, 4 * 9_895_690)
    small, large = (plan(shard=shard).traffic(1).all_gather_bytes for shard in (1 << 6, 1 << 9))
    assert 2 * 9_895_690 < small < 0.7 * large


def test_few_experts_are_not_padded_to_many_ranks():
    """By experts, 30 on 64 ranks would hold as much padding as weights, and move it."""
    args = LOOM_FLAVORS["loom_1p7b"]
    planned = plan(args)
    numel = sum(unit.numel for unit in [*planned.of_blocks, planned.root])
    routers = args.num_loops * args.num_experts * args.dim
    assert numel == 1_644_913_920 + (64 - args.num_layers) * routers


def test_gathered_weights_are_kept_while_they_fit(monkeypatch):
    assert not plan().reshard_after_forward
    assert plan(fsdp_reshard_after_forward="always").reshard_after_forward
    assert not plan(fsdp_reshard_after_forward="always", shard=1).reshard_after_forward
    monkeypatch.setattr(units, "KEEP_GATHERED_BYTES", 2**20)
    assert plan().reshard_after_forward
    assert not plan(fsdp_reshard_after_forward="never").reshard_after_forward


def test_the_log_says_what_is_wrapped_and_what_it_moves():
    assert (
        plan(replicate=8, shard=64)
        .describe(2)
        .startswith(
            "Applied HSDP with 8 x 64 ranks (copies x shards): 6 units of blocks (layers 2 to 4 as one) and the root"
        )
    )
    assert "7 all-gathers of 18.9 MiB, 7 reduce-scatters of 37.8 MiB" in plan(shard=64).describe(2)


def test_ddp_on_an_old_torch_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.distributed._composable.replicate_with_fsdp", None)
    with pytest.raises(UserError, match=r"parallelism\.data_parallel_shard_degree is 1 .* newer torch"):
        data_parallel.apply_data_parallel(
            build_model(ARGS),
            plan(ARGS, replicate=2, shard=1),
            None,
            param_dtype=torch.float32,
            reduce_dtype=torch.float32,
        )
