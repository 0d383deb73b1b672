from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from titan_loom.config.job_config import EmbeddingsGroup, MuonGroup, NgramGroup, Optimizer
from titan_loom.distributed.init import materialize
from titan_loom.errors import UserError
from titan_loom.models import build_model
from titan_loom.models.nanocoder.args import NanoCoderArgs
from titan_loom.optim.groups import assign_groups
from titan_loom.optim.optimizers import Optimizers

TINY = NanoCoderArgs(
    vocab_size=31,
    dim=16,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    ffn_dim=12,
    prelude=1,
    loop=1,
    coda=1,
    num_loops=2,
    ngram_rows=29,
    ngram_dim=4,
)
IMPLEMENTATIONS = ["fused", "foreach", "for-loop"]


def build(config: Optimizer, mesh=None, param_dtype=torch.float32) -> tuple[nn.Module, Optimizers]:
    with torch.device("meta"):
        model = build_model(TINY)
    if mesh is not None:
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    materialize(model, torch.device("cpu"), seed=0)
    return model, Optimizers(assign_groups(model.named_parameters(), model.group_rules()), config)


def train(model: nn.Module, optimizers: Optimizers, steps: range) -> None:
    for step in steps:
        ids = torch.randint(0, 31, (2, 9), generator=torch.Generator().manual_seed(step))
        optimizers.zero_grad()
        model.logits(model(ids).hidden).float().square().mean().backward()
        optimizers.step()


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


@pytest.fixture(scope="module")
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60))
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_groups_have_their_optimizers_rates_and_decays():
    _, optimizers = build(Optimizer(ngram=NgramGroup(weight_decay=0.05)))
    assert [(g["name"], g["optimizer"], g["lr"], g["weight_decay"]) for g in optimizers.describe()] == [
        ("muon", "Muon", 0.02, 0.1),
        ("embeddings", "AdamW", 0.002, 0.1),
        ("ngram", "AdamW", 0.001, 0.05),
        ("controls", "AdamW", 0.002, 0.0),
    ]
    assert sum(group["parameters"] for group in optimizers.describe()) == sum(
        p.numel() for p in build_model(TINY).parameters()
    )


def test_only_matrices_decay():
    """Without gradients a step is decay alone: norms, gates and the injection scales must stay as they are."""
    model, optimizers = build(Optimizer())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = values(model)
    optimizers.step()
    after = values(model)
    rates = {"embedding": 0.002, "ngram": 0.001, "blocks": 0.02}
    for name, value in before.items():
        factor = 1 - 0.1 * rates[name.partition(".")[0]] if value.ndim == 2 else 1.0
        torch.testing.assert_close(after[name], value * factor, msg=name, rtol=1e-6, atol=1e-9)


def test_muon_steps_are_orthogonal_and_scaled_by_the_shape():
    model, optimizers = build(Optimizer(weight_decay=0.0))
    up, down = (model.blocks[1].feed_forward.get_submodule(name).weight for name in ("up", "down"))  # 12 x 16, 16 x 12
    before = up.detach().clone(), down.detach().clone()
    up.grad = torch.linalg.qr(torch.randn(16, 12, generator=torch.Generator().manual_seed(0))).Q.T.contiguous()
    down.grad = up.grad.T.contiguous()
    optimizers.step()
    up_step, down_step = before[0] - up.detach(), before[1] - down.detach()
    assert torch.linalg.svdvals(up_step / 0.02).sub(1).abs().max() < 0.3
    torch.testing.assert_close(down_step, up_step.T * (16 / 12) ** 0.5, rtol=1e-4, atol=1e-7)


def test_adamw_may_train_the_matrices_too():
    _, optimizers = build(Optimizer(name="AdamW", lr=3e-4, muon=MuonGroup(weight_decay=0.5)))
    assert optimizers.describe()[0] | {"tensors": 0, "parameters": 0} == {
        "name": "matrices",
        "tensors": 0,
        "parameters": 0,
        "optimizer": "AdamW",
        "lr": 3e-4,
        "weight_decay": 0.1,
    }


