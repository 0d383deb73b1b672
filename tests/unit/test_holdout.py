from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.unit.data_corpus import write_corpus
from titan_loom.config import Data, JobConfig, Source
from titan_loom.data.filters import Holdout, key_point
from titan_loom.data.lanes import open_stream
from titan_loom.data.loader import build_plan
from titan_loom.data.packing import pack
from titan_loom.data.tokenizer import EOS_ID, load_tokenizer

TOKENIZER = load_tokenizer()
PERCENT = 20.0


def documents_of_an_epoch(source, lanes=2, holdout=False, percent=PERCENT) -> Counter:
    """The texts of the first epoch of all lanes."""
    data = Data(lanes=lanes, window=4, holdout_percent=percent, sources={"s": source})
    order = {"seed": 0, "seq_len": 8, "global_batch_size": lanes, "steps": 1, "total_tokens": None}
    plan = build_plan(data, TOKENIZER, **order, holdout=holdout)
    texts = Counter()
    for lane in range(lanes):
        for document in open_stream(plan, plan.sources[0], lane)._documents:
            if document.row_state[0] > 0:
                break
            assert document.tokens[-1] == EOS_ID
            texts[TOKENIZER.decode(document.tokens[:-1])] += 1
    return texts


@pytest.fixture
def source(tmp_path):
    write_corpus(tmp_path)
    return Source(path=str(tmp_path / "code"), format="repository")


def test_points_are_uniform_and_do_not_depend_on_the_machine():
    assert key_point("me/tool") == 15023355120207220068
    points = np.array([key_point(str(i)) for i in range(4000)], dtype=np.uint64)
    assert np.mean(Holdout(10.0, inside=True).keeps(points)) == pytest.approx(0.1, abs=0.015)
    key_point("\ud800")  # JSON may hold it


def test_a_smaller_holdout_is_part_of_a_larger_one():
    points = np.array([key_point(str(i)) for i in range(1000)], dtype=np.uint64)
    small, large = (Holdout(percent, inside=True).keeps(points) for percent in (1.0, 5.5))
    assert 0 < small.sum() < large.sum() and (large | ~small).all()
    assert not Holdout(0.0, inside=True).keeps(points).any() and Holdout(0.0).keeps(points).all()


@pytest.mark.parametrize("form", ["code", "prose"])
def test_training_and_holdout_share_out_the_documents_alike_from_stream_and_pack(tmp_path, form):
    write_corpus(tmp_path)
    streamed = Source(path=str(tmp_path / form), format="repository" if form == "code" else "text")
    pack(JobConfig(data=Data(sources={"s": streamed})), "s", tmp_path / "pack", workers=1)
    packed = Source(path=str(tmp_path / "pack"))
    everything = documents_of_an_epoch(streamed, percent=0.0)
    train, holdout = (documents_of_an_epoch(streamed, holdout=inside) for inside in (False, True))
    assert train and holdout and train + holdout == everything
    assert documents_of_an_epoch(packed) == train
    assert documents_of_an_epoch(packed, holdout=True) == holdout
    assert documents_of_an_epoch(packed, percent=0.0) == everything


def test_a_repository_is_held_out_whole(source):
    repositories = [
        {text.split("\n")[0] for text in documents_of_an_epoch(source, holdout=inside)} for inside in (False, True)
    ]
    assert repositories[0] and repositories[1] and repositories[0].isdisjoint(repositories[1])


def test_which_files_are_held_out_does_not_depend_on_their_rows(tmp_path):
    rows = [{"repo_path": "me/tool", "file_path": f"{i}.py", "content": f"x = {i}\n"} for i in range(60)]
    for name, order in (("a", rows), ("b", rows[::-1])):
        (tmp_path / name).mkdir()
        pq.write_table(pa.Table.from_pylist(order), tmp_path / name / "0.parquet")
    a, b = (
        documents_of_an_epoch(Source(path=str(tmp_path / name), format="file"), holdout=True) for name in ("a", "b")
    )
    assert 0 < len(a) < 60 and a == b
