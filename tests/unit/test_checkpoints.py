import os
import shutil

import pytest

from tests.exports import make_checkpoint
from titan_loom import cli


@pytest.fixture
def run(tmp_path):
    """A run with a whole checkpoint of step 3, one of step 4 that has changed, and one of step 5 without its state."""
    folder = tmp_path / "checkpoint"
    make_checkpoint(folder / "step-3")
    make_checkpoint(folder / "step-4", step=4)
    weights = folder / "step-4" / "__0_0.distcp"
    contents = weights.read_bytes()
    weights.write_bytes(contents[:-1] + bytes([contents[-1] ^ 1]))
    shutil.copytree(folder / "step-3", folder / "step-5")
    os.remove(folder / "step-5" / "train_state.json")
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "ce_loss": 2.5}\ndamaged\n{"step": 4, "ce_loss": null}\n{"st')
    return tmp_path


def rows_of(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line[1:-1].split("│")] for line in table.splitlines() if line.startswith("│")]


def test_a_list_has_what_is_known_without_reading_the_tensors(run, capsys):
    assert cli.main(["checkpoint", "list", str(run)]) == 0
    rows = rows_of(capsys.readouterr().out)
    size = sum(file.stat().st_size for file in (run / "checkpoint" / "step-3").iterdir()) / 2**20
    assert rows[0] == ["3", "384", "2.5000", f"{size:.1f}", "complete"]
    assert [[*row[:3], row[4]] for row in rows[1:]] == [["4", "384", "", "complete"], ["5", "", "", "incomplete"]]


def test_verifying_finds_what_has_changed(run, capsys):
    assert cli.main(["checkpoint", "verify", str(run / "checkpoint")]) == 2
    printed = capsys.readouterr()
    assert [row[4].split()[0] for row in rows_of(printed.out)][:2] == ["whole", "__0_0.distcp"]
    assert printed.err.splitlines()[-1] == f"error: {run / 'checkpoint'} holds damaged checkpoints: step-4"
    shutil.rmtree(run / "checkpoint" / "step-4")
    assert cli.main(["checkpoint", "verify", str(run)]) == 0


def test_a_state_that_cannot_be_read_is_damage_too(run, capsys):
    (run / "checkpoint" / "step-3" / "train_state.json").write_text("{}")
    assert cli.main(["checkpoint", "list", str(run)]) == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("holds damaged checkpoints: step-3")
    assert cli.main(["checkpoint", "list", str(run / "elsewhere")]) == 2
    assert capsys.readouterr().err == f"error: {run / 'elsewhere'} holds no checkpoint\n"
