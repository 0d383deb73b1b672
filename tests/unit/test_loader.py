import hashlib
import json
import multiprocessing.synchronize
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.unit.data_corpus import BATCH, CORPUS, SEQ_LEN, TOKENIZER, loader, read, write_corpus, write_parquet
from titan_loom.config.job_config import Data, Source, Training
from titan_loom.data import lanes as lanes_module
from titan_loom.data.loader import batch_digests, combine_digests, data_fingerprint
from titan_loom.errors import UserError

REPOSITORY = Path(__file__).parents[2]
LANES = 4

GOLDEN = "0d844f430426930ecb98f03b5ec33e9b629c180523f534c62e797875bc274ec2"
"""Digest of the first 20 global batches of the corpus. It changes only with the definition of the data order."""


def jsonl_data(**changes) -> Data:
    sources = {
        "code": Source(path=str(CORPUS / "repositories.jsonl"), format="repository", share=0.75),
        "prose": Source(path=str(CORPUS / "prose.jsonl"), share=0.25),
    }
    return Data(**{"lanes": LANES, "window": 4, "sources": sources, **changes})


@pytest.fixture
def data(tmp_path) -> Data:
    write_corpus(tmp_path)
    sources = {
        "code": Source(path=str(tmp_path / "code"), format="repository", share=0.75),
        "prose": Source(path=str(tmp_path / "prose"), share=0.25),
    }
    return Data(lanes=LANES, window=4, sources=sources)


def test_the_order_of_the_data_is_golden():
    digests, _ = read(jsonl_data(), 20)
    assert hashlib.sha256("".join(digests).encode()).hexdigest() == GOLDEN


def test_batches_do_not_depend_on_workers_ranks_or_tokenizer_batches(data):
    expected, _ = read(data, 12)
    assert len(set(expected)) == 12
    for workers, degree in [(1, 1), (2, 1), (4, 1), (0, 2), (2, 2), (0, 4), (3, 4)]:
        assert read(data, 12, workers=workers, degree=degree)[0] == expected, (workers, degree)
    sources = {name: replace(source, encode_batch_size=3) for name, source in data.sources.items()}
    assert read(replace(data, sources=sources), 12)[0] == expected


def test_batches_depend_on_the_seed(data):
    assert set(read(data, 5)[0]).isdisjoint(read(data, 5, seed=1)[0])


@pytest.mark.parametrize("packing", ["stream", "first_fit"])
def test_a_resume_at_any_step_twice_in_a_row_is_exact(data, packing):
    # About 1.5 epochs of the code: the stops fall inside windows, repositories, documents and behind an epoch's end.
    data = replace(data, packing=packing)
    expected, _ = read(data, 40)
    for first in range(1, 36, 2):
        _, states = read(data, first)
        second, states = read(data, 2, start_step=first, lane_states=states)
        third, _ = read(data, 3, start_step=first + 2, lane_states=states)
        assert second + third == expected[first : first + 5], first


@pytest.mark.parametrize("layouts", [((2, 1), (0, 4), (1, 2)), ((0, 2), (4, 1), (2, 2))])
def test_workers_and_ranks_may_change_at_every_resume(data, layouts):
    expected, _ = read(data, 15)
    found, states = [], None
    for part, (workers, degree) in enumerate(layouts):
        digests, states = read(data, 5, workers=workers, degree=degree, start_step=5 * part, lane_states=states)
        found += digests
    assert found == expected


def test_states_are_those_of_the_consumed_batch_whatever_was_read_ahead(data):
    expected, states = read(data, 3)
    digests, ahead = read(data, 3, workers=2, prefetch_factor=7)
    assert (digests, ahead) == (expected, states)
    assert [json.loads(state)["step"] for state in states.values()] == [3] * LANES


def test_inputs_and_labels_are_the_lanes_streams_shifted_by_one(data):
    batches = loader(data)
    first, second = next(batches), next(batches)
    assert first.inputs.dtype == first.labels.dtype == first.sources.dtype == torch.int64
    assert first.inputs.shape == first.labels.shape == (BATCH, SEQ_LEN)
    assert (first.inputs[:, 1:] == first.labels[:, :-1]).all()
    # A lane's next sequence of a source begins with the last label of the one before.
    for lane in range(LANES):
        rows = [(batch, row) for batch in (first, second) for row in (2 * lane, 2 * lane + 1)]
        code = [(batch, row) for batch, row in rows if batch.sources[row] == 0]
        for (batch, row), (next_batch, next_row) in pairwise(code):
            assert batch.labels[row, -1] == next_batch.inputs[next_row, 0]


