"""Writes the corpus of the tests: `corpus/repositories.jsonl` (stack-v3's shape) and `corpus/prose.jsonl`.

Generated text, so that golden numbers depend on no Python version. The files are committed; run this only to change
them.
"""

import json
import random
from pathlib import Path

WORDS = (  # noqa: SIM905
    "a loom holds the warp under tension so that the weft can pass between threads while each shuttle returns on its "
    "own path and the pattern repeats until cloth is long enough to cut fold dye or trade in a market by the river"
).split()
VERBS = ("count", "merge", "split", "weave", "spool", "trim")
NOUNS = ("thread", "shuttle", "pattern", "loom", "bobbin", "selvedge")


def sentence(rng: random.Random) -> str:
    words = rng.choices(WORDS, k=rng.randint(5, 14))
    return " ".join(words).capitalize() + rng.choice((".", ".", "!", ", we think."))


def function(rng: random.Random) -> str:
    verb, noun, other = rng.choice(VERBS), *rng.sample(NOUNS, 2)
    return (
        f"def {verb}_{noun}({noun}s, {other}=None, limit={rng.randint(0, 2048)}):\n"
        f'    """{sentence(rng)}"""\n'
        f"    for index, {noun} in enumerate({noun}s):\n"
        f"        if index > limit and {other} is not None:\n"
        f"            {other}.append({noun} * {rng.randint(2, 99)})\n"
        f"    return {other} or {noun}s\n"
    )


def repository(rng: random.Random, number: int) -> dict:
    files = [
        {
            "file_path": f"src/{rng.choice(NOUNS)}_{i}.py",
            "content": "\n\n".join(function(rng) for _ in range(rng.randint(1, 3))) if rng.random() > 0.1 else " \n",
            "language": "Python",
            "is_vendor": rng.random() < 0.1,
        }
        for i in range(rng.randint(1, 4))
    ]
    return {"repo_path": f"weavers/{rng.choice(NOUNS)}-{number:03}", "files": files}


def write(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


if __name__ == "__main__":
    rng = random.Random(0)
    folder = Path(__file__).parent / "corpus"
    folder.mkdir(exist_ok=True)
    write(folder / "repositories.jsonl", [repository(rng, number) for number in range(30)])
    prose = [" ".join(sentence(rng) for _ in range(rng.randint(3, 12))) for _ in range(40)]
    write(folder / "prose.jsonl", [{"text": text} for text in prose])
