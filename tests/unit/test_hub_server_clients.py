"""The real clients understand the test Hub: huggingface_hub, its file system under pyarrow, and datasets.

They read their environment when they are imported, so each test runs a process of its own.
"""

import io
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pyarrow.parquet as pq

from tests.hub_server import HubServer, fineweb_parts, readme, stack_parts


def run_client(server: HubServer, folder: Path, script: str, *arguments: str, token: str = ""):
    """What `script` assigns to `result`, run in a process whose Hub is `server`."""
    program = "import json, sys\n" + textwrap.dedent(script) + "\nprint(json.dumps(result))"
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=os.environ | server.environment(folder, token),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_hub_client_sees_information_and_tree(tmp_path):
    files = {f"data/part-{index}.parquet": bytes(index) for index in range(4)} | {"README.md": b"hello"}
    script = """
        from huggingface_hub import HfApi
        api = HfApi()
        tree = api.list_repo_tree("Owner/data", repo_type="dataset", revision="main", recursive=True)
        paths = api.get_paths_info("Owner/data", ["data", "README.md", "absent"], repo_type="dataset")
        result = {
            "sha": api.dataset_info("Owner/data", revision="main").sha,
            "model": api.model_info("Owner/data").sha,
            "tree": {entry.path: getattr(entry, "size", None) for entry in tree},
            "root": [entry.path for entry in api.list_repo_tree("Owner/data", repo_type="dataset")],
            "paths": [entry.path for entry in paths],
        }
    """
    with HubServer(page_size=4) as server:
        sha = server.commit("Owner/data", files)
        model_sha = server.commit("Owner/data", {"config.json": b"{}"}, repo_type="model")
        result = run_client(server, tmp_path, script)
        assert (result["sha"], result["model"]) == (sha, model_sha)
        assert result["tree"] == {"README.md": 5, "data": None} | {f"data/part-{i}.parquet": i for i in range(4)}
        assert result["root"] == ["README.md", "data"]
        assert result["paths"] == ["data", "README.md"]
        # The recursive tree has six entries, two pages of four.
        assert {kind: server.count(kind) for kind in ("tree", "revision", "info")} == {
            "tree": 3,
            "revision": 1,
            "info": 1,
        }


def test_parquet_is_read_by_ranges_through_the_file_system(tmp_path):
    script = """
        import pyarrow.parquet as pq
        from huggingface_hub import HfFileSystem
        path = f"datasets/Owner/code@{sys.argv[1]}/{sys.argv[2]}"
        with HfFileSystem().open(path, "rb", block_size=1 << 20, cache_type="none") as file:
            table = pq.ParquetFile(file, pre_buffer=False).read_row_group(3, columns=["repo_path", "files"])
        result = table.to_pylist()
    """
    parts = stack_parts(1, 2000, seed=0, row_group_size=500)
    (name, part), *_ = parts.items()
    with HubServer() as server:
        sha = server.commit("Owner/code", parts)
        rows = run_client(server, tmp_path, script, sha, name)
        assert rows == pq.ParquetFile(io.BytesIO(part)).read_row_group(3, columns=["repo_path", "files"]).to_pylist()
        assert server.count("tree") == 1
        assert all(request.status == 206 for request in server.requests("resolve"))
        assert 0 < server.bytes_sent(name) < len(part) / 4


def test_refusals_become_the_exceptions_of_the_client(tmp_path):
    script = """
        from huggingface_hub import HfApi, hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError

        def failure(function, *arguments, **options):
            try:
                function(*arguments, repo_type="dataset", **options)
            except HfHubHTTPError as error:
                return type(error).__name__, error.response.status_code

        api = HfApi()
        result = {
            "repository": failure(api.repo_info, "Owner/absent"),
            "owner": failure(api.repo_info, "data"),
            "revision": failure(api.repo_info, "Owner/data", revision="v9"),
            "file": failure(hf_hub_download, "Owner/data", "absent.bin"),
            "gated": failure(hf_hub_download, "Owner/gated", "part.bin"),
        }
    """
    with HubServer() as server:
        server.commit("Owner/data", {"part.bin": b"content"})
        server.commit("Owner/gated", {"part.bin": b"content"})
        server.gate("Owner/gated")
        stranger = run_client(server, tmp_path / "stranger", script)
        known = run_client(server, tmp_path / "known", script, token="hf_known")
        accepted = run_client(server, tmp_path / "accepted", script, token="hf_accepted")
    assert stranger == {
        "repository": ["RepositoryNotFoundError", 401],
        "owner": ["RepositoryNotFoundError", 401],
        "revision": ["RevisionNotFoundError", 404],
        "file": ["RemoteEntryNotFoundError", 404],
        "gated": ["GatedRepoError", 401],
    }
    assert known["repository"] == ["RepositoryNotFoundError", 404]
    assert known["gated"] == ["GatedRepoError", 403]
    assert accepted["gated"] is None


def test_datasets_streams_a_configuration_of_the_card(tmp_path):
    script = """
        from datasets import load_dataset
        rows = load_dataset("Owner/web", "sample-10BT", split="train", streaming=True)
        result = [row["text"] for row in rows]
    """
    sample = fineweb_parts(2, 30, seed=1, row_group_size=10)
    rest = fineweb_parts(1, 30, seed=2, row_group_size=10, folder="data/2024")
    with HubServer() as server:
        card = readme({"default": "data/*/*", "sample-10BT": "sample/10BT/*"})
        server.commit("Owner/web", sample | rest | {"README.md": card})
        texts = run_client(server, tmp_path, script)
    assert texts == [text for part in sample.values() for text in pq.read_table(io.BytesIO(part))["text"].to_pylist()]


def test_what_is_uploaded_comes_back(tmp_path):
    script = """
        from pathlib import Path
        from huggingface_hub import HfApi, snapshot_download
        api, folder = HfApi(), Path(sys.argv[1])
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"weights" * 1000)
        (folder / "README.md").write_text("# A model")
        (folder / "old.txt").write_text("goes")
        for _ in range(2):
            api.create_repo("Owner/model", exist_ok=True)
            api.upload_folder(repo_id="Owner/model", folder_path=folder)
        api.create_tag("Owner/model", tag="step-10")
        api.create_branch("Owner/model", branch="trial")
        api.delete_file("old.txt", "Owner/model")
        refs = api.list_repo_refs("Owner/model")
        copy = Path(snapshot_download("Owner/model", revision="main"))
        result = {
            "files": {path.name: path.read_text() for path in copy.iterdir()},
            "tags": {tag.name: tag.target_commit for tag in refs.tags},
            "branches": [branch.name for branch in refs.branches],
            "commits": [commit.commit_id for commit in api.list_repo_commits("Owner/model")],
            "user": api.whoami()["name"],
        }
    """
    with HubServer() as server:
        result = run_client(server, tmp_path, script, str(tmp_path / "upload"), token="hf_any")
        assert result["files"] == {"model.safetensors": "weights" * 1000, "README.md": "# A model"}
        assert result["commits"][0] == server.repo("Owner/model", "model").branches["main"]
        assert result["tags"] == {"step-10": result["commits"][1]}
        assert result["branches"] == ["main", "trial"]
        # The second upload finds the weights there.
        assert server.count("lfs-put") == 1
