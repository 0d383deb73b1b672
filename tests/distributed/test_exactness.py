"""The promises about numbers: the same everywhere, and exact across a stop, whatever the layout before and after."""

import pytest

from tests import runs

EXACT = ("step", "loss", "ce_loss", "z_loss", "grad_norm", "batch_sha256", "tokens_seen", "source_tokens", "lr")


def exact(rows: list[dict]) -> list[dict]:
    return [{key: row[key] for key in EXACT} for row in rows]


def hashes(rows: list[dict]) -> list[str]:
    return [row["batch_sha256"] for row in rows]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> dict[int, list[dict]]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    return {n: runs.train(folder / str(n), world_size=n) for n in (1, 2)}


@pytest.mark.parametrize(("world_size", "stops", "workers"), [(1, [10], [0, 2]), (2, [5, 10], [2, 0, 0])])
def test_a_stopped_run_continues_to_the_last_digit(tmp_path, uninterrupted, world_size, stops, workers):
    for steps, num_workers in zip([*stops, 20], workers, strict=True):
        rows = runs.train(
            tmp_path,
            *("--training.steps", str(steps), "--training.dataloader.num_workers", str(num_workers)),
            world_size=world_size,
        )
        assert exact(rows) == exact(uninterrupted[world_size])[:steps]


def test_resume_on_another_number_of_processes_gives_the_same_batches(tmp_path, uninterrupted):
    runs.train(tmp_path, "--training.steps", "10", world_size=4)
    rows = runs.train(tmp_path, "--training.steps", "15", world_size=1)
    assert hashes(rows) == hashes(uninterrupted[1])[:15]
    rows = runs.train(tmp_path, "--training.steps", "20", world_size=2)
    assert hashes(rows) == hashes(uninterrupted[1])


@pytest.mark.parametrize(("optimizer", "steps", "loss_tolerance"), [("AdamW", 20, 1e-5), ("Muon", 10, 2e-3)])
def test_the_numbers_do_not_depend_on_processes_or_accumulation(tmp_path, optimizer, steps, loss_tolerance):
    # The last step is cut: its rows have uneven numbers of supervised tokens.
    total_tokens = (steps - 1) * 8 * 64 + 217
    common = ("--training.steps", "none", "--training.total_tokens", str(total_tokens), "--optimizer.name", optimizer)
    reference = runs.train(tmp_path / "1", *common, "--training.local_batch_size", "8")
    assert reference[-1]["tokens_seen"] == total_tokens
    for world_size, local_batch_size in [(1, 2), (2, 2), (4, 1)]:
        rows = runs.train(
            tmp_path / f"{world_size}-{local_batch_size}",
            *(*common, "--training.local_batch_size", str(local_batch_size)),
            world_size=world_size,
        )
        assert hashes(rows) == hashes(reference)
        for row, expected in zip(rows, reference, strict=True):
            assert row["loss"] == pytest.approx(expected["loss"], rel=loss_tolerance)
            assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=max(1e-4, loss_tolerance))
            assert row["source_tokens"] == expected["source_tokens"]
