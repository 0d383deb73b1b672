import json
import pickle

import numpy as np
import pytest

from tests.unit.data_corpus import CORPUS
from titan_loom.data import train_tokenizer
from titan_loom.data.tokenizer import DEFAULT_PATH, EOS_ID, check_tokenizer, load_tokenizer
from titan_loom.errors import UserError

TEXTS = ["def f(x):\n    return x + 1\n", "", "naïve 2048 – 日本 \0 \r\n"]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


def test_the_packaged_tokenizer_has_the_sizes_and_ids_of_the_models(tokenizer):
    check_tokenizer(tokenizer, 8192)
    assert (DEFAULT_PATH / "tokenizer.json").stat().st_size < 250_000


def test_every_text_comes_back_and_ends_in_eos(tokenizer):
    for text, ids in zip(TEXTS, tokenizer.encode_batch(TEXTS), strict=True):
        assert ids.dtype == np.int32 and ids[-1] == EOS_ID
        assert tokenizer.decode(ids[:-1]) == text


def test_each_digit_is_its_own_token(tokenizer):
    (ids,) = tokenizer.encode_batch(["in 2048"])
    assert [tokenizer.decode([i]) for i in ids[-5:-1]] == ["2", "0", "4", "8"]


def test_special_tokens_written_in_text_stay_text(tokenizer):
    text = "a<|eos|>b<|pad|><|bos|>"
    for encoder in (tokenizer, pickle.loads(pickle.dumps(tokenizer))):
        (ids,) = encoder.encode_batch([text])
        assert ids[:-1].min() > EOS_ID
        assert encoder.decode(ids[:-1]) == text


def test_truncation_padding_and_templates_of_a_file_are_ignored(tokenizer, tmp_path):
    config = json.loads((DEFAULT_PATH / "tokenizer.json").read_text())
    config["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    config["padding"] = {
        "strategy": {"Fixed": 50},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|pad|>",
    }
    special = {"id": "<|bos|>", "ids": [1], "tokens": ["<|bos|>"]}
    single = [{"SpecialToken": {"id": "<|bos|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    config["post_processor"] = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|bos|>": special},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(config))
    changed = load_tokenizer(str(tmp_path))
    for found, expected in zip(changed.encode_batch(TEXTS), tokenizer.encode_batch(TEXTS), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_another_size_or_eos_is_said_with_what_was_found(tokenizer, tmp_path):
    with pytest.raises(UserError, match=r"model\.tokenizer_path.*8,192 entries.*50,000"):
        check_tokenizer(tokenizer, 50_000)
    for name, found in [("<|end|>", "is missing"), (None, "has id 0")]:
        text = (DEFAULT_PATH / "tokenizer.json").read_text()
        if name:
            text = text.replace("<|eos|>", name)
        else:
            text = text.replace("<|eos|>", "<|x|>").replace("<|pad|>", "<|eos|>").replace("<|x|>", "<|pad|>")
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(UserError, match=rf"model\.tokenizer_path: <\|eos\|> {found}.*must have id 2"):
            check_tokenizer(load_tokenizer(str(tmp_path)), 8192)


def test_a_missing_or_broken_file_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match=r"model\.tokenizer_path = '.*': .*tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(UserError, match=r"model\.tokenizer_path.*is no tokenizer") as raised:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(raised.value)


def train(folder, *arguments):
    sources = [str(CORPUS / "repositories.jsonl"), str(CORPUS / "prose.jsonl")]
    train_tokenizer.main(["--path", *sources, "--out", str(folder), *arguments])
    return (folder / "tokenizer.json").read_bytes()


def test_training_is_deterministic_and_gives_a_loadable_tokenizer(tmp_path):
    first = train(tmp_path / "1", "--vocab_size", "400")
    assert first == train(tmp_path / "2", "--vocab_size", "400")
    tokenizer = load_tokenizer(str(tmp_path / "1"))
    check_tokenizer(tokenizer, 400)
    assert tokenizer.decode(tokenizer.encode_batch(TEXTS)[2][:-1]) == TEXTS[2]
    config = json.loads((tmp_path / "1" / "tokenizer_config.json").read_text())
    assert config["eos_token"] == "<|eos|>"


@pytest.mark.parametrize("size", ["100", "50_000"])
def test_training_refuses_a_size_that_it_cannot_meet(tmp_path, size):
    with pytest.raises(UserError, match="vocab_size"):
        train(tmp_path, "--vocab_size", size)


def test_text_of_the_source_shapes_is_found_by_its_columns():
    texts = list(train_tokenizer.documents((str(CORPUS / "repositories.jsonl"), str(CORPUS / "prose.jsonl"))))
    assert texts[0].startswith("repository: weavers/")
    assert not texts[-1].startswith("repository: ")


def refuse(tmp_path, description: dict, match: str):
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    with pytest.raises(UserError, match=match) as raised:
        check_tokenizer(load_tokenizer(str(tmp_path)), 8192)
    assert "\n" not in str(raised.value)


def test_an_id_beyond_the_vocabulary_is_refused(tmp_path):
    # It has as many entries as the model, so it once passed and failed in the embedding.
    description = json.loads((DEFAULT_PATH / "tokenizer.json").read_text())
    last = max(description["model"]["vocab"], key=description["model"]["vocab"].get)
    description["model"]["vocab"][last] = 9000
    refuse(tmp_path, description, r"model\.tokenizer_path: the tokenizer has the id 9,000, .* vocab_size, 8,192")


def test_a_tokenizer_that_cannot_encode_every_text_is_refused(tmp_path):
    special = json.loads((DEFAULT_PATH / "tokenizer.json").read_text())["added_tokens"]
    vocab = {f"word{i}": i for i in range(3, 8192)} | {token["content"]: token["id"] for token in special}
    description = {"version": "1.0", "added_tokens": special, "pre_tokenizer": {"type": "Whitespace"}}
    words = {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"}
    refuse(tmp_path, {**description, "model": words}, r"must encode any text, but unknown words stop it \(.*UNK")
    pairs = {"type": "BPE", "vocab": vocab, "merges": []}
    refuse(tmp_path, {**description, "model": pairs}, r"must encode any text, but gives nothing for all bytes")
