"""Streaming from a Hub on this machine, in full: kills, resumes far into a part, memory.

python benchmarks/streaming_faults.py kills [repetitions]    # nanocoder.toml, -9 at random moments, hashes compared
python benchmarks/streaming_faults.py resume                 # 200,000 rows, at 90 %: seconds and bytes
python benchmarks/streaming_faults.py memory                 # row groups of 650 MB; 16 lanes of both sources
"""

import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.hub_server import HubServer, fineweb_parts, readme, stack_parts
from tests.processes import kill_tree
from titan_loom.data import embedded

ROW_GROUP_BYTES = 650_000_000
NUM_PARTS = 32


def kills(folder: Path, repetitions: str = "5") -> None:
    """Each run is killed two times; the hashes of its batches against those of a run that was not."""
    from tests.integration.test_streaming import FINEWEB, STACK, hashes, run, start

    with HubServer() as hub:
        hub.commit(STACK, stack_parts(5, 40, seed=0, row_group_size=15))
        card = readme({"default": "data/*/*"})
        hub.commit(FINEWEB, fineweb_parts(17, 20, seed=1, row_group_size=7, folder="data/CC-1") | {"README.md": card})
        assert run(hub, folder / "whole")[0] == 0
        print("repetition  killed at   equal hashes")
        for repetition in range(int(repetitions)):
            killed_at = []
            for _ in range(2):
                process = start(hub, folder / str(repetition))
                for line in process.stdout:
                    if "Training starts" in line:
                        break
                time.sleep(random.uniform(0, 5))
                kill_tree(process)
                metrics = folder / str(repetition) / "run" / "metrics.jsonl"
                killed_at.append(len(metrics.read_text().splitlines()) if metrics.exists() else 0)
            assert run(hub, folder / str(repetition))[0] == 0
            equal = hashes(folder / str(repetition)) == hashes(folder / "whole")
            print(f"{repetition:10}  {killed_at!s:10}  {equal}", flush=True)


# Not getrusage: it remembers the memory of the process that started this one.
PEAK = """
def peak():
    (line,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024
"""

READ = (
    PEAK
    + """
import sys, time
from titan_loom.config.job_config import Source
from titan_loom.data.sources import list_parts
from titan_loom.data.readers import Shard, open_rows
columns = sys.argv[3].split(",")
(part,) = list_parts("s", Source(path=sys.argv[1], format=sys.argv[4])).parts
idle, started = peak(), time.perf_counter()
rows = open_rows(Shard(part), int(sys.argv[2]), columns)
for _ in range(int(sys.argv[5])):
    next(rows)
print(time.perf_counter() - started, peak() - idle, part.size)
"""
)


def read(hub: HubServer, folder: Path, *arguments: str, program: str = READ) -> list[float]:
    environment = os.environ | hub.environment(folder) | {"PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", program, *arguments]
    output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    return [float(word) for word in output.splitlines()[-1].split()]


def resume(folder: Path) -> None:
    print("row groups of   seconds   bytes read   of the part")
    with HubServer() as hub:
        for rows_per_group in (1_000, 66_667):
            repository = f"Owner/{rows_per_group}"
            hub.commit(repository, fineweb_parts(1, 200_000, seed=0, row_group_size=rows_per_group))
            hub.forget_requests()
            seconds, _, size = read(hub, folder, repository, "180000", "text", "text", "256")
            sent = hub.bytes_sent("resolve")
            print(f"{rows_per_group:13,}   {seconds:7.2f}   {sent:10,}   {sent / size:10.2%}", flush=True)


LANES = (
    PEAK
    + """
import time
from titan_loom.config.job_config import Data, Dataloader, Source
from titan_loom.data.loader import LaneLoader
from titan_loom.data.tokenizer import load_tokenizer
sources = {
    "stack_v3": Source(path="Owner/stack", format="repository", share=0.75),
    "fineweb_edu": Source(path="Owner/fineweb", share=0.25),
}
loader = LaneLoader(Data(lanes=16, sources=sources), Dataloader(), load_tokenizer(), seed=0, seq_len=4096,
                    global_batch_size=128, steps=100, total_tokens=None, dp_rank=0, dp_degree=1)
started = time.perf_counter()
for _ in range(3):
    next(loader)
print(time.perf_counter() - started, peak(), 0)
"""
)


def memory(folder: Path) -> None:
    write_large_part(folder / "large.parquet")
    with HubServer() as hub:
        names = [f"data/train-{i:05}-of-{NUM_PARTS:05}.parquet" for i in range(NUM_PARTS)]
        hub.commit("Owner/one", {names[0]: folder / "large.parquet"})
        hub.commit("Owner/stack", dict.fromkeys(names, folder / "large.parquet"))
        hub.commit("Owner/fineweb", fineweb_parts(NUM_PARTS, 1000, seed=0, row_group_size=1000, folder="data"))
        columns = "repo_path,files.file_path,files.content,files.language,files.is_vendor"
        seconds, peak, _ = read(hub, folder, "Owner/one", "0", columns, "repository", "9000")
        print(
            f"one part, row groups of {ROW_GROUP_BYTES / 1e6:.0f} MB: {peak / 1e6:.0f} MB above idle, {seconds:.1f} s"
        )
        seconds, peak, _ = read(hub, folder, program=LANES)
        print(f"16 lanes of both sources, 3 steps: {peak / 2**30:.2f} GiB in all, {seconds:.0f} s")


def write_large_part(path: Path) -> None:
    """Two row groups of repositories made of the standard library's files, each file with lines of its own."""
    files = [
        file for name in embedded.row_names("embedded:code") for file in embedded.row("embedded:code", name)["files"]
    ]
    draw = random.Random(0)
    writer = None
    for _ in range(2):
        rows, size = [], 0
        while size < ROW_GROUP_BYTES:
            chosen = [file | {"content": f"# {draw.random()}\n{file['content']}"} for file in draw.sample(files, 5)]
            size += sum(len(file["content"]) for file in chosen)
            rows.append({"repo_path": f"owner/{draw.random()}", "files": chosen, "noise": draw.randbytes(1000).hex()})
        table = pa.Table.from_pylist(rows)
        writer = writer or pq.ParquetWriter(path, table.schema, compression="zstd")
        writer.write_table(table, row_group_size=len(rows))
        print(f"row group of {len(rows):,} rows", flush=True)
    writer.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        {"kills": kills, "resume": resume, "memory": memory}[sys.argv[1]](Path(temporary), *sys.argv[2:])