def test_rows_of_whole_chunks_say_where_each_begins(data):
    batches = loader(replace(data, packing="first_fit"), seq_len=1000)
    for batch in (next(batches), next(batches)):
        assert batch.inputs.dtype == batch.labels.dtype == batch.positions.dtype == torch.int64
        padding = batch.labels == -100
        assert 0 < padding.float().mean() < 0.2
        assert (batch.inputs[padding] == 0).all()
        assert (padding[:, 1:] >= padding[:, :-1]).all()  # at the end only
        firsts = batch.positions == 0
        assert firsts[:, 0].all() and (firsts[:, 1:] >= padding[:, 1:] & ~padding[:, :-1]).all()
        assert (batch.positions[:, 1:] == batch.positions[:, :-1] + 1)[~firsts[:, 1:]].all()
        inside = ~firsts[:, 1:] & ~padding[:, 1:]
        assert (batch.inputs[:, 1:] == batch.labels[:, :-1])[inside].all()
        assert not (batch.inputs == TOKENIZER.eos_id).any() and (batch.labels == TOKENIZER.eos_id).any()
        moved = replace(batch, positions=batch.positions + 1)
        assert set(batch_digests(batch)).isdisjoint(batch_digests(moved))


def test_each_batch_holds_the_sources_in_their_share(data):
    batches = loader(data)
    assert batches.source_names == ["code", "prose"]
    for _ in range(5):
        assert np.bincount(next(batches).sources).tolist() == [6, 2]


def test_a_cut_last_step_meets_the_total_and_draws_nothing_for_the_rest(data):
    total = 2 * BATCH * SEQ_LEN + 3 * SEQ_LEN + 20
    batches = loader(data, steps=3, total_tokens=total)
    tokens = [(next(batches).labels != -100).sum().item() for _ in range(2)]
    last = next(batches)
    supervised = last.labels != -100
    assert sum(tokens) + supervised.sum().item() == total
    lengths = supervised.sum(dim=1)
    assert (supervised == (torch.arange(SEQ_LEN) < lengths[:, None])).all()
    assert (last.inputs[~supervised] == 0).all()
    assert ((last.sources == -1) == (lengths == 0)).all()
    assert 0 < (lengths > 0).sum() < BATCH

    whole = loader(data, steps=4)
    for _ in range(2):
        next(whole)
    full = next(whole)
    for row in range(BATCH):
        if last.sources[row] == full.sources[row]:
            np.testing.assert_array_equal(last.labels[row, : lengths[row]], full.labels[row, : lengths[row]])


def test_a_resume_into_the_cut_last_step_is_exact(data):
    options = {"steps": 3, "total_tokens": 2 * BATCH * SEQ_LEN + 100}
    expected, _ = read(data, 3, **options)
    _, states = read(data, 2, **options)
    assert read(data, 1, degree=2, start_step=2, lane_states=states, **options)[0] == expected[2:]


def test_a_lane_without_a_state_is_an_error_and_not_a_fresh_start(data):
    _, states = read(data, 2)
    del states[2]
    with pytest.raises(UserError, match=r"data\.lanes = 4: the checkpoint of step 2 holds no state of lane 2"):
        loader(data, start_step=2, lane_states=states)
    loader(data, start_step=2, lane_states=states, rank=0, degree=2)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_users_mistake_found_while_reading_is_one_sentence(data, tmp_path, workers):
    (tmp_path / "empty").mkdir()
    for part in range(5):
        write_parquet(tmp_path / "empty" / f"{part}.parquet", [])
    sources = data.sources | {"empty": Source(path=str(tmp_path / "empty"))}
    with pytest.raises(UserError) as raised:
        next(loader(replace(data, sources=sources), workers=workers))
    assert str(raised.value) == "data.sources.empty.path holds no rows"


