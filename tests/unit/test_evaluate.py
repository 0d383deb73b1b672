import math

import pytest
import torch

pytest.importorskip("transformers")

from tests.exports import make_checkpoint
from titan_loom import cli
from titan_loom.data.tokenizer import load_tokenizer
from titan_loom.hub.evaluate import EvalArgs, evaluate

TEXTS = {"a.txt": "for i in range(12):\n    print(i)\n" * 9, "b.txt": "Grüße, 世界!"}


@pytest.fixture(scope="module")
def model_and_folder(tmp_path_factory):
    """The trainer's model, and a folder with its `checkpoint` and `texts`."""
    folder = tmp_path_factory.mktemp("eval")
    (folder / "texts").mkdir()
    for name, text in TEXTS.items():
        (folder / "texts" / name).write_text(text)
    return make_checkpoint(folder / "checkpoint"), folder


@torch.no_grad()
def test_the_loss_is_what_the_trainers_model_gives_token_by_token(model_and_folder):
    model, folder = model_and_folder
    seq_len = 16
    results = evaluate(
        EvalArgs(path=folder / "checkpoint", text=(str(folder / "texts"),), num_loops=(1, 2, 3), seq_len=seq_len)
    )
    tokenizer = load_tokenizer()
    for result in results:
        nats, tokens = 0.0, 0
        for text in TEXTS.values():
            ids = [tokenizer.eos_id, *tokenizer.encode_batch([text])[0].tolist()]
            for position in range(1, len(ids)):
                start = (position - 1) // seq_len * seq_len
                hidden = model(torch.tensor([ids[start:position]]), num_loops=result.num_loops).hidden[0, -1]
                nats -= model.logits(hidden).log_softmax(-1)[ids[position]].item()
                tokens += 1
        num_bytes = sum(len(text.encode()) for text in TEXTS.values())
        assert (result.tokens, result.bytes) == (tokens, num_bytes)
        assert result.loss == pytest.approx(nats / tokens, abs=1e-5)
        assert result.bits_per_byte == pytest.approx(nats / math.log(2) / num_bytes, abs=1e-4)
    assert len({round(result.loss, 2) for result in results}) == 3


def test_the_table_has_a_row_for_each_number_of_loops(model_and_folder, capsys):
    argv = ["eval", str(model_and_folder[1] / "checkpoint"), "--text", str(model_and_folder[1] / "texts")]
    assert cli.main([*argv, "--num_loops", "1", "4", "--max_documents", "1"]) == 0
    rows = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert rows == ["1", "4"]
    assert cli.main([*argv, "--num_loops", "1", "0"]) == 2
    assert capsys.readouterr().err == "error: num_loops is 0; it must be 1 or more\n"
    assert cli.main([*argv, "--seq_len", "65"]) == 2
    assert "from 1 to the model's context, 64" in capsys.readouterr().err
