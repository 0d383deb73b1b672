import json
import random

import pytest
import tokenizers

from tests.unit.data_corpus import CORPUS
from titan_loom.data import embedded, words
from titan_loom.data.tokenizer import DEFAULT_PATH, EOS_ID, Tokenizer
from titan_loom.data.words import Words, has_known_characters, has_known_words

TEXT = (DEFAULT_PATH / "tokenizer.json").read_text("utf-8")


@pytest.fixture(scope="module")
def library():
    tokenizer = tokenizers.Tokenizer.from_str(TEXT)
    tokenizer.encode_special_tokens = True
    return tokenizer


def check(library, texts, mine=None):
    mine = mine or Words(library)
    expected = library.encode_batch(texts, add_special_tokens=False)
    for text, encoding in zip(texts, expected, strict=True):
        assert mine.encode(text, EOS_ID).tolist() == [*encoding.ids, EOS_ID], repr(text)


def test_every_known_character_is_encoded_as_the_library_does_it(library):
    known = [chr(code) for code in range(0x3000) if has_known_characters(chr(code))]
    assert len(known) > 600
    patterns = ["{}", "a{}b", " {}1", "  {} {}\n{}{}", "{} {}", "1{}'s", "\n\n{}\n \n{}", "{}  "]
    check(library, [pattern.replace("{}", character) for character in known for pattern in patterns])


def test_random_texts_are_encoded_as_the_library_does_it(library):
    generator = random.Random(0)
    alphabet = "ab'sdtrevml 0129\t\r\n   .;_-()é ÀŁ–“”’…€±\x0b\x0c\x00\x1c\x1f\x7f\xad<|eos|>"
    texts = ["".join(generator.choices(alphabet, k=generator.randint(0, 40))) for _ in range(5_000)]
    assert all(map(has_known_characters, texts))
    check(library, texts)


def test_real_texts_are_encoded_as_the_library_does_it(library):
    topics = [embedded.row("embedded:prose", name)["text"] for name in embedded.row_names("embedded:prose")]
    files = [file["content"] for file in embedded.row("embedded:code", "json")["files"]]
    corpus = [(CORPUS / name).read_text("utf-8") for name in ("prose.jsonl", "repositories.jsonl")]
    texts = list(filter(has_known_characters, topics + files + corpus))
    assert len(texts) > 50
    check(library, texts)


def test_other_texts_are_left_to_the_library(library):
    others = ["x²", "½", "a\u00a0b", "a\u2028b", "日本", "\x85", "٣", "Привет"]
    assert not any(map(has_known_characters, others))
    texts = [other + " and one, two" for other in others]
    mixed = [text for pair in zip(texts, ["plain", "text"] * 4, strict=True) for text in pair]
    expected = [[*encoding.ids, EOS_ID] for encoding in library.encode_batch(mixed, add_special_tokens=False)]
    assert [ids.tolist() for ids in Tokenizer(TEXT).encode_batch(mixed)] == expected


def test_the_dictionary_starts_anew_when_it_is_full(library, monkeypatch):
    monkeypatch.setattr(words, "MAX_CHARS", 50)
    mine = Words(library)
    check(library, [f"word{i} number {i} of many" * 3 for i in range(100)], mine)
    assert sum(map(len, mine._ids)) <= 150


def changed(**changes) -> str:
    return json.dumps({**json.loads(TEXT), **changes})


def test_only_tokenizers_that_find_the_same_words_are_trusted():
    assert has_known_words(TEXT)
    description = json.loads(TEXT)
    token = {**description["added_tokens"][0], "id": 300, "content": "print", "special": False}
    others = [
        changed(pre_tokenizer=None),
        changed(pre_tokenizer=description["pre_tokenizer"]["pretokenizers"][1]),
        changed(normalizer={"type": "NFC"}),
        changed(added_tokens=[*description["added_tokens"], token]),
        changed(model={**description["model"], "dropout": 0.1}),
    ]
    assert not any(map(has_known_words, others))
    for text in others[:4]:
        library = tokenizers.Tokenizer.from_str(text)
        library.encode_special_tokens = True
        sample = "print(10) e\u0301 and  more"
        assert Tokenizer(text).encode_batch([sample])[0].tolist()[:-1] == library.encode(sample).ids
