import json
from collections import Counter
from itertools import islice

import numpy as np
import pytest

from tests.unit.data_corpus import row_stream, shards_of, write_corpus, write_parquet, write_parts
from titan_loom.data.sequences import SequenceStream
from titan_loom.data.tokenizer import load_tokenizer
from titan_loom.data.tokens import tokenise
from titan_loom.errors import UserError

TOKENIZER = load_tokenizer()


def token_stream(shards, lane=0, lanes=1, first=0, state=None, **options):
    return tokenise(row_stream(shards, lane, lanes, state, **options), TOKENIZER, first)


def sequence_stream(shards, state=None, **options):
    row_state, document, token = state or (row_stream(shards).state(), 0, 0)
    documents = token_stream(shards, first=document, state=row_state, **options)
    return SequenceStream(documents, (row_state, document, token))


@pytest.fixture
def shards(tmp_path):
    write_parts(tmp_path, [9, 0, 5, 7])
    return shards_of(tmp_path, 1)


@pytest.fixture
def repositories(tmp_path):
    write_corpus(tmp_path)
    return shards_of(tmp_path / "code", 1, "repository")


@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_an_epochs_documents_are_the_sources(tmp_path, lanes):
    texts = write_parts(tmp_path, [9, 0, 5, 7])
    write_parquet(tmp_path / "blank.parquet", ["", " \n"])
    found = Counter()
    for lane in range(lanes):
        for document in token_stream(shards_of(tmp_path, lanes), lane, lanes):
            if document.row_state[0] > 0:
                break
            assert document.tokens[-1] == TOKENIZER.eos_id
            found[TOKENIZER.decode(document.tokens[:-1])] += 1
    assert found == Counter(texts)


def test_targets_are_all_tokens_but_the_first(shards):
    stream = np.concatenate([document.tokens for document in islice(token_stream(shards), 60)])
    sequences = sequence_stream(shards)
    rows = [sequences.read_row(16)[0] for _ in range((len(stream) - 1) // 16)]
    assert all(row.dtype == np.int32 and row.shape == (17,) for row in rows)
    targets = np.concatenate([row[1:] for row in rows])
    np.testing.assert_array_equal(targets, stream[1 : len(targets) + 1])
    inputs = np.concatenate([row[:-1] for row in rows])
    np.testing.assert_array_equal(inputs, stream[: len(inputs)])


def test_reads_of_any_length_follow_one_another(shards):
    whole = sequence_stream(shards).read_row(200)[0]
    stream = sequence_stream(shards)
    pieces = [stream.read_row(n)[0][:-1] for n in (1, 2, 50, 3, 100, 44)]
    np.testing.assert_array_equal(np.concatenate(pieces), whole[:-1])


@pytest.mark.parametrize("encode_batch_size", [1, 3, 50])
def test_tokens_and_positions_do_not_depend_on_the_tokenizers_batch(repositories, encode_batch_size):
    reference = sequence_stream(repositories, form="repository")
    stream = sequence_stream(repositories, form="repository", encode_batch_size=encode_batch_size)
    for _ in range(30):
        np.testing.assert_array_equal(stream.read_row(64)[0], reference.read_row(64)[0])
        assert stream.state() == reference.state()


def test_resume_after_any_sequence_twice_in_a_row_is_exact(repositories):
    stream = sequence_stream(repositories, form="repository")
    rows, states = [], []
    for _ in range(40):
        states.append(json.loads(json.dumps(stream.state())))
        rows.append(stream.read_row(32)[0])
    assert len({state[1] for state in states}) > 1, "the test must stop inside repositories"
    for start, state in enumerate(states[:-2]):
        once = sequence_stream(repositories, form="repository", state=state, encode_batch_size=1 + start % 5)
        np.testing.assert_array_equal(once.read_row(32)[0], rows[start])
        twice = sequence_stream(repositories, form="repository", state=json.loads(json.dumps(once.state())))
        for row in rows[start + 1 : start + 5]:
            np.testing.assert_array_equal(twice.read_row(32)[0], row)


def test_a_state_taken_before_anything_was_read_is_the_start(shards):
    np.testing.assert_array_equal(
        sequence_stream(shards, state=sequence_stream(shards).state()).read_row(99)[0],
        sequence_stream(shards).read_row(99)[0],
    )


def test_eos_written_in_text_does_not_end_a_document(tmp_path):
    write_parquet(tmp_path / "a.parquet", ["one<|eos|>two"])
    tokens = sequence_stream(shards_of(tmp_path, 1)).read_row(400)[0]
    ends = np.flatnonzero(tokens == TOKENIZER.eos_id)
    assert set(np.diff(ends)) == {ends[0] + 1}
    assert TOKENIZER.decode(tokens[: ends[0]]) == "one<|eos|>two"


def test_rows_that_give_no_document_are_an_error_soon(tmp_path):
    # 1,000 epochs of 2,000 unusable files once took a minute.
    write_parquet(tmp_path / "a.parquet", [""] * 40)
    rows = row_stream(shards_of(tmp_path, 1))
    with pytest.raises(UserError, match=r"data\.sources\.s: no row gives a document in format 'text'"):
        next(tokenise(rows, TOKENIZER))
    assert rows.epoch <= 3


@pytest.mark.parametrize("lanes", [2, 8, 16])
def test_every_lane_of_many_gets_the_only_document(tmp_path, lanes):
    write_parquet(tmp_path / "a.parquet", ["the only one"] + [""] * (lanes - 1))
    shards = shards_of(tmp_path, lanes)
    assert len(shards) == lanes
    for lane in range(lanes):
        assert TOKENIZER.decode(next(token_stream(shards, lane, lanes)).tokens[:-1]) == "the only one"
