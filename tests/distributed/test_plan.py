"""A step of rank 0 of many on tensors without memory, against shapes, and against a real step."""

import pytest

from tests import processes, runs


@pytest.fixture
def argv(tmp_path):
    (tmp_path / "small.toml").write_text(runs.SMALL)
    return ["--job.config_file", str(tmp_path / "small.toml"), "--job.dump_folder", str(tmp_path / "run")]


def _plans(argvs: list[list[str]], world_size: int) -> tuple[list[dict], list[list[int]]]:
    """A plan for each command line, and the shapes of the parameters."""
    import torch

    from titan_loom.config import load_config
    from titan_loom.models import build_model, model_args
    from titan_loom.plan import plan

    configs = [load_config(argv) for argv in argvs]
    with torch.device("meta"):
        shapes = [list(parameter.shape) for parameter in build_model(model_args(configs[0].model)).parameters()]
    return [vars(plan(config, world_size)) for config in configs], shapes


def _numel(shapes: list[list[int]], ranks: int) -> int:
    """Elements of all shapes when their rows are shared by `ranks`, on all of them."""
    return sum(-(-rows // ranks) * ranks * (rest[0] if rest else 1) for rows, *rest in shapes)


def test_what_a_rank_of_eight_holds_and_communicates_follows_from_the_shapes(argv):
    argv = [*argv, "--training.local_batch_size", "1", "--data.lanes", "8"]
    again = [*argv, "--training.global_batch_size", "40", "--parallelism.fsdp_reshard_after_forward", "always"]
    [((plan, gathering_again), shapes)] = processes.run(_plans, 1, [argv, again], 8)
    padded, whole = 4 * _numel(shapes, 8), 4 * _numel(shapes, 1)
    assert plan["parameters"] == plan["gradients"] == padded // 8
    assert plan["padding"] == pytest.approx(padded / whole - 1) and plan["padding"] > 0
    # Three layers and the root, each gathered and reduced once; Muon's two exchanges.
    assert plan["calls"] == {"all-gather": 4, "reduce-scatter": 4, "all-reduce": 1, "all-to-all": 2}
    assert plan["nbytes"]["all-gather"] == plan["nbytes"]["reduce-scatter"] == padded
    # In each of five micro-batches; the layers for backward too.
    assert gathering_again["calls"] == plan["calls"] | {"all-gather": 5 * (2 * 3 + 1)}


def _fake_and_real(argvs: list[list[str]]) -> list[tuple[int, int]]:
    """Bytes that a step makes, at the fullest moment: on fake tensors, and when it happens."""
    from titan_loom.config import load_config
    from titan_loom.distributed.fake import Meter
    from titan_loom.plan import plan
    from titan_loom.trainer import Trainer

    results = []
    for config in map(load_config, argvs):
        planned = plan(config, 1)
        trainer = Trainer(config)
        for trainer.step in (1, 2):
            with Meter() as meter:
                trainer.train_step()
        trainer.close()
        results.append((planned.peak - planned.parameters - planned.optimizer_state, meter.peak))
    return results


def test_a_step_on_fake_tensors_takes_the_memory_of_a_real_one(argv):
    argv = [*argv, "--training.local_batch_size", "8"]
    recomputing = [*argv, "--activation_checkpoint.mode", "full", "--data.document_mask", "true"]
    [((fake, real), (fake_recomputing, real_recomputing))] = processes.run(_fake_and_real, 1, [argv, recomputing])
    assert fake == pytest.approx(real, rel=0.02)
    assert fake_recomputing == pytest.approx(real_recomputing, rel=0.02)
    assert real_recomputing < real
