"""Exports in a new environment that has torch and transformers and nothing of this repository.

    python benchmarks/export_alone.py

Exports every debug model, with weights that make context matter, installs the two by pip, and runs
tests/check_exports.py there. Prints what that measured and what is installed.
"""

import os
import subprocess
import sys
import tempfile
import venv
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.exports import make_checkpoint
from titan_loom.hub.convert import to_hf
from titan_loom.models import FAMILIES

REPOSITORY = Path(__file__).parents[1]
NANOCODER = FAMILIES["nanocoder"]["debug"]
LOOM = replace(FAMILIES["loom"]["debug"], residual_lambda=2.0)  # much of attention in the stream
MODELS = {
    "nanocoder": NANOCODER,
    "nanocoder-gated": replace(NANOCODER, refresh="gated"),
    "loom": LOOM,
    "barbados": replace(LOOM, kv_gate=True),
    "barbados-shared-cache": replace(LOOM, kv_gate=True, kv_cache="shared"),
}


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name, args in MODELS.items():
            make_checkpoint(folder / "checkpoints" / name, args)
            to_hf(folder / "checkpoints" / name, folder / name)
        venv.create(folder / "venv", with_pip=True)
        python = folder / "venv" / "bin" / "python"
        requirements = [f"torch=={torch.__version__.split('+')[0]}", "transformers"]
        subprocess.run([python, "-m", "pip", "install", "--quiet", *requirements], check=True)
        subprocess.run([python, "-m", "pip", "list"], check=True)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HF_"))}
        environment = kept | {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"}
        command = [python, "-I", REPOSITORY / "tests" / "check_exports.py", *(folder / name for name in MODELS)]
        sys.exit(subprocess.run(command, cwd=folder, env=environment).returncode)


if __name__ == "__main__":
    main()
