"""Parameters and activations in bf16, gradients reduced in fp32: what every run on a GPU does."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests import processes
from tests.layouts import ARGS, LOOM_ARGS, Layout, train, whole
from titan_loom.distributed.data_parallel import apply_data_parallel
from titan_loom.distributed.mesh import REPLICATE, SHARD
from titan_loom.distributed.units import Unit, Units

STEPS = 3
FAMILIES = {
    "nanocoder": ARGS,
    "loom": LOOM_ARGS,
    "barbados": replace(LOOM_ARGS, kv_gate=True),  # the first visit of a layer does not use its gate
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_trains_alike(family):
    one = Layout(args=FAMILIES[family], param_dtype=torch.bfloat16)
    two = replace(one, world_size=2)
    of_one = [
        one,
        replace(one, micro_batches=2),
        replace(one, checkpoint="full", per="loop", compile=True),
        replace(one, param_dtype=torch.float32),
    ]
    of_two = [two, replace(two, loop_unit="block", reshard="always", micro_batches=2), replace(two, replicate=2)]
    expected, *results, in_fp32 = processes.run(train, 1, of_one, STEPS)[0]
    results += processes.run(train, 2, of_two, STEPS)[0]
    for result in results:
        assert result["initial"] == expected["initial"]
        assert result["losses"] == pytest.approx(expected["losses"], rel=2e-3)
        assert result["norms"] == pytest.approx(expected["norms"], rel=1e-2)
    assert expected["losses"] == pytest.approx(in_fp32["losses"], rel=1e-2)
    assert expected["losses"] != in_fp32["losses"]


SMALL = 2.0**-9  # added to 1 in bf16, it is lost


class Scales(nn.Module):
    """One block that scales what it gets, with a factor for each of four visits."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Scale()])

    def forward(self, x):
        for factor in (1.0, SMALL, SMALL, SMALL):
            x = x + factor * self.blocks[0](x)
        return x


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        return x * self.weight


def gradient_of_visits(replicate: int, micro_batches: int) -> tuple[torch.dtype, list[float]]:
    """Of a weight whose visits have gradients 1, SMALL, SMALL and SMALL in each micro-batch."""
    dist.init_process_group("gloo")
    axis = REPLICATE if replicate > 1 else SHARD
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(axis,))
    units = Units(
        of_blocks=[Unit(layers=(0,), numel=2, is_looped=True)],
        root=Unit(layers=(), numel=0),
        replicate=replicate,
        shard=dist.get_world_size() // replicate,
        reshard_after_forward=False,
        param_bytes=2,
        reduce_bytes=4,
    )
    model = Scales()
    data_parallel = apply_data_parallel(model, units, mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for i in range(micro_batches):
        with data_parallel.micro_batch(last=i == micro_batches - 1):
            model(torch.ones(2, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    gradient = whole(model.blocks[0].weight.grad)
    dist.destroy_process_group()
    return gradient.dtype, gradient.tolist()


@pytest.mark.parametrize(("world_size", "replicate"), [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_gradients_of_visits_are_added_up_in_the_dtype_of_the_reduction(world_size, replicate, micro_batches):
    expected = torch.float32, [world_size * micro_batches * (1 + 3 * SMALL)] * 2
    assert processes.run(gradient_of_visits, world_size, replicate, micro_batches) == [expected] * world_size
