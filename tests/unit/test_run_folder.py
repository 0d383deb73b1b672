import os
from pathlib import Path

import pytest

from titan_loom.config import Checkpoint, Job, JobConfig
from titan_loom.errors import RunError, UserError
from titan_loom.tools.logging import logger
from titan_loom.training.run_folder import RunFolder, check_can_be_written


def run_in(path: Path, checkpoints: str = "checkpoint") -> JobConfig:
    return JobConfig(job=Job(dump_folder=str(path)), checkpoint=Checkpoint(folder=checkpoints))


@pytest.mark.parametrize("use", [RunFolder, check_can_be_written])
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("file", "file is no folder"),
        ("file/below/it", "file is no folder"),
        ("x" * 300, "File name too long"),
    ],
    ids=["file", "below a file", "long"],
)
def test_a_place_where_no_folder_can_be_is_one_sentence(tmp_path, use, name, reason):
    (tmp_path / "file").touch()
    path = tmp_path / name
    with pytest.raises(UserError) as error:
        use(run_in(path))
    assert str(error.value).startswith(f"job.dump_folder is {str(path)!r}; it must be a folder that can be written to:")
    assert reason in str(error.value) and "\n" not in str(error.value)


def test_a_folder_that_may_not_be_written_to_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # root may do everything
    with pytest.raises(UserError, match=f"{tmp_path} may not be written to"):
        check_can_be_written(run_in(tmp_path / "run"))


def test_what_only_writing_shows_is_one_sentence_as_well(tmp_path):
    (tmp_path / ".lock").mkdir()
    with pytest.raises(UserError, match=r"job\.dump_folder is .*: Is a directory"):
        RunFolder(run_in(tmp_path))


def test_a_file_in_place_of_the_checkpoints_is_found(tmp_path):
    (tmp_path / "saved").touch()
    with pytest.raises(UserError, match=r"checkpoint\.folder is 'saved'; it must be a folder"):
        check_can_be_written(run_in(tmp_path, "saved"))


def test_a_configuration_that_cannot_be_written_is_one_sentence(tmp_path):
    config = run_in(tmp_path)
    (tmp_path / "config.toml").mkdir()
    with pytest.raises(RunError, match=r"config\.toml could not be written: .*Is a directory"):
        RunFolder(config).write_config(config)


def test_a_check_makes_nothing(tmp_path):
    check_can_be_written(run_in(tmp_path / "run" / "here"))
    assert not (tmp_path / "run").exists()


def test_a_configuration_that_is_half_written_leaves_the_one_before(tmp_path, monkeypatch):
    config = run_in(tmp_path)
    folder = RunFolder(config)
    folder.write_config(config)
    before = (tmp_path / "config.toml").read_text()

    def full_disk(path, text):
        path.write_bytes(text[:9].encode())
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full_disk)
    with pytest.raises(RunError, match="No space left"):
        folder.write_config(config)
    assert (tmp_path / "config.toml").read_text() == before


def test_a_folder_that_is_no_complete_checkpoint_is_named(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logger, "propagate", True)
    for file in ("step-1/.metadata", "step-2/train_state.json", "step-2.superseded-1/.metadata"):
        (tmp_path / "checkpoint" / file).parent.mkdir(parents=True)
        (tmp_path / "checkpoint" / file).touch()
    RunFolder(run_in(tmp_path))
    passed_over = [tmp_path / "checkpoint" / name for name in ("step-1", "step-2")]
    assert caplog.messages == [f"Passing over {path}, which is no complete checkpoint" for path in passed_over]
