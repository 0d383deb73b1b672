"""Steps in segments of loops: an optimizer step each, the same in every layout, resumed exactly."""

import pytest

from tests import processes, runs

SEGMENTS = ("--training.segment_loops", "2", "--model.args.num_loops", "5")
FROZEN = [f"--optimizer.{group}.lr" for group in ("muon", "embeddings", "ngram", "controls")]
COMPARED = ("step", "loss", "grad_norm", "segments", "num_loops", "batch_sha256")


def compared(rows: list[dict]) -> list[dict]:
    return [{key: row[key] for key in COMPARED} for row in rows]


def test_at_a_rate_of_zero_the_last_segment_reads_what_one_pass_reads(tmp_path):
    still = [word for key in FROZEN for word in (key, "0")]
    whole = runs.train(tmp_path / "1", "--training.steps", "2", *SEGMENTS[2:], *still)
    parts = runs.train(tmp_path / "2", "--training.steps", "2", *SEGMENTS, *still)
    assert [row["loss"] for row in parts] == [row["loss"] for row in whole]
    assert [[part["loops"] for part in row["segments"]] for row in parts] == [[[0, 2], [2, 4], [4, 5]]] * 2


def test_a_stopped_run_and_another_layout_go_on_the_same(tmp_path):
    sampled = (*SEGMENTS, "--model.loop_sampling", "uniform", "--model.loop_sampling_max", "5")
    expected = runs.train(tmp_path / "whole", "--training.steps", "4", *sampled)
    runs.train(tmp_path / "stopped", "--training.steps", "2", *sampled)
    assert compared(runs.train(tmp_path / "stopped", "--training.steps", "4", *sampled)) == compared(expected)
    assert len({row["num_loops"] for row in expected}) > 1
    rows = runs.train(tmp_path / "2", "--training.steps", "4", *sampled, world_size=2)
    for row, other in zip(rows, expected, strict=True):
        assert [part["loops"] for part in row["segments"]] == [part["loops"] for part in other["segments"]]
        for key in ("ce_loss", "grad_norm"):
            values, wanted = ([part[key] for part in each["segments"]] for each in (row, other))
            assert values == pytest.approx(wanted, rel=1e-4)


def _watched(argv: list[str]) -> dict:
    """Train one step of a model that says it has experts; what its optimizers and its balance saw."""
    import torch

    from tests.layouts import whole
    from titan_loom.config.loading import load_config
    from titan_loom.trainer import Trainer
    from titan_loom.training import model_trainer

    seen = {"prelude": [], "missing": [], "balanced": []}
    build = model_trainer.build_model

    def build_with_experts(args):
        model = build(args)
        forward = model.forward

        def with_experts(tokens, *rest, **kwargs):
            output = forward(tokens, *rest, **kwargs)
            load = torch.tensor([[tokens.sum(), 1]])
            return output._replace(expert_load=load, router_z=output.hidden.float().square().mean(-1))

        model.forward = with_experts
        model.balance_experts = lambda load: seen["balanced"].append(load.tolist())
        return model

    model_trainer.build_model = build_with_experts
    trainer = Trainer(load_config(argv))
    step = trainer.optimizers.step

    def watch():
        seen["missing"].append({name for name, p in trainer.model.named_parameters() if p.grad is None})
        step()
        seen["prelude"].append(whole(next(trainer.model.blocks[0].parameters())).tolist())

    trainer.optimizers.step = watch
    try:
        trainer.train()
    finally:
        trainer.close()
    return seen


def test_what_a_segment_leaves_out_stays_and_loads_are_summed_over_everything(tmp_path):
    layouts = {1: [()], 2: [(), ("--parallelism.data_parallel_replicate_degree", "2")]}
    loads, losses = [], []
    for world_size, overrides in layouts.items():
        for i, layout in enumerate(overrides):
            folder = tmp_path / f"{world_size}-{i}"
            folder.mkdir()
            (folder / "small.toml").write_text(runs.SMALL)
            argv = ["--job.config_file", str(folder / "small.toml"), "--job.dump_folder", str(folder / "run")]
            argv += ["--training.steps", "1", "--training.router_z_loss", "0.1", "--optimizer.name", "AdamW"]
            results = processes.run(_watched, world_size, [*argv, *SEGMENTS, *layout])
            for seen in results:
                assert len(seen["prelude"]) == 3  # optimizer steps
                assert seen["prelude"][0] == seen["prelude"][1] == seen["prelude"][2]
                assert not seen["missing"][0]
                assert {name[:8] for name in seen["missing"][1]} == {"blocks.0"}
                [load] = seen["balanced"]
                loads.append(load)
            [row] = runs.metrics(folder)
            losses.append(row["router_z_loss"])
            assert row["loss"] == pytest.approx(row["ce_loss"] + row["z_loss"] + row["router_z_loss"])
    assert loads[0][0][1] == 3 * 4  # segments x micro-batches of the global batch
    assert all(load == loads[0] for load in loads)
    assert losses == pytest.approx([0.1] * 3, rel=1e-2)  # the final norm leaves a mean square of 1