def test_the_rate_of_every_group_follows_the_factor_from_its_peak():
    _, optimizers = build(Optimizer())
    for factor in (0.5, 0.25):
        optimizers.set_lr(factor)
    assert optimizers.lr() == {"muon": 0.005, "embeddings": 0.0005, "ngram": 0.00025, "controls": 0.0005}
    assert optimizers.describe()[0]["lr"] == 0.02


def test_weight_decay_scales_every_group_that_decays():
    config = Optimizer(weight_decay=0.1, final_weight_decay=0.01, embeddings=EmbeddingsGroup(weight_decay=0.3))
    _, optimizers = build(config)
    for value in (0.1, 0.01, 0.01):
        optimizers.set_weight_decay(value)
    found = [(group["name"], group["weight_decay"]) for group in optimizers.param_groups]
    assert found == [
        ("muon", 0.01),
        ("embeddings", pytest.approx(0.03)),
        ("ngram", 0.01),
        ("ngram", 0.0),
        ("controls", 0.0),
    ]


def test_no_weight_decay_stays_none():
    _, optimizers = build(Optimizer(weight_decay=0.0, embeddings=EmbeddingsGroup(weight_decay=0.3)))
    optimizers.set_weight_decay(0.0)
    assert [group["weight_decay"] for group in optimizers.param_groups] == [0.0, 0.3, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["Muon", "AdamW"])
def test_sharded_parameters_take_the_same_steps(mesh, name, implementation):
    config = Optimizer(name=name, implementation=implementation)
    plain, sharded = build(config), build(config, mesh)
    for model, optimizers in (plain, sharded):
        train(model, optimizers, range(3))
    for (parameter, expected), found in zip(values(plain[0]).items(), values(sharded[0]).values(), strict=True):
        torch.testing.assert_close(found, expected, msg=parameter)


def test_bf16_forward_steps_fp32_parameters(mesh):
    model, optimizers = build(Optimizer(), mesh, torch.bfloat16)
    before = values(model)
    train(model, optimizers, range(1))
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    moved = {name for name, value in values(model).items() if not torch.equal(value, before[name])}
    assert moved == set(before)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("sharded", [False, True])
def test_states_restored_by_name_continue_to_the_bit(mesh, sharded, implementation):
    config = Optimizer(implementation=implementation)
    model, optimizers = build(config, mesh if sharded else None)
    train(model, optimizers, range(2))
    weights = values(model)
    states = {name: state.clone() for name, state in optimizers.named_states().items()}
    train(model, optimizers, range(2, 4))

    resumed, fresh = build(config, mesh if sharded else None)
    assert fresh.named_states() == {}
    with torch.no_grad():
        for name, parameter in resumed.named_parameters():
            (parameter.to_local() if isinstance(parameter, DTensor) else parameter).copy_(weights[name])
    prepared = fresh.prepare_states({name: state.shape for name, state in states.items()})
    assert prepared.keys() == states.keys()
    for name, state in states.items():
        assert type(prepared[name]) is type(state), name
        assert prepared[name].dtype == state.dtype
        prepared[name].copy_(state)
    train(resumed, fresh, range(2, 4))
    for name, value in values(model).items():
        assert torch.equal(value, values(resumed)[name]), name


def test_states_are_named_by_parameter_and_hold_a_step_of_no_dimension():
    model, optimizers = build(Optimizer())
    train(model, optimizers, range(1))
    states = optimizers.named_states()
    expected = set()
    for name, parameter in model.named_parameters():
        is_muon = name.startswith("blocks.") and parameter.ndim == 2
        expected |= {f"{name}.{key}" for key in (["momentum_buffer"] if is_muon else ["step", "exp_avg", "exp_avg_sq"])}
    assert states.keys() == expected
    assert states["final_norm.weight.step"].shape == ()
    assert states["blocks.0.alpha.exp_avg"].shape == (1,)


def test_states_of_another_optimizer_are_refused():
    """AdamW's moments once slipped into Muon, which ignored them and started without momentum."""
    model, adamw = build(Optimizer(name="AdamW"))
    train(model, adamw, range(1))
    _, muon = build(Optimizer(name="Muon"))
    with pytest.raises(UserError, match=r"optimizer\.name .*Muon.*exp_avg, exp_avg_sq, step"):
        muon.prepare_states({name: state.shape for name, state in adamw.named_states().items()})
