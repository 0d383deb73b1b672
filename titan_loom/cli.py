"""`titan-loom <verb> ...`: what one does around a run. Every verb takes its own arguments."""

import difflib
import sys
from collections.abc import Callable

from titan_loom.config import load_config
from titan_loom.config.loading import HELP
from titan_loom.errors import RunError, UserError
from titan_loom.tools.logging import init_logger


def main(argv: list[str] | None = None) -> int:
    """Run one verb; return the exit status: 0 done, 2 the user's mistake (one sentence on stderr), 1 interrupted, or a
    source that cannot be read any further; of a run, its own."""
    verb, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    init_logger(sys.stderr)  # stdout belongs to what the verb prints
    try:
        if verb in ("-h", "--help"):
            print("usage: titan-loom <verb> ...\n")
            for name, function in VERBS.items():
                print(f"  {name:<12}{function.__doc__}")
        elif verb in VERBS:
            return VERBS[verb](rest) or 0
        else:
            nearest = max(VERBS, key=lambda name: difflib.SequenceMatcher(None, verb, name).ratio())
            raise UserError(
                f"{verb!r} is not a verb of titan-loom ({', '.join(VERBS)}); the nearest one is {nearest!r}"
            )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 1
    return 0


def _train(argv: list[str]) -> int:
    """Train: [--nproc_per_node N, or another of torchrun's options] --job.config_file X [overrides]."""
    return _launch(argv)


def _plan(argv: list[str]) -> int:
    """Take a step among any number of processes, without them: [--nproc_per_node N] --job.config_file X [overrides]."""
    return _launch([*argv, "--comm.mode", "fake"])


def _launch(argv: list[str]) -> int:
    """Start `titan_loom.train` with torchrun's options, which come before the first key."""
    from titan_loom.launch import TRAIN_MODULE, launch

    keys = (i for i, word in enumerate(argv) if word in HELP or (word[:2] == "--" and "." in word.partition("=")[0]))
    start = next(keys, len(argv))
    return launch([*argv[:start], "-m", TRAIN_MODULE, *argv[start:]])


def _checkpoint(argv: list[str]) -> None:
    """List what a run has saved, or read it against its checksums: list RUN | verify RUN."""
    from titan_loom.tools import checkpoints

    checkpoints.main(argv)


def _eval(argv: list[str]) -> None:
    """Losses, bits per byte, scores: CHECKPOINT_OR_EXPORT [--text PATH ...] [--tasks TASK ...] [--num_loops 1 2 4]."""
    from titan_loom.hub import evaluate

    evaluate.main(argv)


def _generate(argv: list[str]) -> None:
    """Continue a text: CHECKPOINT_OR_EXPORT --prompt TEXT [--temperature T] [--top_k K] [--top_p P] [--num_loops N]."""
    from titan_loom.hub import generate

    generate.main(argv)


def _inspect(argv: list[str]) -> None:
    """Print parameters, layers, visits, optimizer groups and FLOPs: --job.config_file X [--json] [overrides]."""
    config = load_config([word for word in argv if word != "--json"])
    from titan_loom.tools import inspect

    inspect.main(config, "--json" in argv)


def _tokenizer(argv: list[str]) -> None:
    """Train a tokenizer: [--path SOURCE ...] [--out FOLDER] [--vocab_size N]."""
    from titan_loom.data import train_tokenizer

    train_tokenizer.main(argv)


def _convert(argv: list[str]) -> None:
    """Convert checkpoints: to-hf CHECKPOINT OUT [--dtype bfloat16] (for transformers) | from-hf DIR CHECKPOINT."""
    from titan_loom.hub import convert

    convert.main(argv)


def _data(argv: list[str]) -> None:
    """Look at the data: preview | stats | hashes | speed, then --job.config_file X [overrides]."""
    from titan_loom.data import report

    report.main(argv)


def _pack(argv: list[str]) -> None:
    """Tokenise once: --job.config_file X --source NAME --out DIR [--workers N] | merge A B --out C | verify A."""
    from titan_loom.data import packing

    packing.main(argv)


def _report(argv: list[str]) -> None:
    """Compare runs, draw their losses and what their loops do: RUN [RUN ...] [--out FOLDER]."""
    from titan_loom.tools import report

    report.main(argv)


VERBS: dict[str, Callable[[list[str]], int | None]] = {
    "checkpoint": _checkpoint,
    "convert": _convert,
    "data": _data,
    "eval": _eval,
    "generate": _generate,
    "inspect": _inspect,
    "pack": _pack,
    "plan": _plan,
    "report": _report,
    "tokenizer": _tokenizer,
    "train": _train,
}


if __name__ == "__main__":
    sys.exit(main())
