import json

import pytest

from titan_loom.config import Checkpoint
from titan_loom.errors import UserError
from titan_loom.training.checkpoint_files import outlived_steps, read_state, write_state

STATE = {"step": 6, "tokens_seen": 96, "source_tokens": {"a": 96}, "lanes": {0: {"row": 3}, 1: {"row": 5}}, "x": 1e-4}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "step-6"
    path.mkdir()
    write_state(path, STATE)
    return path


def test_a_state_is_read_as_it_was_written(path):
    assert read_state(path, "") == json.loads(json.dumps(STATE))


@pytest.mark.parametrize(
    "contents",
    [b"", b"null", b"[1]", b'{"step": 6}', b"\xff" * 9, b"[" * 100_000, json.dumps(STATE).encode()],
    ids=lambda contents: repr(contents[:12]),
)
def test_a_state_of_another_shape_is_one_sentence_with_a_way_on(path, contents):
    (path / "train_state.json").write_bytes(contents)
    with pytest.raises(UserError) as error:
        read_state(path, "another way")
    assert str(error.value).startswith(f"checkpoint {path} is damaged, train_state.json ")
    assert str(error.value).endswith(": another way")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("key", "value"), [("step", "6"), ("step", 7), ("source_tokens", {}), ("lanes", {"0": {"row": 3}, "1": 5})]
)
def test_a_value_that_was_changed_is_damage(path, key, value):
    state = json.loads((path / "train_state.json").read_text())
    (path / "train_state.json").write_text(json.dumps(state | {key: value}))
    with pytest.raises(UserError, match=r"train_state\.json is not as it was written"):
        read_state(path, "")


def test_a_folder_named_after_another_step_is_refused(path):
    with pytest.raises(UserError, match=r"step-7 is damaged, train_state\.json is of step 6: another way"):
        read_state(path.rename(path.with_name("step-7")), "another way")


@pytest.mark.parametrize(
    ("steps", "keep_latest_k", "snapshot_interval", "keep_latest_snapshots", "outlived"),
    [
        ([10, 20, 30, 40], 0, 0, 0, []),
        ([10, 20, 30, 40], 2, 0, 0, [10, 20]),
        ([10, 20, 30, 40, 50, 60], 2, 20, 0, [10]),
        ([10, 20, 30, 40, 50, 60, 70], 2, 20, 1, [10, 20, 30, 40]),
        ([10, 20, 30, 40, 50, 60, 65], 0, 20, 2, [20]),  # the last step, no multiple, is not counted as one of them
        ([10, 20, 30, 40], 2, 10, 1, [10, 20]),  # only snapshots: one older than the newest stays, in case of damage
        ([10, 20, 21, 22], 2, 0, 0, [10]),  # a rollback needs 20
        ([10, 20, 21, 22], 2, 20, 1, [10]),
    ],
)
def test_what_is_kept(steps, keep_latest_k, snapshot_interval, keep_latest_snapshots, outlived):
    config = Checkpoint(
        interval=10,
        keep_latest_k=keep_latest_k,
        snapshot_interval=snapshot_interval,
        keep_latest_snapshots=keep_latest_snapshots,
    )
    assert outlived_steps(steps, config) == outlived
