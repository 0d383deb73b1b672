"""What a finished run writes is what its model finds most likely, token by token, on any number of ranks."""

from tests import processes, runs


def _sampled(argv: list[str]) -> tuple[str, str]:
    """The sample, and the same by passes that grow with it."""
    import torch

    from titan_loom.config.loading import load_config
    from titan_loom.trainer import Trainer

    trainer = Trainer(load_config(argv))
    trainer.train()
    sample, ids = trainer.sample(8), [trainer.tokenizer.eos_id]
    with trainer.data_parallel.evaluation():
        for _ in range(8):
            ids.append(int(trainer.model.logits(trainer.model(torch.tensor([ids])).hidden[0, -1]).argmax()))
    plain = trainer.tokenizer.decode(ids[1:])
    trainer.close()
    return sample, plain


def test_the_sample_is_the_most_likely_text(tmp_path):
    (tmp_path / "small.toml").write_text(runs.LOOM)
    argv = ["--job.config_file", str(tmp_path / "small.toml"), "--job.dump_folder", str(tmp_path / "run")]
    argv += ["--training.steps", "2", "--debug.sample_tokens", "4"]
    (first, plain), second = processes.run(_sampled, 2, argv)
    assert first == plain and second == (first, plain)
    assert len(set(first.split())) > 2
