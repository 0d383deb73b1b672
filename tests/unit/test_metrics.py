import json
import logging

import pytest

from titan_loom.tools.logging import logger
from titan_loom.training.metrics import _cut_back


def line(step: int) -> bytes:
    return json.dumps({"step": step, "loss": 1.5}).encode() + b"\n"


@pytest.mark.parametrize(
    "damaged",
    [b"garbage", b"\0" * 40, b"\xff\xfe{}", b"[1]", b"7", b"", b'{"step": "2"}', b"{}", b"[" * 100_000],
    ids=lambda damaged: repr(damaged[:12]),
)
def test_a_damaged_line_is_left_out_and_counted(tmp_path, caplog, monkeypatch, damaged):
    """One line that no JSON parser reads once blocked every resume of the run."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line(1) + damaged + b"\n" + line(2) + line(3))
    monkeypatch.setattr(logger, "propagate", True)
    with caplog.at_level(logging.WARNING):
        _cut_back(path, 2)
    assert path.read_bytes() == line(1) + line(2)
    assert "left out 1 damaged line of 4" in caplog.text


def test_a_half_written_last_line_is_no_damage(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line(1) + line(2)[:-4])
    _cut_back(path, 2)
    assert path.read_bytes() == line(1)
    assert not caplog.text
