"""A looped layer is communicated once, however often it runs, in every layout that can be asked for."""

from dataclasses import asdict, replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests import processes
from tests.layouts import ARGS, Collectives, Layout, Run

BLOCKS = Layout(world_size=2, loop_unit="block")
STACK = Layout(world_size=2, loop_unit="stack")
AC = {"checkpoint": "full"}
LOOP_AC = {"checkpoint": "full", "per": "loop"}


def count(layouts: list[Layout]) -> list[dict]:
    """Collectives of one optimizer step of each layout, and whether everything was freed after it."""
    dist.init_process_group("gloo")
    results = []
    for layout in layouts:
        torch._dynamo.reset()
        run = Run(layout)
        run.forward_backward(0)  # the first pass also sets up
        run.optimizers.zero_grad()
        with Collectives() as collectives:
            run.forward_backward(1)
        collectives.count["all_reduce"] -= 1  # of the loss
        collectives.bytes["all_reduce"] -= 8
        parameters = list(run.model.parameters())
        results.append(
            {
                "count": tuple(collectives.count[kind] for kind in Collectives.KINDS),
                "bytes": tuple(collectives.bytes[kind] for kind in Collectives.KINDS),
                "planned": asdict(run.data_parallel.units.traffic(layout.micro_batches)),
                "is_sharded": all(isinstance(p, DTensor) and isinstance(p.grad, DTensor) for p in parameters),
            }
        )
    dist.destroy_process_group()
    return results


def assert_counts(expected: dict[Layout, tuple[int, int, int]]) -> None:
    """Run the layouts, all of one number of processes, and compare (all-gathers, reduce-scatters, all-reduces)."""
    layouts = list(expected)
    for of_rank in processes.run(count, layouts[0].world_size, layouts):
        for layout, result in zip(layouts, of_rank, strict=True):
            assert result["count"] == expected[layout], layout
            planned = result["planned"]
            assert result["count"] == tuple(planned[f"{kind}s"] for kind in Collectives.KINDS), layout
            assert result["bytes"] == tuple(planned[f"{kind}_bytes"] for kind in Collectives.KINDS), layout
            assert result["is_sharded"], layout


@pytest.mark.parametrize(("layout", "units"), [(BLOCKS, 9), (STACK, 7)], ids=["block", "stack"])
def test_a_step_gathers_and_reduces_every_unit_once_however_often_it_runs(layout, units):
    once = (units, units, 0)
    loops = {replace(layout, num_loops=n): once for n in (1, 2, 8)}
    checkpointed = {replace(layout, num_loops=4, **ac): once for ac in (AC, LOOP_AC)}
    assert_counts(loops | checkpointed)


def test_compiled_blocks_are_communicated_once_as_well():
    blocks, stack = (replace(layout, compile=True, num_loops=4) for layout in (BLOCKS, STACK))
    assert_counts({replace(blocks, checkpoint="selective"): (9, 9, 0), replace(stack, **AC): (7, 7, 0)})


def test_accumulated_gradients_are_reduced_once():
    """Looped blocks once reduced what was accumulated at their last visit and the rest at their first: 12, not 9."""
    accumulated = {replace(BLOCKS, micro_batches=k, num_loops=n): (9, 9, 0) for k in (2, 4) for n in (1, 4)}
    of_stack = {replace(STACK, micro_batches=2): (7, 7, 0), replace(STACK, micro_batches=2, **LOOP_AC): (7, 7, 0)}
    assert_counts(accumulated | of_stack)


def test_freeing_after_forward_costs_one_more_gather():
    always = {"reshard": "always", "num_loops": 4}
    blocks, stack = replace(BLOCKS, **always), replace(STACK, **always)
    # The root keeps its weights, for the head; each micro-batch gathers anew.
    assert_counts(
        {
            blocks: (17, 9, 0),
            replace(blocks, **AC): (17, 9, 0),
            replace(blocks, **LOOP_AC): (17, 9, 0),
            replace(blocks, micro_batches=2): (34, 9, 0),
            stack: (13, 7, 0),
        }
    )


def test_copies_are_reduced_once_a_step():
    ddp, hsdp = Layout(world_size=4, replicate=4), Layout(world_size=4, replicate=2)
    expected = {}
    for unit, units, micro_batches in (("block", 9, 2), ("stack", 7, 1)):
        changes = {"loop_unit": unit, "micro_batches": micro_batches, "num_loops": 4}
        expected[replace(ddp, **changes)] = (0, 0, units)
        expected[replace(hsdp, **changes)] = (units, units, units)
    assert_counts(expected)


@pytest.mark.parametrize("layout", [BLOCKS, STACK], ids=["block", "stack"])
def test_truncated_backprop_is_communicated_once_as_well(layout):
    no_prelude = replace(ARGS, prelude=0, loop=5)
    units = 9 if layout is BLOCKS else 5
    truncated = replace(layout, args=no_prelude, num_loops=4, backprop_loops=1)
    assert_counts({truncated: (units, units, 0), replace(truncated, micro_batches=2): (units, units, 0)})
