import json
import shutil

import numpy as np
import pytest

from tests import runs
from titan_loom import cli
from titan_loom.tools import report
from titan_loom.tools.report import Run, differences, draw, read_runs

OPTIONS = (
    *("--diagnostics.enable", "true", "--diagnostics.interval", "2", "--data.holdout_percent", "20"),
    *("--validation.enable", "true", "--validation.steps", "1", "--validation.freq", "2"),
    *("--validation.local_batch_size", "1", "--training.steps", "3", "--checkpoint.enable", "false"),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A run of three steps, and another one: the same for two steps, with a worse loss at another rate."""
    folder = tmp_path_factory.mktemp("report")
    rows = runs.train(folder / "a", *OPTIONS, config=runs.LOOM)
    shutil.copytree(folder / "a", folder / "b")
    worse = [json.dumps(row | {"ce_loss": row["ce_loss"] + 1, "flops": 2 * row["flops"]}) for row in rows[:2]]
    (folder / "b" / "run" / "metrics.jsonl").write_text("\n".join([*worse, '{"step": 3, "hal']))
    config = (folder / "b" / "run" / "config.toml").read_text()
    (folder / "b" / "run" / "config.toml").write_text(config.replace("steps = 3\n", "steps = 2\n"))
    return folder / "a" / "run", folder / "b" / "run"


@pytest.fixture(scope="module")
def figures(folders):
    return draw(read_runs(folders))


def curves(axes) -> dict[str, list[list[float]]]:
    """The points that are drawn, by label."""
    return {line.get_label(): line.get_xydata().tolist() for line in axes.lines}


def test_the_losses_drawn_are_those_of_the_metrics(folders, figures):
    rows = runs.metrics(folders[0].parent)
    against_tokens, against_flops = map(curves, figures["loss.png"].axes)
    assert against_tokens["a/run"] == [[row["tokens_seen"], row["ce_loss"]] for row in rows]
    assert against_tokens["b/run"] == [[row["tokens_seen"], row["ce_loss"] + 1] for row in rows[:2]]
    validated = [[row["tokens_seen"], row["validation/loss"]] for row in rows[1:]]
    assert against_tokens["a/run, validation"] == validated
    spent = [sum(row["flops"] for row in rows[:count]) for count in (1, 2, 3)]
    assert against_flops["a/run"] == [[flops, row["ce_loss"]] for flops, row in zip(spent, rows, strict=True)]
    assert against_flops["b/run"][1][0] == 2 * spent[1]


def test_what_a_loop_does_is_of_the_newest_step_that_tells(folders, figures):
    row = runs.metrics(folders[0].parent)[1]
    losses, angles = map(curves, figures["loops.png"].axes)
    assert losses["a/run, step 2"] == [[loop, row[f"loop/{loop}/loss"]] for loop in (1, 2, 3)]
    assert angles["b/run, step 2"] == [[loop, row[f"loop/{loop}/angle"]] for loop in (2, 3)]


def test_the_weave_is_the_share_of_each_expert_in_each_loop(folders, figures):
    row = runs.metrics(folders[0].parent)[1]
    *panels, beside, scale = figures["weave-a-run.png"].axes
    for layer, axes in enumerate(panels):
        expected = [row[f"expert/loop/{loop}/layer/{layer}/load"] for loop in (1, 2, 3)]
        assert np.array_equal(axes.images[0].get_array(), expected)
        assert axes.get_title() == f"layer {layer}" and axes.get_ylim() == (3.5, 0.5)  # the first loop on top
    assert len(panels) == 2 and scale.get_ylabel() == "share of choices"
    assert beside.texts[0].get_text().splitlines() == [
        "experts of a token",
        f"all loops: {row['expert/distinct']:.2f} of 6",
        *(f"loops {t - 1} and {t}: {row[f'expert/loop/{t}/overlap']:.2f} in common" for t in (2, 3)),
    ]


def test_runs_are_compared_at_the_tokens_that_all_have_seen(folders, capsys, tmp_path):
    rows = runs.metrics(folders[0].parent)
    assert cli.main(["report", *map(str, folders), "--out", str(tmp_path / "pictures")]) == 0
    printed = capsys.readouterr().out
    loss, validation, flops = (rows[1][key] for key in ("ce_loss", "validation/loss", "flops"))
    assert f"at {rows[1]['tokens_seen']:,} tokens" in printed
    table = [[cell.strip() for cell in line[1:-1].split("│")] for line in printed.splitlines() if line[0] == "│"]
    assert table == [
        ["a/run", "3", f"{rows[2]['tokens_seen']:,}", f"{loss:.4f}", f"{validation:.4f}", f"{2 * flops:.3e}"],
        ["b/run", "2", f"{rows[1]['tokens_seen']:,}", f"{loss + 1:.4f}", f"{validation:.4f}", f"{4 * flops:.3e}"],
    ]
    assert "training.steps is 3 in a/run and 2 in b/run.\n" in printed and printed.count(" in a/run and ") == 1
    names = ["loops.png", "loss.png", "weave-a-run.png", "weave-b-run.png"]
    assert sorted(path.name for path in (tmp_path / "pictures").iterdir()) == names


def run(losses: list[float | None], name: str = "a", **config) -> Run:
    """A run of 100 tokens a step."""
    return Run(name, config, [{"step": i, "tokens_seen": 100 * i, "ce_loss": x} for i, x in enumerate(losses, 1)])


def test_a_loss_is_a_mean_over_the_last_steps_that_were_trained():
    of_forty = run([9.0] * 37 + [4.0, 2.0, 7.0])
    assert of_forty.loss_at(3900) == 3.0
    of_forty.rows[38] |= {"ce_loss": None, "spike": "the loss is not finite"}
    assert of_forty.loss_at(3900) == 4.0
    assert of_forty.loss_at(250) == 9.0
    assert of_forty.loss_at(99) is None


def test_metrics_with_gaps_are_drawn_as_far_as_they_go():
    """Of an older version without FLOPs, and with a loss that was not finite."""
    figures = draw([run([3.0, None, 2.0])])
    [axes] = figures["loss.png"].axes
    assert list(figures) == ["loss.png"] and curves(axes)["a"][::2] == [[100, 3.0], [300, 2.0]]
    assert np.isnan(curves(axes)["a"][1][1])


def test_a_key_that_one_run_lacks_is_a_difference():
    found = differences([run([1.0], x=1, y="s", **{"job.dump_folder": "a"}), run([1.0], "b", y="s"), run([1.0], "c")])
    assert list(found) == ["x is 1 in a and not set in b, c.", 'y is "s" in a, b and not set in c.']


def test_what_cannot_be_reported_is_one_sentence(tmp_path, monkeypatch, capsys):
    assert cli.main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path} is not the folder of a run: ")
    (tmp_path / "config.toml").touch()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1')
    assert cli.main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path} is the folder of a run that has not taken a step\n"
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    assert cli.main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err.endswith("need matplotlib: pip install 'titan-loom[report]'\n")
