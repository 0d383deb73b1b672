import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from tests import processes
from tests.layouts import Layout, Run
from titan_loom.config import Compile
from titan_loom.distributed.compile import apply_compile, compiled

MODES = {
    "none": {},
    "visit": {"checkpoint": "full"},
    "loop": {"checkpoint": "full", "per": "loop"},
    "selective": {"checkpoint": "selective"},
}


def graphs_by_step(layouts: list[Layout], loops: list[tuple[int, int | None]]) -> list[list[int]]:
    """Graphs compiled after each step; rates, coefficients and decay change, and so do loops, differentiated or not."""
    dist.init_process_group("gloo")
    graphs = []
    for layout in layouts:
        torch._dynamo.reset()
        counters.clear()
        run = Run(layout)
        graphs.append([])
        for step, (num_loops, backprop_loops) in enumerate(loops):
            object.__setattr__(layout, "num_loops", num_loops)
            object.__setattr__(layout, "backprop_loops", backprop_loops)
            run.optimizers.set_weight_decay(0.1 / (step + 1))
            run.step(step)
            graphs[-1].append(counters["stats"]["unique_graphs"])
    dist.destroy_process_group()
    return graphs


def test_one_graph_serves_every_layer_visit_and_number_of_loops():
    """The first block called with x and x0 the same tensor once cost a second graph."""
    layouts = [Layout(compile=True, loop_unit="block", **mode) for mode in MODES.values()]
    loops = [(n, None) for n in (2, 4, 1, 8, 3)]
    # Per loop, blocks in it are wrapped otherwise than the others. The loss: a full chunk, and the rest of the tokens.
    expected = {mode: [(2 if mode == "loop" else 1) + 2] * 5 for mode in MODES}
    assert dict(zip(MODES, processes.run(graphs_by_step, 1, layouts, loops)[0], strict=True)) == expected


def test_what_runs_without_gradient_costs_one_more_graph():
    layouts = [Layout(compile=True)]
    assert processes.run(graphs_by_step, 1, layouts, [(4, 1), (2, 1), (8, 2), (1, 1)]) == [[[4] * 4]]


@pytest.mark.parametrize(("device", "mode", "marks"), [("cpu", None, 0), ("cuda", "reduce-overhead", 1)])
def test_cuda_graphs_are_for_cuda_and_begin_anew_with_every_forward(monkeypatch, device, mode, marks):
    compiled_with, marked = [], []
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiled_with.append(options["mode"]) or function)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marked.append(True))
    model = torch.nn.Linear(1, 1)
    model.blocks = [torch.nn.Identity(), torch.nn.Identity()]
    apply_compile(model, Compile(enable=True, mode="reduce-overhead"), torch.device(device))
    model(torch.ones(1))
    assert compiled_with == [mode, mode]
    assert len(marked) == marks


def double(x):
    return 2 * x


def test_only_the_named_components_are_compiled():
    loss = Compile(enable=True, backend="eager", components=["loss"])
    assert compiled(double, "model", loss) is double
    assert compiled(double, "loss", Compile()) is double
    assert compiled(double, "loss", loss) is not double
    assert compiled(double, "loss", loss)(torch.ones(1)).item() == 2
