"""The memory that converting a checkpoint to an export takes, as a multiple of its model in fp32.

    python benchmarks/convert_memory.py [--flavors loom_329m] [--dtypes float32 bfloat16]

A process of its own converts and reports the peak of its resident memory (VmHWM, files that it maps included) above
what it had when everything was imported. Needs about 6 GiB, and 3 GiB on disk. Takes a minute.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.exports import make_checkpoint
from titan_loom.models import FAMILIES

FLAVORS = {flavor: args for family in FAMILIES.values() for flavor, args in family.items()}

CONVERT = """
import re, sys
from pathlib import Path
from titan_loom.hub import check
from titan_loom.hub.convert import to_hf

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

before = peak()
to_hf(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
print(peak() - before)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flavors", nargs="+", default=["loom_329m"], choices=FLAVORS)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    args = parser.parse_args()
    print(f"{'flavor':16}{'parameters':>14}{'fp32 MiB':>10}  {'export':10}{'peak MiB':>9}{'ratio':>7}")
    for flavor in args.flavors:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            count = sum(parameter.numel() for parameter in make_checkpoint(folder / "c", FLAVORS[flavor]).parameters())
            for dtype in args.dtypes:
                command = [sys.executable, "-c", CONVERT, folder / "c", folder / dtype, dtype]
                peak = int(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
                sizes = f"{count:14,}{4 * count / 2**20:10,.0f}  {dtype:10}{peak / 2**20:9,.0f}"
                print(f"{flavor:16}{sizes}{peak / (4 * count):7.2f}", flush=True)


if __name__ == "__main__":
    main()
