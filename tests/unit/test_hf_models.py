"""The exported models in transformers. Their weights make context matter, as the controls show."""

import math
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers")

from transformers import DynamicCache, StaticCache

from tests import check_exports
from tests.exports import TINY, TINY_LOOM, export, randomize
from titan_loom.hub import convert
from titan_loom.hub.families import hf_classes, to_hf_config

SMALL = replace(TINY, vocab_size=61)
LOOM = replace(TINY_LOOM, vocab_size=61, residual_lambda=2.0)  # much of attention in the stream
BARBADOS = replace(LOOM, kv_gate=True)
VARIANTS = {
    "scalar": SMALL,
    "gated": replace(SMALL, refresh="gated"),
    "schedule": replace(SMALL, schedule=(0, 1, 1, 2, 0), ngram_visits=(0, 2)),
    "loom": LOOM,
    "barbados": BARBADOS,
    "shared": replace(BARBADOS, kv_cache="shared"),
}
EXACT = [variant for variant in VARIANTS if variant != "shared"]
"""In which a cache changes nothing."""


@pytest.fixture
def model(request):
    return build(request.param)


def build(variant: str):
    """In fp64, with every parameter and buffer drawn at random."""
    args = VARIANTS[variant]
    family = "nanocoder" if variant in ("scalar", "gated", "schedule") else "loom"
    classes = hf_classes(family)
    model = classes.model(classes.config(**to_hf_config(family, args))).double().eval()
    model.generation_config.eos_token_id = None
    randomize(model)
    return model


