"""Diagnostics are written at their interval and change nothing."""

from tests import runs

DIAGNOSED = ("--diagnostics.enable", "true", "--diagnostics.interval", "2", "--diagnostics.gradients", "true")


def train(folder, *overrides: str, **kwargs) -> list[dict]:
    return runs.train(folder, "--training.steps", "3", *overrides, **kwargs)


def test_a_diagnosed_run_trains_as_one_that_is_not(tmp_path):
    layout = ("--activation_checkpoint.mode", "full", "--activation_checkpoint.per", "loop")
    without = train(tmp_path / "without", *layout, world_size=2)
    rows = train(tmp_path / "with", *layout, *DIAGNOSED, world_size=2)
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in rows] == [row[key] for row in without]
    assert [set(row) - set(without[0]) == set() for row in rows] == [True, False, True]
    visits = [(1, 0), (1, 1), (2, 1), (2, 2)]
    names = ("norm", "variance", "effective_rank", "cosine", "gradient")
    expected = {f"loop/{loop}/layer/{layer}/{name}" for loop, layer in visits for name in names}
    assert set(rows[1]) - set(without[1]) == expected | {"loop/1/loss", "loop/2/loss", "loop/2/angle"}
    assert all(rows[1][name] > 0 for name in expected if "cosine" not in name)
