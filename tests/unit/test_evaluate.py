import json
import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")

from tests import runs
from tests.exports import make_checkpoint
from titan_loom import cli
from titan_loom.data.tokenizer import load_tokenizer
from titan_loom.hub import convert, evaluate_tasks
from titan_loom.hub.evaluate import EvalArgs, evaluate, load_to_device, read_parts

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
    args = EvalArgs(path=folder / "checkpoint", text=(str(folder / "texts"),), num_loops=(1, 2, 3), seq_len=seq_len)
    hf_model, tokenizer = load_to_device(args)
    results = evaluate(args, hf_model, *read_parts(args, hf_model, tokenizer))
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
    folder = model_and_folder[1]
    argv = ["eval", str(folder / "checkpoint"), "--unverified", "--text", str(folder / "texts")]
    assert cli.main([*argv, "--num_loops", "1", "4", "--max_documents", "1"]) == 0
    rows = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert rows == ["1", "4"]
    assert cli.main([*argv, "--num_loops", "1", "0"]) == 2
    assert capsys.readouterr().err == "error: num_loops is 0; it must be 1 or more\n"
    assert cli.main([*argv, "--seq_len", "65"]) == 2
    assert "from 1 to the model's context, 64" in capsys.readouterr().err


def rows_of(table: str) -> list[list[str]]:
    """The cells of a printed table."""
    return [[cell.strip() for cell in line[1:-1].split("│")] for line in table.splitlines() if line.startswith("│")]


VALIDATION = (
    *("--validation.enable", "true", "--validation.steps", "2", "--validation.local_batch_size", "2"),
    *("--data.holdout_percent", "20", "--training.steps", "2"),
)


def short_texts(folder) -> str:
    """A folder of documents of which several are in a sequence."""
    (folder / "texts").mkdir()
    for i in range(40):
        (folder / "texts" / f"{i}.txt").write_text(f"line {i} of some prose\n" * (i % 4 + 1))
    return str(folder / "texts")


@pytest.mark.parametrize(
    ("config", "key", "value"),
    [(runs.LOOM, "--data.document_mask", "true"), (runs.SMALL, "--data.packing", "first_fit")],
    ids=["masked", "padded"],
)
def test_the_recorded_losses_come_out_again(tmp_path, capsys, config, key, value):
    texts = short_texts(tmp_path)
    data = ("--data.sources.code.path", texts, "--data.sources.code.format", "text", "--data.sources.prose.path", texts)
    *_, last = runs.train(tmp_path, *VALIDATION, *data, key, value, config=config)
    num_loops = last["num_loops"]
    argv = ["eval", str(tmp_path / "run"), "--cache_tokens", "0", "--num_loops", "1", str(num_loops)]
    assert cli.main(argv) == 0
    printed = capsys.readouterr()
    assert f"recorded in training: {last['validation/loss']:.4f}" in printed.err
    losses = [last[f"validation/loop/{loop}/loss"] for loop in (1, num_loops)]
    assert [float(row[1]) for row in rows_of(printed.out)] == pytest.approx(losses, abs=1e-4)


def test_nothing_is_scored_with_other_weights_than_were_validated(tmp_path, capsys):
    *_, last = runs.train(tmp_path, *VALIDATION, "--data.sources.prose.path", short_texts(tmp_path))
    export = tmp_path / "export"
    convert.to_hf(tmp_path / "run", export)
    assert str(tmp_path) not in "".join(path.read_text("utf-8", "replace") for path in export.iterdir())
    assert cli.main(["eval", str(export)]) == 2
    assert "validation of step 2 cannot be read again: data.sources.prose.path = 'texts'" in capsys.readouterr().err

    argv = ["eval", str(export), "--config_file", str(tmp_path / "run" / "config.toml")]
    assert cli.main(argv) == 0
    assert f"recorded in training: {last['validation/loss']:.4f}" in capsys.readouterr().err
    weights = load_file(export / "model.safetensors")
    weights["model.blocks.0.attention.output.weight"] *= -4.0
    save_file(weights, export / "model.safetensors", {"format": "pt"})
    assert cli.main(argv) == 1
    printed = capsys.readouterr()
    assert f"but training recorded {last['validation/loss']:.4f} at step 2" in printed.err and not printed.out


def test_without_a_recorded_validation_one_has_to_ask_for_it(model_and_folder, capsys):
    assert (
        cli.main(["eval", str(model_and_folder[1] / "checkpoint"), "--text", str(model_and_folder[1] / "texts")]) == 2
    )
    assert "step 3, of which training recorded no validation loss" in capsys.readouterr().err


QUESTIONS = [
    {"context": "Two and two are", "choices": ["four", "five, as everybody knows", "a"], "answer": 0},
    {"context": "def double(x):\n    return ", "choices": ["x", "2 * x", "x * x * x"], "answer": 1},
    {"context": "", "choices": ["Once upon a time", "zz"], "answer": 0},
    {"context": "for i in range(9): print(i)\n" * 12, "choices": ["done", "import"], "answer": 1},  # over the context
    *({"context": f"The number after {i} is", "choices": [str(i), str(i + 1)], "answer": 1} for i in range(12)),
]


