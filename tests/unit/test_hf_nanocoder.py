"""The exported NanoCoder in transformers. Its weights make context matter, as the controls show."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers")

from transformers import DynamicCache, StaticCache

from tests.exports import TINY, export
from titan_loom.models.nanocoder.export import to_hf_config
from titan_loom.models.nanocoder.hf.configuration_nanocoder import NanoCoderConfig
from titan_loom.models.nanocoder.hf.modeling_nanocoder import NanoCoderForCausalLM

SMALL = replace(TINY, vocab_size=61)
VARIANTS = {
    "scalar": SMALL,
    "gated": replace(SMALL, refresh="gated"),
    "schedule": replace(SMALL, schedule=(0, 1, 1, 2, 0), ngram_visits=(0, 2)),
}
LOOPS = range(1, 2 * SMALL.num_loops + 1)


@pytest.fixture(params=VARIANTS)
def model(request):
    return build(request.param)


def build(variant: str) -> NanoCoderForCausalLM:
    """In fp64, with every parameter drawn at random."""
    model = NanoCoderForCausalLM(NanoCoderConfig(**to_hf_config(VARIANTS[variant]))).double().eval()
    model.generation_config.eos_token_id = None
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4 + 0.1)
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
def test_cached_decoding_is_the_full_forward(model, lengths):
    tokens = ids()
    assert difference(in_pieces(model, tokens, lengths), model(tokens, use_cache=False).logits) < 1e-9


@torch.no_grad()
@pytest.mark.parametrize("num_loops", LOOPS)
@pytest.mark.parametrize("variant", ["scalar", "gated"])
def test_cached_decoding_with_other_loops(variant, num_loops):
    model, tokens = build(variant), ids()
    full = model(tokens, num_loops=num_loops).logits
    assert difference(in_pieces(model, tokens, [8, 1, 1, 4], num_loops=num_loops), full) < 1e-9
    assert num_loops == SMALL.num_loops or difference(full, model(tokens).logits) > 0.1


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


def generate(model, tokens, **kwargs):
    """Greedy, and without repetition, of which a tied head is fond; the padding's id is not to be chosen either."""
    kwargs = {"max_new_tokens": 8, "do_sample": False, "no_repeat_ngram_size": 1, "suppress_tokens": [0]} | kwargs
    return model.generate(tokens, **kwargs)[:, tokens.shape[1] :]


def test_generation_with_a_cache_is_generation_without(model):
    for kwargs in ({}, {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}):
        cached = generate(model, ids(), **kwargs)
        assert torch.equal(cached, generate(model, ids(), use_cache=False, **kwargs))
    if model.config.schedule is None:
        outputs = [generate(model, ids(), num_loops=n) for n in LOOPS]
        assert all(torch.equal(generate(model, ids(), num_loops=n, use_cache=False), outputs[n - 1]) for n in LOOPS)
        assert len({tuple(output.flatten().tolist()) for output in outputs}) == len(LOOPS)


@torch.no_grad()
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
def test_the_older_name_of_the_cache_and_caches_that_do_not_fit():
    model, tokens = build("gated"), ids()
    with_older_name = model(tokens[:, 5:], past_key_values=model(tokens[:, :5]).cache).logits
    assert difference(with_older_name, model(tokens).logits[:, 5:]) < 1e-9
    with pytest.raises(ValueError, match="another num_loops"):
        model(tokens, cache=model(tokens).cache, num_loops=1)
    with pytest.raises(ValueError, match="needs a DynamicCache"):
        model(tokens, cache=StaticCache(config=model.config, max_cache_len=32))
    with pytest.raises(ValueError, match="history in this cache cannot be taken back"):
        model(tokens).cache.crop(-2)
    with pytest.raises(ValueError, match="reads the ids"):
        model(inputs_embeds=torch.zeros(1, 2, 32))
    with pytest.raises(ValueError, match="attention_mask must be"):
        model(tokens, attention_mask=torch.ones(2, 1, 14, 14))


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


ELSEWHERE = """
import sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, pipeline

folder = sys.argv[1]
config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
assert config.num_hidden_layers == 6, config
tokenizer = AutoTokenizer.from_pretrained(folder)
assert tokenizer.model_max_length == 64 and tokenizer.eos_token_id == 2 and tokenizer.pad_token_id == 0
assert tokenizer("1 + 12")["input_ids"] == tokenizer.encode("1 + 12") and len(tokenizer.encode("12")) == 2
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
assert model.lm_head.weight is model.get_input_embeddings().weight
generate = pipeline("text-generation", model=model, tokenizer=tokenizer)
(result,) = generate("def main():", max_new_tokens=5, do_sample=False, num_loops=3)
assert len(result["generated_text"]) > len("def main():")
inputs = tokenizer(["def", "import os, sys"], return_tensors="pt", padding=True, padding_side="left")
assert model.generate(**inputs, max_new_tokens=4, do_sample=True, top_k=5).shape[1] <= inputs["input_ids"].shape[1] + 4
model.save_pretrained(folder + "-saved")
again = AutoModelForCausalLM.from_pretrained(folder + "-saved", trust_remote_code=True)
ids = torch.arange(3, 40)[None]
assert torch.equal(model(ids).logits, again(ids).logits)
assert not [name for name in sys.modules if name.startswith("titan_loom")]
"""


def test_the_export_is_all_that_transformers_needs(tmp_path):
    folder = export(tmp_path, replace(TINY, refresh="gated"))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", ELSEWHERE, str(folder)]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "export-saved" / "modeling_nanocoder.py").exists()

    from titan_loom.hub import convert

    convert.from_hf(tmp_path / "export-saved", tmp_path / "fine-tuned")
    convert.to_hf(tmp_path / "fine-tuned", tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
