from dataclasses import replace

import pytest

pytest.importorskip("transformers")

from tests.exports import TINY, export
from titan_loom import cli
from titan_loom.hub.generate import GenerateArgs, generate

PROMPT = "import os"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An `export` and the `checkpoint` that it is of."""
    folder = tmp_path_factory.mktemp("generate")
    export(folder, replace(TINY, refresh="gated"))
    return folder


def ids(folder, **values) -> list[int]:
    return generate(GenerateArgs(path=folder, prompt=PROMPT, max_new_tokens=12, **values))


def test_a_checkpoint_and_its_export_say_the_same(folder, capsys):
    from_export = ids(folder / "export")
    printed = capsys.readouterr().out
    assert ids(folder / "checkpoint") == from_export
    assert capsys.readouterr().out == printed
    assert printed.startswith(PROMPT) and len(printed) > len(PROMPT) + 5


def test_the_seed_and_the_settings_decide(folder):
    checkpoint = folder / "checkpoint"
    hot = ids(checkpoint, temperature=2.0)
    assert ids(checkpoint, temperature=2.0) == hot != ids(checkpoint, temperature=2.0, seed=1)
    greedy = ids(checkpoint, temperature=0.0)
    assert greedy == ids(checkpoint, temperature=0.0, seed=1)
    assert greedy == ids(checkpoint, temperature=2.0, top_k=1) == ids(checkpoint, temperature=2.0, top_p=1e-6)
    assert greedy != ids(checkpoint, temperature=0.0, num_loops=3)


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        (["--num_loops", "0"], "num_loops is 0; it must be 1 or more"),
        (["--top_p", "1.5"], "top_p is 1.5; it must be above 0 and at most 1"),
        (["--max_new_tokens", "99"], "at most the model's context, 64"),
    ],
)
def test_mistakes_are_one_sentence(folder, capsys, argv, what):
    assert cli.main(["generate", str(folder / "export"), "--prompt", PROMPT, *argv]) == 2
    captured = capsys.readouterr()
    assert what in captured.err and captured.out == ""


def test_what_needs_transformers_says_so(folder, monkeypatch, capsys):
    monkeypatch.setattr("titan_loom.hub.families.find_spec", lambda name: None)
    for verb in (["generate"], ["eval", "--text", "embedded:prose"], ["convert", "to-hf", str(folder / "out")]):
        assert cli.main([*verb, str(folder / "checkpoint")]) == 2
        assert "needs transformers: pip install 'titan-loom[export]'" in capsys.readouterr().err


def test_an_empty_prompt_starts_a_document_and_other_folders_are_refused(folder, capsys):
    assert cli.main(["generate", str(folder / "export"), "--max_new_tokens", "3"]) == 0
    assert cli.main(["generate", str(folder)]) == 2
    assert capsys.readouterr().err.endswith("is no complete checkpoint and holds none\n")