@torch.no_grad()
def test_choices_are_scored_as_one_by_one_and_token_by_token(model_and_folder, capsys):
    model, folder = model_and_folder
    path = folder / "questions.jsonl"
    path.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    tokenizer = load_tokenizer()
    right = right_norm = 0
    for question in QUESTIONS:
        scores, scores_norm = [], []
        for choice in question["choices"]:
            context = question["context"]
            gap = " " if context and not context[-1].isspace() else ""
            alone, whole = (
                tokenizer.encode_batch([text])[0][:-1].tolist() for text in (context, context + gap + choice)
            )
            if not context:
                alone, whole = [tokenizer.eos_id], [tokenizer.eos_id, *whole]
            start = next(i for i in range(len(whole)) if whole[: i + 1] != alone[: i + 1])
            score = 0.0
            window = whole[max(0, len(whole) - model.args.max_seq_len - 1) :]
            for i in range(len(window) - (len(whole) - start), len(window)):
                hidden = model(torch.tensor([window[:i]]), num_loops=3).hidden[0, -1]
                score += model.logits(hidden).log_softmax(-1)[window[i]].item()
            scores.append(score)
            scores_norm.append(score / len(choice))
        right += scores.index(max(scores)) == question["answer"]
        right_norm += scores_norm.index(max(scores_norm)) == question["answer"]
    assert right != right_norm and 0 < right < len(QUESTIONS)
    assert cli.main(["eval", str(folder / "checkpoint"), "--unverified", "--tasks", str(path), "--num_loops", "3"]) == 0
    [row] = rows_of(capsys.readouterr().out)
    assert row[2:] == [str(len(QUESTIONS)), f"{right / len(QUESTIONS):.4f}", f"{right_norm / len(QUESTIONS):.4f}"]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ('{"context": "a", "choices": ["b", "c"], "answer": 2}', "question 1: it must have"),
        ('{"context": "a", "choices": ["b", ""], "answer": 0}', "question 1: it must have"),
        ("{", "question 1: it must have"),
        ("", "holds no question"),
        (None, "cannot be read"),
    ],
)
def test_a_task_file_is_checked_before_anything_is_loaded(tmp_path, capsys, line, what):
    if line is not None:
        (tmp_path / "task.jsonl").write_text(line)
    assert cli.main(["eval", str(tmp_path), "--tasks", str(tmp_path / "task.jsonl")]) == 2
    assert what in capsys.readouterr().err


def test_the_harness_is_given_the_model_and_the_tokenizer(model_and_folder, monkeypatch, capsys):
    folder = model_and_folder[1]
    argv = ["eval", str(folder / "checkpoint"), "--unverified", "--tasks", "loom", "--num_loops", "1", "3"]
    monkeypatch.setattr(evaluate_tasks, "find_spec", lambda name: None)
    assert cli.main(argv) == 2
    assert "tasks has 'loom', which needs lm-evaluation-harness: pip install" in capsys.readouterr().err

    def simple_evaluate(lm, tasks, **_):
        tokens = lm.tokenizer("x = 1", return_tensors="pt").input_ids
        share = lm.pretrained(tokens).logits[0, -1, 0].abs().item() % 1
        found = {task: {"acc,none": share, "acc_norm,none": share / 2} for task in tasks}
        return {"results": found, "n-samples": {task: {"effective": 7} for task in tasks}}

    names = ("lm_eval", "lm_eval.models", "lm_eval.models.huggingface", "lm_eval.tasks")
    harness, _, huggingface, tasks = modules = [ModuleType(name) for name in names]
    harness.simple_evaluate, huggingface.HFLM = simple_evaluate, SimpleNamespace
    tasks.TaskManager = lambda: SimpleNamespace(all_subtasks=list(evaluate_tasks.LOOM))
    monkeypatch.setattr(evaluate_tasks, "find_spec", lambda name: "there")
    for module in modules:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    assert cli.main(argv) == 0
    rows = rows_of(capsys.readouterr().out)
    assert [row[0] for row in rows] == ["1"] * 8 + ["3"] * 8
    assert {tuple(row[2:]) for row in rows[:7]}.isdisjoint({tuple(row[2:]) for row in rows[8:15]})
    for of_loops in (rows[:8], rows[8:]):
        acc, acc_norm = (float(value) for value in of_loops[0][3:])
        assert float(of_loops[7][3]) == pytest.approx((5 * acc_norm + 2 * acc) / 7, abs=1e-4)
    assert cli.main(["eval", str(folder / "checkpoint"), "--unverified", "--tasks", "arc"]) == 2
    assert "tasks has 'arc', which is no task of lm-evaluation-harness" in capsys.readouterr().err
