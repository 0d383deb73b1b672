import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests import processes
from titan_loom.distributed.units import shard_dim
from titan_loom.optim import muon
from titan_loom.optim.muon import Muon

# Fewer rows than ranks, rows that do not divide, both orientations, stacks of more and of fewer experts than four ranks
# (of which the second is then sharded by rows), and one that gets no gradient.
SHAPES = [(1, 40), (40, 1), (3, 40), (33, 65), (65, 33), (7, 7), (2, 3), (64, 160), (160, 64), (5, 12, 8), (3, 12, 8)]
FROZEN = (9, 4)


class Weights(nn.Module):
    """Parameters whose gradients in `step` are drawn from (parameter, step), on every rank alike."""

    def __init__(self, shapes):
        super().__init__()
        self.weights = nn.ParameterList([draw(shape, i) for i, shape in enumerate(shapes)])
        self.frozen = nn.Parameter(draw(FROZEN, 99))

    def forward(self, step):
        return sum((w * draw(w.shape, i, step)).sum() for i, w in enumerate(self.weights))


def draw(shape, *seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(hash(seed)))


def mesh_of(*sizes):
    dist.init_process_group("gloo")
    return init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])


def sharded(mesh, shapes):
    model = Weights(shapes)
    placement = {p: Shard(shard_dim(p.shape, mesh.shape[-1])) for p in model.parameters()}
    fully_shard(model, mesh=mesh, shard_placement_fn=placement.get)
    return model


def steps(model, optimizer, first, last):
    for step in range(first, last):
        optimizer.param_groups[0]["lr"] = 0.02 / (step + 1)
        optimizer.zero_grad()
        model(step).backward()
        optimizer.step()


def full(tensors):
    return [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach() for tensor in tensors]


def train_sharded(sizes, shapes, ns_dtype):
    model = sharded(mesh_of(*sizes), shapes)
    optimizer = Muon(model.parameters(), ns_dtype=ns_dtype)
    steps(model, optimizer, 0, 3)
    assert not optimizer.state[model.frozen]
    return [tensor.tolist() for tensor in full(model.parameters())]


def train_whole(shapes, ns_dtype):
    torch.set_num_threads(1)
    model = Weights(shapes)
    steps(model, Muon(model.parameters(), ns_dtype=ns_dtype), 0, 3)
    return full(model.parameters())


def assert_trained_alike(results, expected, atol):
    for values in results:
        for value, parameter in zip(values, expected, strict=True):
            torch.testing.assert_close(torch.tensor(value), parameter, rtol=0, atol=atol)


@pytest.mark.parametrize("sizes", [(1,), (2,), (4,), (2, 1), (2, 2)], ids=lambda sizes: "x".join(map(str, sizes)))
def test_sharded_parameters_train_like_whole_ones(sizes):
    results = processes.run(train_sharded, torch.Size(sizes).numel(), sizes, SHAPES, "float32")
    assert_trained_alike(results, train_whole(SHAPES, "float32"), atol=1e-6)


def test_updates_that_travel_in_bf16_are_those_of_one_process():
    """To the bit: an update is rounded where a single process rounds it, not once more on the way."""
    results = processes.run(train_sharded, 2, (2,), SHAPES[:-2], "bfloat16")
    assert_trained_alike(results, train_whole(SHAPES[:-2], "bfloat16"), atol=0)


def test_a_rank_that_owns_no_matrix_takes_part():
    shapes = [(6, 4), (5, 3)]
    assert_trained_alike(
        processes.run(train_sharded, 4, (4,), shapes, "float32"), train_whole(shapes, "float32"), atol=1e-6
    )


class Counter(TorchDispatchMode):
    """Counts the collectives, by name."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace in ("c10d", "_c10d_functional"):
            self.counts[function.__name__] = self.counts.get(function.__name__, 0) + 1
        return function(*args, **kwargs or {})


def count_work():
    iterated = []

    def spy(matrices, *args, orthogonalize=muon.orthogonalize, **kwargs):
        iterated.extend(tuple(matrix.shape) for matrix in matrices)
        return orthogonalize(matrices, *args, **kwargs)

    muon.orthogonalize = spy
    model = sharded(mesh_of(2), SHAPES[:9])
    optimizer = Muon(model.parameters())
    model(0).backward()
    with Counter() as counter:
        optimizer.step()
    return counter.counts, iterated


def test_a_step_iterates_every_matrix_once_and_exchanges_once_each_way():
    results = processes.run(count_work, 2)
    assert sorted(shape for _, iterated in results for shape in iterated) == sorted(SHAPES[:9])
    assert all(counts == {"alltoall_base_.default": 2} for counts, _ in results)


def train_saved(sizes, folder, load, first, last, save):
    model = sharded(mesh_of(*sizes), SHAPES)
    optimizer = Muon(model.parameters(), ns_dtype="float32")

    def tensors():
        states = {
            f"state.{name}": optimizer.state[p]["momentum_buffer"] for name, p in model.weights.named_parameters()
        }
        return states | {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}

    if load:
        for parameter in model.weights.parameters():
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        dcp.load(tensors(), checkpoint_id=folder)
    steps(model, optimizer, first, last)
    if save:
        dcp.save(tensors(), checkpoint_id=folder)
    return [tensor.tolist() for tensor in full(model.parameters())]


def test_state_moves_to_another_number_of_ranks(tmp_path):
    processes.run(train_saved, 4, (4,), tmp_path, False, 0, 2, True)
    results = processes.run(train_saved, 2, (2,), tmp_path, True, 2, 3, False)
    assert_trained_alike(results, train_whole(SHAPES, "float32"), atol=1e-6)


def train_placed(placement):
    mesh = mesh_of(2)
    model = Weights(SHAPES)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(distribute_tensor(parameter, mesh, [placement])))
    optimizer = Muon(model.parameters(), ns_dtype="float32")
    for step in range(3):
        optimizer.param_groups[0]["lr"] = 0.02 / (step + 1)
        for i, weight in enumerate(model.weights):
            weight.grad = distribute_tensor(draw(weight.shape, i, step), mesh, [placement])
        optimizer.step()
    return [tensor.tolist() for tensor in full(model.parameters())]


def test_replicated_parameters_train_without_an_exchange():
    results = processes.run(train_placed, 2, Replicate())
    assert_trained_alike(results, train_whole(SHAPES, "float32"), atol=1e-6)


def test_columns_on_several_ranks_are_refused():
    with pytest.raises(AssertionError, match=r"ValueError: .*not by columns, not one that is \(Shard\(dim=1"):
        processes.run(train_placed, 2, Shard(1))
