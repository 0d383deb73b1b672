import subprocess
import sys

import pytest

RUN = """
from titan_loom.training.signals import run_and_exit

def main():
    import atexit, sys, threading
    import torch

    def multiply():
        while True:
            torch.mm(matrix, matrix)

    matrix = torch.ones(300, 300)
    threading.Thread(target=multiply, daemon=True).start()
    atexit.register(print, "registered")
    print("ran")
    {end}

run_and_exit(main)
"""


@pytest.mark.parametrize(
    ("end", "status"), [("return 0", 0), ("return 2", 2), ("sys.exit(0)", 0), ("sys.exit(1)", 1), ("1 / 0", 1)]
)
def test_a_thread_that_is_left_behind_aborts_no_process(end, status):
    """One of gloo's once did, after the sentence about a mistake: the status was SIGABRT in place of 2."""
    found = subprocess.run([sys.executable, "-c", RUN.format(end=end)], capture_output=True, text=True)
    assert (found.returncode, found.stdout.split()) == (status, ["ran", "registered"]), found.stderr
    assert found.stderr.strip().endswith("ZeroDivisionError: division by zero") if end == "1 / 0" else not found.stderr
