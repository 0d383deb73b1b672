"""Multiple-choice tasks: files of one's own, and those of lm-evaluation-harness through the model for transformers.

The answer is the choice that the model finds most likely after the context: by the sum of its tokens' log-probabilities
(`acc`), or by that sum over its number of characters (`acc_norm`), as the harness defines them.
"""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from titan_loom.data.tokenizer import BOS, EOS, PAD, Tokenizer
from titan_loom.errors import RunError, UserError

LOOM = {
    "arc_easy": "acc_norm",
    "arc_challenge": "acc_norm",
    "hellaswag": "acc_norm",
    "openbookqa": "acc_norm",
    "piqa": "acc_norm",
    "winogrande": "acc",
    "social_iqa": "acc",
}
"""`--tasks loom`: the seven zero-shot tasks of arXiv 2610.01153, with what it reports of each."""

BATCH_SIZE = 16


class Score(NamedTuple):
    """Shares of right answers, 0 to 1; None where a task has no such measure."""

    task: str
    count: int | None
    acc: float | None
    acc_norm: float | None


class Question(NamedTuple):
    """A line of a task file."""

    context: str
    choices: list[str]
    answer: int


def check_tasks(names: Sequence[str]) -> None:
    """Raises UserError for a file that is not there, and for tasks of the harness when that is not installed."""
    for name in names:
        if name.endswith(".jsonl"):
            list(_questions(Path(name)))
        elif find_spec("lm_eval") is None:
            raise UserError(
                f"tasks has {name!r}, which needs lm-evaluation-harness: pip install 'titan-loom[eval]'; a file of "
                "one's own must end in .jsonl"
            )


def run_tasks(names: Sequence[str], model: nn.Module, tokenizer: Tokenizer, num_loops: int | None) -> list[Score]:
    """The scores of files and of tasks of the harness, in the order of `names`; `loom` ends in a mean."""
    scores = []
    for name in names:
        if name.endswith(".jsonl"):
            scores.append(_score_file(Path(name), model, tokenizer, num_loops))
        elif name == "loom":
            of_loom = _run_harness(list(LOOM), model, tokenizer, num_loops)
            mean = sum(getattr(score, LOOM[score.task]) for score in of_loom) / len(of_loom)
            scores += [*of_loom, Score("mean as reported", None, mean, None)]
        else:
            scores += _run_harness([name], model, tokenizer, num_loops)
    return scores


def _score_file(path: Path, model: nn.Module, tokenizer: Tokenizer, num_loops: int | None) -> Score:
    right = right_norm = count = 0
    for question in _questions(path):
        likely = log_likelihoods(model, tokenizer, question, num_loops)
        lengths = torch.tensor([len(choice) for choice in question.choices])
        right += int(likely.argmax()) == question.answer
        right_norm += int((likely / lengths).argmax()) == question.answer
        count += 1
    return Score(str(path), count, right / count, right_norm / count)


@torch.no_grad()
def log_likelihoods(model: nn.Module, tokenizer: Tokenizer, question: Question, num_loops: int | None) -> Tensor:
    """(choices,) fp64: of each choice after the context, from which a space parts it unless whitespace does.

    The two are encoded together; the choice's tokens are those that the context alone does not begin with. Without a
    context they follow the end of a document. A context that is too long for the model loses its beginning; such a
    choice raises UserError.
    """
    gap = " " if question.context and not question.context[-1].isspace() else ""
    texts = [question.context, *(question.context + gap + choice for choice in question.choices)]
    context, *wholes = (ids[:-1].tolist() for ids in tokenizer.encode_batch(texts))
    limit = model.config.max_position_embeddings
    lengths = [len(ids) - _common(context, ids) for ids in wholes]
    if max(lengths) > limit:
        raise UserError(f"a choice after {question.context[:40]!r} has {max(lengths)} tokens; the model takes {limit}")
    wholes = [
        ids if len(ids) > length else [tokenizer.eos_id, *ids] for ids, length in zip(wholes, lengths, strict=True)
    ]
    wholes = [torch.tensor(ids[-limit - 1 :]) for ids in wholes]
    # What follows a token does not reach it, so padding on the right needs no mask.
    tokens = pad_sequence(wholes, batch_first=True).to(model.device)
    logits = model(tokens[:, :-1], use_cache=False, num_loops=num_loops).logits
    of_next = logits.float().log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0].double().cpu()
    spans = [(len(ids) - 1 - length, len(ids) - 1) for ids, length in zip(wholes, lengths, strict=True)]
    return torch.stack([row[start:end].sum() for row, (start, end) in zip(of_next, spans, strict=True)])


def _common(a: list[int], b: list[int]) -> int:
    """How many ids `a` and `b` begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _questions(path: Path) -> Iterator[Question]:
    """The lines of a task file. Raises UserError for one that is no question, and when there is none."""
    try:
        lines = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"tasks has {str(path)!r}, which cannot be read: {error}") from error
    if not lines:
        raise UserError(f"tasks has {str(path)!r}, which holds no question")
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            question = Question(row["context"], row["choices"], row["answer"])
            is_question = all(isinstance(text, str) and text for text in question.choices) and (
                isinstance(question.context, str) and question.choices[question.answer] and question.answer >= 0
            )
        except (ValueError, TypeError, KeyError, IndexError):
            is_question = False
        if not is_question:
            raise UserError(
                f"{path}, question {number}: it must have a `context`, a list of `choices`, none of them empty, and "
                "the `answer`, the number of the right one from 0"
            )
        yield question


def _run_harness(names: list[str], model: nn.Module, tokenizer: Tokenizer, num_loops: int | None) -> list[Score]:
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from tokenizers import Tokenizer as HFTokenizer
    from transformers import PreTrainedTokenizerFast

    manager = TaskManager()
    for name in set(names) - set(manager.all_subtasks):
        raise UserError(
            f"tasks has {name!r}, which is no task of lm-evaluation-harness; `lm-eval ls subtasks` lists them"
        )
    special = {"pad_token": PAD, "bos_token": BOS, "eos_token": EOS}
    known = {kind: token for kind, token in special.items() if tokenizer.id_of(token) is not None}
    hf_tokenizer = PreTrainedTokenizerFast(tokenizer_object=HFTokenizer.from_str(tokenizer.text), **known)
    model.forward = partial(model.forward, use_cache=False, num_loops=num_loops)
    try:
        wrapped = HFLM(
            pretrained=model, tokenizer=hf_tokenizer, batch_size=BATCH_SIZE, prefix_token_id=tokenizer.eos_id
        )
        results = lm_eval.simple_evaluate(
            wrapped, tasks=names, task_manager=manager, num_fewshot=0, bootstrap_iters=0, log_samples=False
        )
    except OSError as error:  # of the data of a task
        raise RunError(f"the tasks {', '.join(names)} cannot be read: {error}") from error
    finally:
        del model.forward  # the class has it
    return [_score_of(name, results) for name in names]


def _score_of(name: str, results: dict[str, Any]) -> Score:
    found = results["results"][name]
    return Score(name, results["n-samples"][name]["effective"], found.get("acc,none"), found.get("acc_norm,none"))
