"""What exports promise to those who have torch and transformers only; each check has a control that must fail.

    python check_exports.py FOLDER ...

Runs alone, in any environment. The weights must be such that context matters.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, pipeline

PROMPTS = ["def main():", "import os, sys", "class Name(object):\n    def __init__(self): return 12"]
TOLERANCE = 1e-5
"""Of the largest logit, in fp32. The controls are off by ten times this at least."""


def check_loading(folder: str):
    """Model and tokenizer, as transformers loads them; what it saves of the model is the same model."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    assert tokenizer.model_max_length >= 64 and tokenizer.eos_token_id == 2 and tokenizer.pad_token_id == 0
    assert tokenizer("1 + 12")["input_ids"] == tokenizer.encode("1 + 12") and len(tokenizer.encode("12")) == 2
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == config.tie_word_embeddings
    text_generation = pipeline("text-generation", model=model, tokenizer=tokenizer)
    (result,) = text_generation(PROMPTS[0], max_new_tokens=5, do_sample=False, num_loops=3)
    assert len(result["generated_text"]) > len(PROMPTS[0])
    inputs = tokenizer(PROMPTS[:2], return_tensors="pt", padding=True, padding_side="left")
    assert len(model.generate(**inputs, max_new_tokens=4, do_sample=True, top_k=5)) == 2
    model.save_pretrained(f"{folder}-saved")
    again = AutoModelForCausalLM.from_pretrained(f"{folder}-saved", trust_remote_code=True)
    ids = torch.arange(3, 40)[None]
    assert torch.equal(model(ids).logits, again(ids).logits)
    return model, tokenizer


def distance(logits, expected) -> float:
    return ((logits - expected).abs().max() / expected.abs().max()).item()


def check_cache(model, ids, num_loops: int) -> tuple[float, float]:
    """Token by token with a cache against the whole, and the control, in which each token's cache is dropped."""
    output = model(ids[:, :1], num_loops=num_loops)
    logits, forgetful = [output.logits], [output.logits]
    for token in ids[:, 1:].split(1, dim=1):
        output = model(token, cache=output.cache, num_loops=num_loops)
        logits.append(output.logits)
        forgetful.append(model(token, num_loops=num_loops).logits)
    whole = model(ids, num_loops=num_loops, use_cache=False).logits
    return distance(torch.cat(logits, 1), whole), distance(torch.cat(forgetful, 1), whole)


def check_padding(model, tokenizer, num_loops: int) -> tuple[float, float]:
    """A batch padded on the left against its prompts alone, and the control, in which the padding is not masked."""

    def generate(inputs):
        options = {"max_new_tokens": 8, "do_sample": False, "no_repeat_ngram_size": 1, "suppress_tokens": [0, 2]}
        return model.generate(**inputs, **options, num_loops=num_loops)[:, inputs["input_ids"].shape[1] :]

    prompts = [tokenizer(prompt, return_tensors="pt") for prompt in PROMPTS]
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True, padding_side="left")
    assert torch.equal(generate(batch), torch.cat([generate(prompt) for prompt in prompts]))
    # Few logits decide on a token: those that do not are compared as well.
    alone = torch.cat([model(**prompt, num_loops=num_loops).logits[:, -1] for prompt in prompts])
    padded = model(**batch, num_loops=num_loops).logits[:, -1]
    unmasked = model(batch["input_ids"], num_loops=num_loops).logits[:, -1]
    return distance(padded, alone), distance(unmasked, alone)


@torch.no_grad()
def check(folder: str) -> str:
    """All checks; what was measured, in a line."""
    model, tokenizer = check_loading(folder)
    ids = tokenizer(PROMPTS[2], return_tensors="pt")["input_ids"]
    whole, cached, padded = {}, [], []
    for num_loops in range(1, 2 * model.config.num_loops + 1):
        whole[num_loops] = model(ids, num_loops=num_loops).logits
        cached.append(check_cache(model, ids, num_loops))
        if num_loops % model.config.num_loops == 0:
            padded.append(check_padding(model, tokenizer, num_loops))
        others = [distance(whole[num_loops], whole[other]) for other in whole if other != num_loops]
        assert min(others, default=1) > TOLERANCE, (folder, num_loops, others)
    measured = []
    for name, control, found in (("cached", "dropped", cached), ("padded", "unmasked", padded)):
        off, control_off = max(own for own, _ in found), min(other for _, other in found)
        measured.append(f"{name} {off:.1e}, {control} {control_off:.1e}")
        is_another_recurrence = name == "cached" and getattr(model.config, "kv_cache", None) == "shared"
        assert off < TOLERANCE or is_another_recurrence, (folder, measured)
        assert control_off > 10 * TOLERANCE, (folder, measured)
    return f"{Path(folder).name:24} loops 1 to {max(whole)}   {'   '.join(measured)}"


def main() -> None:
    for folder in sys.argv[1:]:
        print(check(folder), flush=True)
    assert not [name for name in sys.modules if name.startswith("titan_loom.")]


if __name__ == "__main__":
    main()
