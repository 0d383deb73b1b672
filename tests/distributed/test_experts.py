"""The looped mixture of experts under every way to lay out a run: same numbers, same counts, one graph."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from tests import processes
from tests.layouts import BATCH, LOOM_ARGS, SEQ, Collectives, Layout, Run, global_batch, train
from titan_loom.models.interface import Segment

ONE = Layout(args=LOOM_ARGS, segment_loops=2)
LOOP = {"checkpoint": "full", "per": "loop"}
RUNS = [
    replace(ONE, checkpoint="full", compile=True, micro_batches=2),
    replace(ONE, world_size=2, **LOOP, loop_unit="block", micro_batches=2),
    replace(ONE, world_size=2, checkpoint="selective", reshard="always"),
    replace(ONE, world_size=4, loop_unit="block"),
]


@pytest.fixture(scope="module")
def reference() -> dict:
    return processes.run(train, 1, [ONE], 3)[0][0]


@pytest.mark.parametrize("layout", RUNS, ids=lambda layout: str(replace(layout, args=Layout.args)))
def test_numbers_do_not_depend_on_the_layout(reference, layout):
    (found,) = processes.run(train, layout.world_size, [layout], 3)[0]
    assert found["initial"] == reference["initial"]
    assert found["buffers"] == reference["buffers"]  # the routers' biases
    assert found["losses"] == pytest.approx(reference["losses"], rel=1e-5)
    assert found["norms"] == pytest.approx(reference["norms"], rel=1e-4)


def observed(layouts: list[Layout]) -> list[dict]:
    """The experts' load of a step, in three segments of one loop and in one pass, counted and recomputed; what of it
    has a gradient in the second segment; the collectives of a segment."""
    dist.init_process_group("gloo")
    results = []
    for layout in layouts:
        torch._dynamo.reset()
        run = Run(layout)
        share = BATCH // dist.get_world_size()
        tokens = global_batch(0)[0][share * dist.get_rank() :][:share]
        loads = {1: 0, 3: 0}
        for segment_loops in (1, 3):
            carried = [()] * layout.micro_batches
            for start in range(0, 3, segment_loops):
                run.optimizers.zero_grad()
                with Collectives() as collectives:
                    for i, part in enumerate(tokens.chunk(layout.micro_batches)):
                        with run.data_parallel.micro_batch(last=i == layout.micro_batches - 1):
                            segment = Segment(start, start + segment_loops)
                            output = run.model(part, segment=segment, carried=carried[i])
                            (run.model.logits(output.hidden).square().sum() + output.router_z.sum()).backward()
                        carried[i] = output.carried
                        loads[segment_loops] = loads[segment_loops] + output.expert_load
                if (segment_loops, start) == (1, 1):
                    missing = [name for name, p in run.model.named_parameters() if p.grad is None]
                    count = dict(collectives.count)
        load = torch.stack([loads[1], loads[3]])
        dist.all_reduce(load)
        results.append({"load": load.tolist(), "missing": missing, "collectives": count})
    dist.destroy_process_group()
    return results


def test_loads_are_exact_and_other_loops_routers_have_no_gradient_however_the_run_is_laid_out():
    """Recomputation once counted every token twice, in a trainer that halved all counts to make up for it."""
    one = [
        ONE,
        *(replace(ONE, checkpoint=mode, micro_batches=4) for mode in ("full", "selective")),
        replace(ONE, **LOOP),
    ]
    two = [
        replace(ONE, world_size=2, loop_unit="block", micro_batches=2),
        replace(ONE, world_size=2, **LOOP, reshard="always"),
        replace(ONE, world_size=2, replicate=2, checkpoint="full"),
    ]
    results = processes.run(observed, 1, one)[0] + processes.run(observed, 2, two)[0]
    for result in results:
        assert result["load"] == results[0]["load"]
        assert result["missing"] == ["routers.0", "routers.2"]
    by_segments, at_once = results[0]["load"]
    assert by_segments == at_once
    assert [sum(layer) for layer in at_once] == [BATCH * SEQ * LOOM_ARGS.top_k * 3] * 2
    # Two blocks and the root are a unit each; or the stack is one, and gathered again for backward.
    assert results[len(one)]["collectives"] == {"all_gather": 3, "reduce_scatter": 3}
    assert results[len(one) + 1]["collectives"] == {"all_gather": 3, "reduce_scatter": 2}


def graphs(layout: Layout) -> list[int]:
    """Graphs compiled after each step of another number of loops, other segments and another routing."""
    dist.init_process_group("gloo")
    torch._dynamo.reset()
    counters.clear()
    run, found = Run(layout), []
    for step, num_loops in enumerate((3, 1, 5)):
        object.__setattr__(layout, "num_loops", num_loops)
        run.step(step)
        found.append(counters["stats"]["unique_graphs"])
    for segment_loops in (1, 2):
        carried = ()
        for start in range(0, 4, segment_loops):
            with run.data_parallel.micro_batch(last=True):
                segment = Segment(start, start + segment_loops)
                output = run.model(global_batch(0)[0], segment=segment, carried=carried)
                output.hidden.square().sum().backward()
            carried = output.carried
        found.append(counters["stats"]["unique_graphs"])
    dist.destroy_process_group()
    return found


def test_one_graph_serves_every_layer_loop_router_and_segment():
    """A router that was a parameter in one layer and a tensor in another once cost a second graph."""
    layout = replace(ONE, compile=True, segment_loops=0, args=replace(LOOM_ARGS, kv_gate=True, embed_inject=False))
    # The gate's first loop has no state to start from, which is another graph. The loss: a full chunk, and the rest.
    of_blocks, of_loss = 2, 2
    assert processes.run(graphs, 1, layout) == [[of_blocks + of_loss] * 5]
