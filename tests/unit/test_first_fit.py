import json

import numpy as np

from titan_loom.data.first_fit import LOOK_AHEAD, FirstFitStream
from titan_loom.data.tokens import NO_COUNTS, TokenisedDocument


def stream_of(lengths, seq_len, state=(0, 0, 0, [])):
    """Document i, the only one of its row, is `lengths[i]` times the token i; then come whole rows of -1 for ever."""

    def documents():
        for i, length in enumerate(lengths):
            if i >= state[0]:
                yield TokenisedDocument(np.full(length, i), i, 0, NO_COUNTS)
        while True:
            yield TokenisedDocument(np.full(seq_len + 1, -1), len(lengths), 0, NO_COUNTS)

    return FirstFitStream(documents(), state, seq_len=seq_len)


def rows_of(stream, num_rows, seq_len=8):
    """(document, tokens) of each chunk of each row."""
    return [[(int(chunk[0]), len(chunk)) for chunk in stream.read_row(seq_len)] for _ in range(num_rows)]


def test_a_row_takes_the_first_chunks_that_fit():
    # 21 tokens are chunks of 9, 9 and 3, which take 8, 8 and 2 of a row; 10 are one of 9 and a single token.
    found = rows_of(stream_of([4, 21, 8, 2, 10, 3], seq_len=8), 6)
    assert found == [[(0, 4), (1, 3), (3, 2), (5, 3)], [(1, 9)], [(1, 9)], [(2, 8)], [(4, 9)], [(-1, 9)]]


def test_a_chunk_beyond_the_look_ahead_waits():
    rows = rows_of(stream_of([8] + [9] * (LOOK_AHEAD - 1) + [2, 2], seq_len=8), LOOK_AHEAD + 1)
    assert rows[0] == [(0, 8), (LOOK_AHEAD, 2)]  # the place of the first chunk was free for one more
    assert rows[1:LOOK_AHEAD] == [[(i, 9)] for i in range(1, LOOK_AHEAD)]
    assert rows[LOOK_AHEAD] == [(LOOK_AHEAD + 1, 2)]


def test_a_state_is_small_and_goes_on_exactly():
    lengths = np.random.default_rng(0).integers(1, 40, 400).tolist()
    reference, states, expected = stream_of(lengths, 16), [], []
    for _ in range(200):
        states.append(json.loads(json.dumps(reference.state())))
        expected += rows_of(reference, 1, 16)
    assert max(len(json.dumps(state)) for state in states) < 400
    assert any(state[2] for state in states) and any(state[3] for state in states)
    for start in range(0, 190, 7):
        again = stream_of(lengths, 16, states[start])
        assert list(again.state()) == states[start]
        assert rows_of(again, 3, 16) == expected[start : start + 3]
        twice = stream_of(lengths, 16, json.loads(json.dumps(again.state())))
        assert rows_of(twice, 7, 16) == expected[start + 3 : start + 10]