def ids(batch: int = 2, seq: int = 14) -> torch.Tensor:
    return torch.randint(3, 61, (batch, seq), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def in_pieces(model, tokens, lengths, forget=lambda cache: None, **kwargs):
    """Logits of `tokens`, given to the model in pieces of `lengths`; `forget` is applied to the cache in between."""
    logits, cache = [], DynamicCache()
    for piece in tokens.split(lengths, dim=1):
        output = model(piece, cache=cache, **kwargs)
        assert output.cache is cache
        logits.append(output.logits)
        forget(cache)
    return torch.cat(logits, 1)


def difference(a, b) -> float:
    return (a - b).abs().max().item()


@torch.no_grad()
@pytest.mark.parametrize("lengths", [[1] * 14, [10, 1, 3]], ids=["tokens", "pieces"])
@pytest.mark.parametrize("model", EXACT, indirect=True)
def test_cached_decoding_is_the_full_forward(model, lengths):
    tokens = ids()
    assert difference(in_pieces(model, tokens, lengths), model(tokens, use_cache=False).logits) < 1e-9


@torch.no_grad()
@pytest.mark.parametrize("num_loops", range(1, 7))
@pytest.mark.parametrize("model", ["gated", "barbados"], indirect=True)
def test_cached_decoding_with_other_loops(model, num_loops):
    tokens = ids()
    full = model(tokens, num_loops=num_loops).logits
    assert difference(in_pieces(model, tokens, [8, 1, 1, 4], num_loops=num_loops), full) < 1e-9
    assert num_loops == model.config.num_loops or difference(full, model(tokens).logits) > 0.1


def _forget_ids(cache):
    layer = cache.layers[SMALL.num_visits]
    layer.keys = layer.keys.fill_(7)


def _forget_histories(cache):
    for layer in cache.layers[SMALL.num_visits + 1 :]:
        layer.keys = torch.zeros_like(layer.keys)


def _forget_a_visit(cache):
    cache.layers[2].values = torch.zeros_like(cache.layers[2].values)


@torch.no_grad()
@pytest.mark.parametrize("forget", [_forget_ids, _forget_histories, _forget_a_visit, DynamicCache.reset])
def test_everything_in_the_cache_matters(forget):
    model, tokens = build("gated"), ids()
    assert difference(in_pieces(model, tokens, [1] * 14, forget), model(tokens).logits) > 0.01


@torch.no_grad()
def shared_cache_recurrence(model, tokens):
    """Logits of Barbados, by the equations, one token after another: each sees the others' last keys and values."""
    config, w = model.config, {name: t for name, t in model.state_dict().items()}
    layers, loops, head_dim, heads = config.num_layers, config.num_loops, config.head_dim, config.num_attention_heads
    group, gamma = heads // config.num_key_value_heads, 2 / (loops * math.sqrt(layers))

    def rho(v):
        return v / (v.square().mean() + config.rms_norm_eps).sqrt()

    def turn(x, position):
        angles = position * config.rope_theta ** (-torch.arange(head_dim // 2).double() / (head_dim // 2))
        a, b = x[:, : head_dim // 2], x[:, head_dim // 2 :]
        return torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), -1)

    past = [[] for _ in range(layers)]
    logits = []
    for position, token in enumerate(tokens.tolist()):
        z = e = w["model.embedding.weight"][token] * math.sqrt(config.hidden_size)
        n_h, d_h, states = 0, 0, [None] * layers
        for loop in range(loops):
            g = 1 if loop == 0 else 2 / ((loop + 1) * math.sqrt(layers))
            x, n_l, d_l = (1 - g) * z + g * e, 0, 0
            for layer in range(layers):
                name = f"model.blocks.{layer}"
                u = s = rho(x)
                if loop:
                    both = torch.cat((states[layer], u))
                    open_ = torch.sigmoid(w[f"{name}.kv_gate.gate.weight"] @ both + w[f"{name}.kv_gate.gate.bias"])
                    s = open_ * states[layer] + (1 - open_) * u
                states[layer] = s
                rows = w[f"{name}.attention.projection.weight"].unflatten(0, (-1, head_dim))
                gate, q = rows[:heads] @ u, turn(rows[heads : 2 * heads] @ u, position)
                k, v = (rows[2 * heads :] @ s).chunk(2)
                seen = [*past[layer], (turn(k, position), v)]
                a = []
                for head in range(heads):
                    scores = torch.stack([q[head] @ k[head // group] for k, _ in seen]) / math.sqrt(head_dim)
                    values = torch.stack([v[head // group] for _, v in seen])
                    a.append(torch.sigmoid(gate[head]) * (scores.softmax(0) @ values))
                n_l, d_l = 0.5 * n_l + gamma * (w[f"{name}.attention.output.weight"] @ torch.cat(a)), 0.5 * d_l + 1
                n_h, d_h = 0.5 * n_h + n_l / d_l, 0.5 * d_h + 1
                y = x + n_h / d_h + n_l / d_l
                t, out = rho(y), 0
                scores = torch.sigmoid(w[f"model.routers.{loop}"][layer] @ t)
                chosen = (scores + 2e-3 * w["model.router_bias_steps"][layer]).topk(config.num_experts_per_tok).indices
                for expert in chosen.tolist():
                    up = w[f"{name}.experts.gate_up"][expert] @ t
                    up = F.silu(up[: len(up) // 2]) * up[len(up) // 2 :]
                    out = out + scores[expert] / scores[chosen].sum() * (w[f"{name}.experts.down"][expert] @ up)
                gate, up, down = (w[f"{name}.experts.shared.{part}.weight"] for part in ("gate", "up", "down"))
                out = out + down @ (F.silu(gate @ t) * (up @ t))
                x = rho(y + gamma * w[f"{name}.branch_norm"] * rho(out))
                if loop == loops - 1:
                    past[layer].append(seen[-1])
            z = rho(x)
        logits.append(w["lm_head.weight"] @ z)
    return torch.stack(logits)


@torch.no_grad()
def test_the_shared_cache_keeps_the_last_loop_and_no_more():
    model, tokens = build("shared"), ids(1)
    one_by_one = in_pieces(model, tokens, [1] * 14)
    assert difference(one_by_one[0], shared_cache_recurrence(model, tokens[0])) < 1e-9
    parallel = model(tokens)
    assert difference(one_by_one, parallel.logits) > 0.001
    assert difference(parallel.logits, build("barbados")(tokens).logits) == 0
    # A prompt is read in the parallel form; then its tokens are what their last loops left, however many ran.
    assert len(parallel.cache.layers) == model.config.num_layers + 1
    again = in_pieces(model, tokens, [13, 1])
    assert difference(again[:, :13], parallel.logits[:, :13]) < 1e-9 < difference(again[:, 13], parallel.logits[:, 13])


def generate(model, tokens, **kwargs):
    """Greedy, and without repetition, of which a tied head is fond; the padding's id is not to be chosen either."""
    kwargs = {"max_new_tokens": 8, "do_sample": False, "no_repeat_ngram_size": 1, "suppress_tokens": [0]} | kwargs
    return model.generate(tokens, **kwargs)[:, tokens.shape[1] :]


@pytest.mark.parametrize("model", EXACT, indirect=True)
def test_generation_with_a_cache_is_generation_without(model):
    for kwargs in ({}, {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}):
        cached = generate(model, ids(), **kwargs)
        assert torch.equal(cached, generate(model, ids(), use_cache=False, **kwargs))
    if getattr(model.config, "schedule", None) is None:
        more = generate(model, ids(), num_loops=4)
        assert torch.equal(more, generate(model, ids(), num_loops=4, use_cache=False))
        assert not torch.equal(more, generate(model, ids()))


@torch.no_grad()
@pytest.mark.parametrize("model", VARIANTS, indirect=True)
def test_a_padded_batch_gives_what_its_prompts_give_alone(model):
    prompts = [ids(1, 14), ids(1, 5), ids(1, 9)]
    padded = torch.cat([F.pad(prompt, (14 - prompt.shape[1], 0), value=0) for prompt in prompts])
    mask = torch.stack([torch.arange(14) >= 14 - prompt.shape[1] for prompt in prompts]).long()
    alone = torch.cat([generate(model, prompt) for prompt in prompts])
    assert torch.equal(generate(model, padded, attention_mask=mask), alone)
    assert not torch.equal(generate(model, padded, attention_mask=torch.ones_like(mask)), alone)
    logits = model(padded, attention_mask=mask).logits
    on_the_right = model(F.pad(prompts[1], (0, 9)), attention_mask=mask[1:2].flip(1)).logits
    expected = model(prompts[1]).logits
    assert difference(logits[1:2, -5:], expected) < 1e-9
    assert difference(on_the_right[:, :5], expected) < 1e-9
    assert logits.isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("model", ["gated", "loom"], indirect=True)
def test_the_older_name_of_the_cache_and_caches_that_do_not_fit(model):
    tokens = ids()
    with_older_name = model(tokens[:, 5:], past_key_values=model(tokens[:, :5]).cache).logits
    assert difference(with_older_name, model(tokens).logits[:, 5:]) < 1e-9
    with pytest.raises(ValueError, match="another num_loops"):
        model(tokens, cache=model(tokens).cache, num_loops=1)
    with pytest.raises(ValueError, match="needs a DynamicCache"):
        model(tokens, cache=StaticCache(config=model.config, max_cache_len=32))
    with pytest.raises(ValueError, match="attention_mask must be"):
        model(tokens, attention_mask=torch.ones(2, 1, 14, 14))
    if model.config.model_type == "nanocoder":
        with pytest.raises(ValueError, match="history in this cache cannot be taken back"):
            model(tokens).cache.crop(-2)
        with pytest.raises(ValueError, match="reads the ids"):
            model(inputs_embeds=torch.zeros(1, 2, 32))


@pytest.mark.parametrize("model", EXACT, indirect=True)
def test_the_loss_and_gradients_of_fine_tuning(model):
    tokens = ids()
    labels = tokens.clone()
    labels[:, :4] = -100
    model.train()
    output = model(tokens, labels=labels)
    expected = F.cross_entropy(output.logits[:, 3:-1].flatten(0, 1), tokens[:, 4:].flatten())
    assert abs(output.loss.item() - expected.item()) < 1e-5  # transformers computes it in fp32
    gradients = torch.autograd.grad(output.loss, list(model.parameters()))
    assert all(gradient.abs().max() > 0 for gradient in gradients)
    for reentrant in (False, True):
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        output = model(tokens, labels=labels)
        assert output.cache is None
        again = torch.autograd.grad if not reentrant else _backward
        for a, b in zip(gradients, again(output.loss, list(model.parameters())), strict=True):
            assert difference(a, b) < 1e-6


def _backward(loss, parameters):
    loss.backward()
    return [parameter.grad for parameter in parameters]


def test_the_exports_are_all_that_transformers_needs(tmp_path):
    folders = [export(tmp_path / args.__class__.__name__, args) for args in (replace(TINY, refresh="gated"), TINY_LOOM)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, check_exports.__file__, *map(str, folders)]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for folder in folders:  # and what transformers saved of them is an export, too
        saved = folder.with_name("export-saved")
        assert list(saved.glob("modeling_*.py"))
        convert.from_hf(saved, folder.with_name("tuned"))
        convert.to_hf(folder.with_name("tuned"), folder.with_name("again"))
        again = (folder.with_name("again") / "model.safetensors").read_bytes()
        assert again == (folder / "model.safetensors").read_bytes()
