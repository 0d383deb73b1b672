import sys

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from tests import processes
from tests.layouts import ARGS, Layout, Run
from titan_loom.config import Float8
from titan_loom.distributed.float8 import apply_float8
from titan_loom.errors import UserError
from titan_loom.models import build_model
from titan_loom.models.nanocoder.args import NanoCoderArgs

# Of the usual small model, no dimension is a multiple of 16.
WIDE = NanoCoderArgs(**vars(ARGS) | {"dim": 32, "head_dim": 16, "ffn_dim": 48})
CPU = torch.device("cpu")


def model(args: NanoCoderArgs = WIDE):
    with torch.device("meta"):
        return build_model(args)


@pytest.mark.parametrize(
    ("config", "args", "sentence"),
    [
        (Float8(enable=True), WIDE, "float8.emulate is false, but this cpu has no float8"),
        (
            Float8(enable=True, emulate=True, filter_fqns=["atention"]),
            WIDE,
            r"float8.filter_fqns names 'atention', .* those of a block are: attention.query, .*feed_forward.down",
        ),
        (Float8(enable=True, emulate=True, filter_fqns=["attention", "feed"]), WIDE, "none of the 56 linear layers"),
        (Float8(enable=True, emulate=True), ARGS, r"none of the 56 .* multiples of 16"),
    ],
)
def test_a_conversion_that_cannot_be_is_one_sentence(config, args, sentence):
    pytest.importorskip("torchao")
    with pytest.raises(UserError, match=sentence):
        apply_float8(model(args), config, CPU)


def test_torchao_is_asked_for_by_name_when_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    apply_float8(model(), Float8(), CPU)
    with pytest.raises(UserError, match=r"torchao cannot be imported; install titan-loom\[float8\]"):
        apply_float8(model(), Float8(enable=True, emulate=True), CPU)


def test_what_is_converted_keeps_its_name_and_the_filter_leaves_out():
    float8 = pytest.importorskip("torchao.float8.float8_linear")
    plain, converted = model(), model()
    apply_float8(converted, Float8(enable=True, emulate=True, filter_fqns=["attention.output"]), CPU)
    names = [name for name, module in converted.named_modules() if isinstance(module, float8.Float8Linear)]
    assert len(names) == 8 * 6 and not any("attention.output" in name or "ngram" in name for name in names)
    shapes = [{name: p.shape for name, p in m.named_parameters()} for m in (plain, converted)]
    assert shapes[0] == shapes[1]
    assert converted.flops_per_token(8) == plain.flops_per_token(8)


def losses_and_graphs(layouts: list[Layout]) -> list[tuple[list[float], int]]:
    dist.init_process_group("gloo")
    results = []
    for layout in layouts:
        torch._dynamo.reset()
        counters.clear()
        run = Run(layout)
        results.append(([run.step(step)[0] for step in range(2)], counters["stats"]["unique_graphs"]))
    dist.destroy_process_group()
    return results


def test_emulated_training_stays_close_in_every_layout_and_is_one_graph():
    pytest.importorskip("torchao")
    layouts = [
        Layout(args=WIDE),
        Layout(args=WIDE, float8=True),
        Layout(args=WIDE, float8=True, checkpoint="full", compile=True),
    ]
    [((exact, _), (alone, _), (compiled, graphs))] = processes.run(losses_and_graphs, 1, layouts)
    [(sharded, _)] = processes.run(losses_and_graphs, 2, layouts[1:2])[0]
    assert alone != exact and alone == pytest.approx(exact, rel=0.01)
    assert sharded == pytest.approx(alone, rel=1e-3)
    assert compiled == pytest.approx(alone, rel=1e-3)
    assert graphs == 3  # of all blocks, of a full chunk of the loss, of the rest of the tokens
