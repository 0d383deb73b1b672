"""Losses, gradient norms and initial weights do not depend on how a run is laid out.

The runs are spread over the choices of layout, optimizer, accumulation, checkpointing and compilation; every
combination is in benchmarks/parity.py.
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests import processes
from tests.layouts import CLIP, Layout, Run, train, whole

STEPS = 5  # benchmarks/parity.py takes 20, in every layout
ONE, TWO, FOUR = Layout(), Layout(world_size=2), Layout(world_size=4)
DDP2, DDP4, HSDP = replace(TWO, replicate=2), replace(FOUR, replicate=4), replace(FOUR, replicate=2)
NONE, FULL, SELECTIVE = ({"checkpoint": mode} for mode in ("none", "full", "selective"))
LOOP = {"checkpoint": "full", "per": "loop"}
COMPILED, MUON = {"compile": True}, {"optimizer": "Muon"}
ALWAYS, BLOCK, OFFLOAD = {"reshard": "always"}, {"loop_unit": "block"}, {"cpu_offload": True}


def varied(layout: Layout, micro_batches: int, *changes: dict) -> Layout:
    merged = {key: value for change in changes for key, value in change.items()}
    return replace(layout, micro_batches=micro_batches, **merged)


RUNS = [
    varied(ONE, 2, FULL, COMPILED, {"backend": "inductor"}),
    varied(ONE, 4, SELECTIVE),
    varied(ONE, 1, LOOP),
    varied(TWO, 1, NONE, COMPILED),
    varied(TWO, 2, SELECTIVE, BLOCK),
    varied(TWO, 4, FULL, MUON, ALWAYS),
    varied(TWO, 2, MUON, OFFLOAD),
    varied(DDP2, 1, FULL),
    varied(DDP2, 2, NONE, MUON),
    varied(DDP2, 4, SELECTIVE, COMPILED),
    varied(FOUR, 2, LOOP, BLOCK),
    varied(FOUR, 1, SELECTIVE, MUON, ALWAYS, BLOCK),
    varied(HSDP, 1, NONE, BLOCK),
    varied(HSDP, 2, FULL, MUON),
    varied(DDP4, 1, LOOP),
    varied(DDP4, 2, SELECTIVE, MUON),
]


@pytest.fixture(scope="module")
def reference() -> dict[str, dict]:
    adamw, muon = processes.run(train, 1, [ONE, varied(ONE, 1, MUON)], STEPS)[0]
    return {"AdamW": adamw, "Muon": muon}


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_numbers_do_not_depend_on_the_layout(reference, world_size):
    layouts = [layout for layout in RUNS if layout.world_size == world_size]
    for layout, found in zip(layouts, processes.run(train, world_size, layouts, STEPS)[0], strict=True):
        expected = reference[layout.optimizer]
        tolerance = 1e-4 if layout.optimizer == "Muon" or layout.compile else 1e-5
        assert found["initial"] == expected["initial"], layout
        assert found["losses"] == pytest.approx(expected["losses"], rel=tolerance), layout
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-4), layout
        assert min(expected["norms"]) > CLIP  # every step was clipped


def truncated(layouts: list[Layout]) -> list[dict]:
    """Three steps with the gradient through the last loop only."""
    dist.init_process_group("gloo")
    results = []
    for layout in layouts:
        run = Run(layout)
        before = {name: whole(p).clone() for name, p in run.model.named_parameters()}
        losses = [run.step(step)[0] for step in range(3)]
        named = dict(run.model.named_parameters())
        results.append(
            {
                "losses": losses,
                "missing": [name for name, p in named.items() if p.grad is None],
                "unmoved": [name for name, p in named.items() if torch.equal(whole(p), before[name])],
                "is_sharded": all(isinstance(p, DTensor) for p in named.values()),
            }
        )
    dist.destroy_process_group()
    return results


def test_layers_cut_off_from_every_gradient_have_none_and_stay_in_every_layout():
    """Zeros instead of none once let AdamW decay a frozen prelude, in some layouts."""
    cut = {"num_loops": 3, "backprop_loops": 1}
    layouts = {
        1: [varied(ONE, 1, cut), varied(ONE, 1, cut, LOOP)],
        2: [
            varied(TWO, 2, cut, {"loop_unit": "block"}),
            varied(TWO, 1, cut, {"loop_unit": "stack"}),
            varied(TWO, 1, cut, {"reshard": "always"}),
            varied(DDP2, 1, cut),
            varied(DDP2, 2, cut, FULL),
        ],
    }
    results = [result for n, of_n in layouts.items() for result in processes.run(truncated, n, of_n)[0]]
    for result in results:
        assert result["is_sharded"]
        assert result["missing"] == result["unmoved"] == results[0]["missing"]
        assert result["losses"] == pytest.approx(results[0]["losses"], rel=1e-5)
    assert {name.rpartition(".blocks.")[2].split(".")[1] for name in results[0]["missing"]} == {"0", "1"}
