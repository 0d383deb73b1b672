"""How a run's configuration is read: command line over TOML file over defaults; and how it is written and explained.

Both go through the same strict decoder (`decoding.py`), so a mistake reads the same wherever it was made. Nothing here
imports torch: a wrong key is reported at once.
"""

import contextlib
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from titan_loom.config.decoding import Text, decode, override
from titan_loom.config.job_config import JobConfig, Source, Stage
from titan_loom.errors import UserError

__all__ = ["decode", "leaves", "load_config", "override", "print_help", "to_toml", "without_none"]

HELP = {"-h", "--help"}
EXCLUSIVE = [
    ("training.steps", "training.total_tokens"),
    ("lr_scheduler.warmup_steps", "lr_scheduler.warmup_tokens"),
]
"""Keys of which one may be set: one on the command line takes the other's place, wherever that came from."""


def load_config(argv: list[str]) -> JobConfig:
    """The configuration that a command line describes.

    Args:
        argv: `--job.config_file X`, and overrides as `--section.key value` or `--section.key=value`. In keys, `-` is
            `_`; `--section.key` alone is true; lists are comma separated; `none` unsets an optional key. A key that
            excludes another takes its place.

    Raises:
        UserError: an unknown key, a value of the wrong type, a file that is missing or no TOML.
        SystemExit: with status 0 after `--help` or `-h` printed every key.
    """
    if HELP & set(argv):
        print_help(_load_or_default([word for word in argv if word not in HELP]))
        sys.exit(0)
    overrides = _replace_exclusive(_parse_words(argv))
    path = _override_all(JobConfig(), overrides).job.config_file
    from_file = override(JobConfig(), _read_toml(path)) if path is not None else JobConfig()
    if from_file.job.config_file is not None:
        raise UserError(f"job.config_file is {from_file.job.config_file!r} in {path}; only the command line can set it")
    config = _override_all(from_file, overrides)

    for name, source in config.data.sources.items():
        if name not in from_file.data.sources and not source.path:
            there = ", ".join(from_file.data.sources) or "none"
            raise UserError(f"data.sources.{name} has no path and is not in the file, whose sources are: {there}")
    if config.job.dump_folder is None:
        folder = Path("outputs", Path(path).stem if path is not None else "run")
        config = replace(config, job=replace(config.job, dump_folder=str(folder)))
    return config


def to_toml(config: JobConfig) -> str:
    """`config` as a TOML file that loads to the same configuration (`job.config_file` aside, which names a file)."""
    import tomli_w

    return tomli_w.dumps(without_none(asdict(replace(config, job=replace(config.job, config_file=None)))))


def print_help(config: JobConfig | None = None) -> None:
    """Print every key with its manual, its type and its value in `config`. Default: the values without a file."""
    import tyro

    config = config or JobConfig()
    # An empty table would have no line of its own.
    model = config.model if config.model.args else replace(config.model, args={"<field>": "..."})
    data = config.data if config.data.sources else replace(config.data, sources={"<name>": Source()})
    data = replace(data, stages=data.stages or [Stage()])
    with contextlib.suppress(SystemExit):  # tyro's parser leaves after its help
        tyro.cli(
            tyro.conf.FlagConversionOff[JobConfig],
            prog="run_train.sh",
            args=["--help"],
            default=replace(config, model=model, data=data),
            use_underscores=True,
        )


def _load_or_default(argv: list[str]) -> JobConfig:
    try:
        return load_config(argv)
    except UserError:
        return JobConfig()


def _parse_words(argv: list[str]) -> list[dict[str, Any]]:
    """One nested table for every override, in order."""
    overrides = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            raise UserError(f"unexpected argument {word!r}: overrides have the form --section.key value")
        key, is_assigned, value = word[2:].partition("=")
        table: Any = True  # a key alone
        if is_assigned:
            table = Text(value)
        elif rest and not rest[0].startswith("--"):
            table = Text(rest.pop(0))
        for name in reversed(key.split(".")):
            table = {Text(name): table}
        overrides.append(table)
    return overrides


def _replace_exclusive(overrides: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Unset the key that an override excludes, unless it is given itself."""
    given = {key.replace("-", "_") for table in overrides for key, value in leaves(table) if value != "none"}
    unset = []
    for pair in EXCLUSIVE:
        if len(excluded := set(pair) - given) == 1:
            section, key = excluded.pop().split(".")
            unset.append({Text(section): {Text(key): Text("none")}})
    return unset + overrides


def leaves(table: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of everything in a nested table."""
    if not isinstance(table, dict):
        yield prefix, table
        return
    for name, inner in table.items():
        yield from leaves(inner, f"{prefix}.{name}" if prefix else name)


def _override_all(config: JobConfig, overrides: list[dict[str, Any]]) -> JobConfig:
    for table in overrides:
        config = override(config, table)
    return config


def _read_toml(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UserError(f"job.config_file is {path!r}, which cannot be read: {error.strerror}") from None
    except ValueError as error:  # of the syntax, with line and column, or of the encoding
        raise UserError(f"job.config_file is {path!r}, which is not valid TOML: {error}") from None


def without_none(table: dict[str, Any]) -> dict[str, Any]:
    """The nested table without the keys that are None, which neither TOML nor `decode` has."""
    return {
        key: without_none(value) if isinstance(value, dict) else _each_without_none(value)
        for key, value in table.items()
        if value is not None
    }


def _each_without_none(value: Any) -> Any:
    """A list of tables is a value too."""
    if isinstance(value, list):
        return [without_none(item) if isinstance(item, dict) else item for item in value]
    return value