def test_the_run_ends_when_a_worker_dies(data):
    class Dying(lanes_module.Lane):
        def next_step(self):
            if self._index == 1 and self._step == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().next_step()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lanes_module, "Lane", Dying)
        batches = loader(data, workers=2, prefetch_factor=1)
        with pytest.raises(RuntimeError, match="worker"):
            for _ in range(5):
                next(batches)
        batches.close()


def _assert_closes_without_waiting(data):
    others = multiprocessing.active_children()
    batches = loader(data, workers=2)
    next(batches)
    workers = [worker for worker in multiprocessing.active_children() if worker not in others]
    closing = threading.Thread(target=batches.close, daemon=True)
    closing.start()
    closing.join(10)
    assert len(workers) == 2 and not closing.is_alive()
    for worker in workers:
        worker.join(10)
    assert not any(worker.is_alive() for worker in workers)


def test_closing_waits_for_no_lock_of_a_worker_that_has_ended(data):
    """A worker looks between items whether it is to leave; one that is ended in there never returns the lock."""

    class Lost(multiprocessing.synchronize.Event):
        def set(self):
            self._cond.acquire()
            super().set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing.synchronize, "Event", Lost)
        _assert_closes_without_waiting(data)


def test_closing_does_not_wait_for_a_worker_that_is_stuck(data):
    class Stuck(lanes_module.Lane):
        def next_step(self):
            if self._step == 2:
                time.sleep(60)
            return super().next_step()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lanes_module, "Lane", Stuck)
        _assert_closes_without_waiting(data)


def test_an_interpreter_leaves_with_a_loader_that_nobody_closed():
    code = """
from tests.unit.data_corpus import loader, memory_parts
from titan_loom.config.job_config import Data, Source
data = Data(lanes=4, sources={"s": Source(path="memory/rows")})
batches = loader(data, workers=2, listing={"s": memory_parts([9])})
print(tuple(next(batches).inputs.shape))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"{BATCH, SEQ_LEN}\n"), done.stderr


def test_num_workers_is_lowered_to_a_divisor_of_the_lanes(data, caplog):
    with caplog.at_level("INFO", logger="titan_loom"):
        digests, _ = read(data, 3, workers=3)
    assert "num_workers from 3 to 2" in caplog.text
    assert digests == read(data, 3)[0]


def test_digests_cover_inputs_and_labels_of_each_row(data):
    batch = next(loader(data))
    digests = batch_digests(batch)
    row = np.concatenate([batch.inputs[3].numpy(), batch.labels[3].numpy()]).astype("<i8")
    assert digests[3] == hashlib.sha256(row.tobytes()).digest()
    assert len(set(digests)) == BATCH
    assert combine_digests(digests) == hashlib.sha256(b"".join(digests)).hexdigest()


def test_the_fingerprint_names_every_key_that_changes_the_order(data, tmp_path):
    training = Training(global_batch_size=BATCH, seq_len=SEQ_LEN, steps=5)

    def changed(data=data, training=training, seed=0):
        found = data_fingerprint(data, training, seed, TOKENIZER)
        return {key for key in found.keys() | reference.keys() if found.get(key) != reference.get(key)}

    reference = data_fingerprint(data, training, 0, TOKENIZER)
    assert json.loads(json.dumps(reference)) == reference
    assert changed() == changed(training=replace(training, steps=9, local_batch_size=1)) == set()
    assert changed(seed=1) == {"debug.seed"}
    assert changed(training=replace(training, seq_len=8)) == {"training.seq_len"}
    for field, value in [
        ("lanes", 2),
        ("window", 8),
        ("open_parts", 1),
        ("mix_unit", "step"),
        ("packing", "first_fit"),
    ]:
        assert changed(replace(data, **{field: value})) == {f"data.{field}"}
    assert changed(replace(data, sources=dict(reversed(data.sources.items())))) == {"data.sources"}
    share = data.sources | {"code": replace(data.sources["code"], share=0.5)}
    assert changed(replace(data, sources=share)) == {"data.sources.code.share"}
    (tmp_path / "prose" / "0.parquet").rename(tmp_path / "prose" / "9.parquet")
    assert changed() == {"data.sources.prose.parts"}
