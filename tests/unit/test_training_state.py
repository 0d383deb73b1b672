import pytest
import torch

from titan_loom.errors import UserError
from titan_loom.hub import training_state
from titan_loom.hub.checkpoints import read_tensors, write_checkpoint
from titan_loom.training import checkpoint_files

TENSORS = {
    "model.weight": torch.arange(6.0).reshape(2, 3),
    "optimizer.weight.momentum": torch.arange(6.0).reshape(2, 3).bfloat16(),
    "optimizer.step": torch.tensor(7, dtype=torch.int64),
}
STATE = {"step": 7, "lanes": {"0": {"row": 1}}, "config": {}, "data": {}}


@pytest.mark.parametrize(("max_bytes", "count"), [(1 << 20, 1), (30, 2), (1, 3)])
def test_a_checkpoint_comes_back_as_it_was_without_a_pickle_on_the_way(tmp_path, monkeypatch, max_bytes, count):
    monkeypatch.setattr(training_state, "MAX_FILE_BYTES", max_bytes)
    write_checkpoint(tmp_path / "step-7", STATE, TENSORS, {})
    training_state.write(tmp_path / "step-7", tmp_path / "pushed")
    assert sorted(path.name for path in (tmp_path / "pushed").iterdir()) == [
        *(f"tensors-{i:05d}.safetensors" for i in range(count)),
        "train_state.json",
    ]
    training_state.read(tmp_path / "pushed", tmp_path / "back", "stop")
    state = checkpoint_files.read_state(tmp_path / "back", "stop")
    tensors = {name: torch.full_like(tensor, -1) for name, tensor in TENSORS.items()}
    read_tensors(tmp_path / "back", state, tensors)
    del state["files"]
    assert state == STATE
    assert all(torch.equal(tensors[name], tensor) for name, tensor in TENSORS.items())


def test_a_state_does_not_say_where_its_machine_kept_files_and_the_run_goes_on_from_another_place(tmp_path):
    def fingerprint(path: str) -> dict:
        return {"data.sources.code.path": path, "data.sources.code.parts": "c0ffee"}

    config = {"job": {"dump_folder": str(tmp_path)}, "data": {"sources": {"code": {"path": str(tmp_path / "code")}}}}
    state = STATE | {"config": config, "data": fingerprint(str(tmp_path / "code"))}
    write_checkpoint(tmp_path / "step-7", state, TENSORS, {})
    training_state.write(tmp_path / "step-7", tmp_path / "pushed")
    assert str(tmp_path) not in (tmp_path / "pushed" / "train_state.json").read_text()

    pushed = checkpoint_files.read_state(tmp_path / "pushed", "stop")
    start = checkpoint_files.Start(tmp_path, pushed, False, "stop")
    checkpoint_files.check_same_data(start, fingerprint("/elsewhere/code"))
    with pytest.raises(UserError, match=r"data\.sources\.code\.path is prose but"):
        checkpoint_files.check_same_data(start, fingerprint("/elsewhere/prose"))


def test_a_file_that_is_not_what_was_written_is_found(tmp_path):
    write_checkpoint(tmp_path / "step-7", STATE, TENSORS, {})
    training_state.write(tmp_path / "step-7", tmp_path / "pushed")
    path = tmp_path / "pushed" / "tensors-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    with pytest.raises(UserError, match=r"tensors-00000\.safetensors has other contents than were written: stop"):
        training_state.read(tmp_path / "pushed", tmp_path / "back", "stop")
    assert not (tmp_path / "back").exists()
