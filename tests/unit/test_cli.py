import logging

import pytest

from titan_loom import cli, launch
from titan_loom.data import train_tokenizer
from titan_loom.errors import UserError
from titan_loom.tools.logging import init_logger, logger


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_help_lists_every_verb_with_a_line(argv, capsys):
    assert cli.main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    for verb, function in cli.VERBS.items():
        assert f"  {verb:<12}{function.__doc__}" in lines


def test_an_unknown_verb_names_the_nearest_and_all(capsys):
    assert cli.main(["inspekt"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        f"error: 'inspekt' is not a verb of titan-loom ({', '.join(cli.VERBS)}); the nearest one is 'inspect'\n"
    )


def test_a_mistake_in_a_verb_is_one_sentence_and_status_2(capsys):
    assert cli.main(["inspect", "--training.stepz", "3"]) == 2
    assert capsys.readouterr().err == "error: training.stepz is not a key; the nearest one is training.steps\n"


def test_inspect_gets_the_configuration_and_the_form(monkeypatch):
    inspect = pytest.importorskip("titan_loom.tools.inspect")
    calls = []
    monkeypatch.setattr(inspect, "main", lambda config, as_json: calls.append((config.training.steps, as_json)))
    assert cli.main(["inspect", "--training.steps", "3", "--json"]) == 0
    assert cli.main(["inspect", "--json", "--training.steps", "3"]) == 0
    assert cli.main(["inspect", "--training.steps", "3"]) == 0
    assert calls == [(3, True), (3, True), (3, False)]


def test_a_verb_gets_the_words_after_it(monkeypatch):
    calls = []
    monkeypatch.setattr(train_tokenizer, "main", calls.append)
    assert cli.main(["tokenizer", "--out", "x"]) == 0
    assert calls == [["--out", "x"]]


@pytest.mark.parametrize(
    ("argv", "options", "overrides"),
    [
        ("train --job.config_file x.toml", "", "--job.config_file x.toml"),
        ("train --log_dir a.b --data.lanes=4", "--log_dir a.b", "--data.lanes=4"),
        ("train --master_addr=127.0.0.1 --data.lanes 4", "--master_addr=127.0.0.1", "--data.lanes 4"),
        ("train --help", "", "--help"),
        ("plan --nproc_per_node 512 --data.lanes 4", "--nproc_per_node 512", "--data.lanes 4 --comm.mode fake"),
    ],
)
def test_a_run_gets_the_launchers_options_and_its_keys(monkeypatch, argv, options, overrides):
    calls = []
    monkeypatch.setattr(launch, "launch", lambda argv: calls.append(argv) or 1)
    assert cli.main(argv.split()) == 1  # the run's own status
    [found] = calls
    module = found.index("titan_loom.train")
    assert found[: module + 1] == [*options.split(), "-m", "titan_loom.train"]
    assert found[module + 1 :] == overrides.split()


def test_an_error_that_is_no_users_mistake_keeps_its_traceback(monkeypatch):
    def broken(argv):
        raise ValueError("not the user's")

    assert issubclass(UserError, ValueError)
    monkeypatch.setattr(train_tokenizer, "main", broken)
    with pytest.raises(ValueError, match="not the user's"):
        cli.main(["tokenizer"])


@pytest.mark.parametrize(
    ("rank", "log_rank", "level"),
    [("0", None, logging.INFO), ("1", None, logging.WARNING), ("1", "0,1", logging.INFO), ("0", "1", logging.WARNING)],
)
def test_only_the_chosen_ranks_log(monkeypatch, capsys, rank, log_rank, level):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.delenv("LOG_RANK", raising=False)
    if log_rank is not None:
        monkeypatch.setenv("LOG_RANK", log_rank)
    init_logger()
    init_logger()  # again: not every line twice
    assert logger.level == level
    logger.info("a line")
    out = capsys.readouterr().out
    assert out.count(" - titan_loom - INFO - a line\n") == (level == logging.INFO)
    assert out.startswith("[titan] ") or not out
