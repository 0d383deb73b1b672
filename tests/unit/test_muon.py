import copy
import math

import pytest
import torch
from torch.optim import _muon as torch_muon

from titan_loom.optim import newton_schulz
from titan_loom.optim.muon import Muon

SHAPES = [(1, 40), (40, 1), (3, 40), (33, 65), (65, 33), (7, 7), (2, 3), (64, 160), (160, 64)]


def normal(shape, *seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(hash(seed)))


def parameters(shapes=SHAPES):
    return [torch.nn.Parameter(normal(shape, i)) for i, shape in enumerate(shapes)]


def train(optimizer, num_steps=4, gradient=normal):
    """Steps under a schedule; every parameter gets the same gradients whatever the optimizer."""
    group = optimizer.param_groups[0]
    for step in range(num_steps):
        group["lr"], group["weight_decay"] = 0.02 / (step + 1), 0.1 + 0.1 * step
        for i, parameter in enumerate(group["params"]):
            parameter.grad = gradient(parameter.shape, i, step)
        optimizer.step()
    return [parameter.detach() for parameter in group["params"]]


def newton_schulz_in_fp32(x, coefficients, steps, eps):
    """What torch's function computes in bf16."""
    a, b, c = coefficients
    wide = x if x.shape[0] <= x.shape[1] else x.T
    wide = wide / wide.norm().clamp(min=eps)
    for _ in range(steps):
        gram = wide @ wide.T
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide if wide.shape == x.shape else wide.T


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust_lr_fn", [None, "original", "match_rms_adamw"])
def test_bf16_equals_torch_to_the_bit(nesterov, adjust_lr_fn, monkeypatch):
    monkeypatch.setattr(newton_schulz, "lacks_products", lambda dtype: False)
    kwargs = dict(nesterov=nesterov, adjust_lr_fn=adjust_lr_fn, momentum=0.9, ns_steps=4)
    ours = train(Muon(parameters(), ns_dtype="bfloat16", **kwargs))
    theirs = train(torch.optim.Muon(parameters(), **kwargs))
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("nesterov", [True, False])
def test_fp32_equals_torch_to_rounding(nesterov, monkeypatch):
    monkeypatch.setattr(torch_muon, "_zeropower_via_newtonschulz", newton_schulz_in_fp32)
    ours = train(Muon(parameters(), ns_dtype="float32", nesterov=nesterov))
    theirs = train(torch.optim.Muon(parameters(), nesterov=nesterov))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw"])
def test_a_stack_is_a_batch_of_matrices(adjust_lr_fn):
    kwargs = dict(ns_dtype="float32", adjust_lr_fn=adjust_lr_fn)
    stack = torch.nn.Parameter(torch.stack([normal((24, 10), 7, member) for member in range(5)]))
    members = [torch.nn.Parameter(matrix.clone()) for matrix in stack.detach()]
    (trained,) = train(Muon([stack], **kwargs), gradient=lambda shape, i, step: normal(shape, step))
    gradients = [normal(stack.shape, step) for step in range(4)]
    trained_members = train(Muon(members, **kwargs), gradient=lambda shape, i, step: gradients[step][i])
    torch.testing.assert_close(trained, torch.stack(trained_members), rtol=0, atol=1e-6)


@pytest.mark.parametrize("ns_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("size", [0.0, 1e-30])
def test_gradients_of_zero_and_nearly_zero_leave_only_the_decay(size, ns_dtype):
    optimizer = Muon(parameters(), ns_dtype=ns_dtype)
    trained = train(optimizer, gradient=lambda shape, *seed: torch.full(shape, size))
    for parameter, start in zip(trained, parameters(), strict=True):
        decay = math.prod(1 - 0.02 / (step + 1) * (0.1 + 0.1 * step) for step in range(4))
        torch.testing.assert_close(parameter, start * decay)


def test_parameters_without_gradient_are_left_alone():
    trained, frozen = parameters([(8, 4), (8, 4)])
    optimizer = Muon([trained, frozen])
    trained.grad = normal((8, 4), 1)
    before = frozen.detach().clone()
    optimizer.step()
    assert torch.equal(frozen, before) and not optimizer.state[frozen]
    assert set(optimizer.state[trained]) == {"momentum_buffer"}


def test_groups_keep_their_own_settings():
    first, second = parameters([(8, 4), (8, 4)])
    optimizer = Muon([dict(params=[first], lr=0.0, weight_decay=0.5), dict(params=[second], lr=0.1)], weight_decay=0.0)
    before = [first.detach().clone(), second.detach().clone()]
    first.grad, second.grad = normal((8, 4), 1), normal((8, 4), 2)
    optimizer.step()
    assert torch.equal(first, before[0])
    assert torch.linalg.svdvals(second - before[1]).min() > 0.05


def test_it_continues_from_the_state_of_torch(monkeypatch):
    monkeypatch.setattr(newton_schulz, "lacks_products", lambda dtype: False)
    theirs, ours = torch.optim.Muon(parameters()), Muon(parameters())
    train(theirs)
    with torch.no_grad():
        for mine, other in zip(ours.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True):
            mine.copy_(other)
    state = copy.deepcopy(theirs.state_dict()["state"])
    ours.load_state_dict({"state": state, "param_groups": ours.state_dict()["param_groups"]})
    assert all(map(torch.equal, train(ours), train(theirs)))


def test_a_closure_is_called_with_gradients_enabled():
    (parameter,) = parameters([(4, 4)])
    optimizer = Muon([parameter])

    def closure():
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) > optimizer.step(closure)


@pytest.mark.parametrize(
    ("shape", "kwargs", "sentence"),
    [
        ((8,), {}, "matrices"),
        ((2, 2, 2, 2), {}, "matrices"),
        ((8, 4), {"ns_dtype": "float16"}, "'float16'.*bfloat16 or float32"),
        ((8, 4), {"adjust_lr_fn": "spectral"}, "'spectral'.*original or match_rms_adamw"),
        ((8, 4), {"ns_coefficients": "cubic"}, "'cubic'.*quintic or polar_express"),
    ],
)
def test_what_it_cannot_do_is_refused(shape, kwargs, sentence):
    with pytest.raises(ValueError, match=sentence):
        Muon(parameters([shape]), **kwargs)
