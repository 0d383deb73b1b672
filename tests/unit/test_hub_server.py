"""The test Hub as a plain HTTP client sees it: revisions, ranges, every fault, exact counts, and a clean end."""

import http.client
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
import urllib.error
import urllib.request
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.hub_server import FOREVER, HubServer, fineweb_parts, stack_parts

ROOT = Path(__file__).parents[2]
FILE = bytes(range(256)) * 4
PATH = "/datasets/Owner/data/resolve/main/part.bin"

_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@pytest.fixture
def hub():
    with HubServer() as server:
        server.commit("Owner/data", {"part.bin": FILE})
        yield server


def fetch(url: str, *, method: str = "GET", data: bytes | None = None, timeout: float = 5, **headers: str):
    """Status, headers and body, also of refusals. Raises for a broken connection and after `timeout`."""
    request = urllib.request.Request(url, data, headers, method=method)
    try:
        with _opener.open(request, timeout=timeout) as response:
            return response.status, response.headers, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read()


def test_uploading_takes_a_token(hub):
    status, _, _ = fetch(f"{hub.url}/api/repos/create", method="POST", data=b'{"name": "model"}')
    assert status == 401


def test_a_commit_upon_another_parent_is_refused(hub):
    header = json.dumps({"key": "header", "value": {"summary": "late", "parentCommit": "0" * 40}}).encode()
    url = f"{hub.url}/api/datasets/Owner/data/commit/main"
    status, _, _ = fetch(url, method="POST", data=header, Authorization="Bearer hf_any")
    assert status == 412


def test_an_old_revision_stays_when_main_moves(hub):
    first = hub.repo("Owner/data").branches["main"]
    hub.tag("Owner/data", "v1")
    second = hub.commit("Owner/data", {"part.bin": b"new", "more.bin": b"more"})
    bodies = {
        revision: fetch(f"{hub.url}/datasets/Owner/data/resolve/{revision}/part.bin")[2]
        for revision in ("main", "v1", first, second)
    }
    assert bodies == {"main": b"new", "v1": FILE, first: FILE, second: b"new"}
    hub.commit("Owner/data", {"part.bin": None})
    assert fetch(hub.url + PATH)[0] == 404
    assert [record.status for record in hub.requests("resolve")] == [200, 200, 200, 200, 404]


@pytest.mark.parametrize(
    ("asked", "status", "body", "content_range"),
    [
        ("bytes=10-19", 206, FILE[10:20], "bytes 10-19/1024"),
        ("bytes=1000-", 206, FILE[1000:], "bytes 1000-1023/1024"),
        ("bytes=-8", 206, FILE[-8:], "bytes 1016-1023/1024"),
        ("bytes=1000-5000", 206, FILE[1000:], "bytes 1000-1023/1024"),
        ("bytes=1024-2000", 416, b"", "bytes */1024"),
    ],
)
def test_ranges(hub, asked, status, body, content_range):
    got_status, headers, got = fetch(hub.url + PATH, Range=asked)
    assert (got_status, got, headers["Content-Range"]) == (status, body, content_range)


def test_head_tells_size_and_revision_and_sends_nothing(hub):
    status, headers, body = fetch(hub.url + PATH, method="HEAD")
    assert (status, headers["Content-Length"], body) == (200, "1024", b"")
    assert headers["X-Repo-Commit"] == hub.repo("Owner/data").branches["main"]
    assert (hub.count("resolve", method="HEAD"), hub.bytes_sent()) == (1, 0)


def test_a_file_on_disk_is_served_without_reading_it_whole(hub, tmp_path):
    path = tmp_path / "huge.bin"
    with open(path, "wb") as file:
        file.seek((1 << 34) - 4)
        file.write(b"last")
    tracemalloc.start()
    try:
        hub.commit("Owner/data", {"huge.bin": path})
        tree = json.loads(fetch(f"{hub.url}/api/datasets/Owner/data/tree/main")[2])
        body = fetch(f"{hub.url}/datasets/Owner/data/resolve/main/huge.bin", Range=f"bytes={(1 << 34) - 6}-")[2]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert {entry["path"]: entry["size"] for entry in tree} == {"huge.bin": 1 << 34, "part.bin": 1024}
    assert body == b"\0\0last"
    assert peak < 1 << 22


def test_an_error_status_carries_retry_after_and_ends_after_its_times(hub):
    fault = hub.fault("resolve", do="status", status=429, retry_after=7, times=2)
    answers = [fetch(hub.url + PATH) for _ in range(3)]
    assert [status for status, _, _ in answers] == [429, 429, 200]
    assert answers[0][1]["Retry-After"] == "7"
    assert fault.hits == 2
    assert [record.fault for record in hub.requests()] == ["status", "status", None]


def test_a_fault_can_begin_late_and_last_for_ever(hub):
    hub.fault(r"part\.bin", do="status", status=503, after=2, times=FOREVER)
    assert [fetch(hub.url + PATH)[0] for _ in range(5)] == [200, 200, 503, 503, 503]
    hub.faults.clear()
    assert fetch(hub.url + PATH)[0] == 200


def test_a_kind_is_no_pattern(hub):
    hub.fault("info", do="status")
    hub.commit("Owner/info", {"info.txt": b"calm"})
    assert fetch(f"{hub.url}/datasets/Owner/info/resolve/main/info.txt")[0] == 200
    assert fetch(f"{hub.url}/api/datasets/Owner/info")[0] == 500


def test_a_missing_part(hub):
    hub.fault("resolve", do="missing")
    status, headers, _ = fetch(hub.url + PATH)
    assert (status, headers["X-Error-Code"]) == (404, "EntryNotFound")


def test_a_cut_ends_the_connection_within_the_body(hub):
    hub.fault("resolve", do="cut", at=0.25)
    assert fetch(hub.url + PATH, method="HEAD")[0] == 200
    with pytest.raises(http.client.IncompleteRead) as cut:
        fetch(hub.url + PATH, Range="bytes=100-299")
    assert cut.value.partial == FILE[100:150]
    assert fetch(hub.url + PATH)[2] == FILE


def test_a_stall_outlasts_the_patience_of_a_client(hub):
    hub.fault("resolve", do="stall", seconds=30)
    with pytest.raises(TimeoutError):
        fetch(hub.url + PATH, timeout=0.7)
    hub.fault("resolve", do="stall_body", seconds=30)
    with pytest.raises(TimeoutError):
        fetch(hub.url + PATH, timeout=0.7)
    assert hub.bytes_sent() == len(FILE) // 2


def test_a_stall_ends(hub):
    hub.fault("resolve", do="stall", seconds=0.3)
    hub.fault("resolve", do="stall_body", seconds=0.3)
    start = time.monotonic()
    assert fetch(hub.url + PATH)[2] == fetch(hub.url + PATH)[2] == FILE
    assert time.monotonic() - start >= 0.6


def test_slow_bytes(hub):
    hub.fault("resolve", do="slow", bytes_per_second=2048)
    start = time.monotonic()
    assert fetch(hub.url + PATH)[2] == FILE
    assert time.monotonic() - start >= 0.4


def test_a_server_that_knows_no_ranges_sends_the_whole_file(hub):
    hub.fault("resolve", do="ignore_range")
    assert fetch(hub.url + PATH)[0] == 200
    status, headers, body = fetch(hub.url + PATH, Range="bytes=100-199")
    assert (status, headers["Content-Range"], body) == (200, None, FILE)


def test_wrong_bytes_look_right(hub):
    hub.fault("resolve", do="wrong_bytes")
    status, headers, body = fetch(hub.url + PATH, Range="bytes=100-199")
    assert (status, headers["Content-Range"], body) == (206, "bytes 100-199/1024", FILE[:100])


def test_a_truncated_file_is_consistently_short(hub):
    hub.fault("resolve", do="truncate", times=FOREVER)
    assert fetch(hub.url + PATH, method="HEAD")[1]["Content-Length"] == "512"
    assert fetch(hub.url + PATH)[2] == FILE[:512]
    assert fetch(hub.url + PATH, Range="bytes=500-600")[1]["Content-Range"] == "bytes 500-511/512"
    assert fetch(hub.url + PATH, Range="bytes=600-700")[0] == 416


def test_an_unknown_fault_names_the_known_ones(hub):
    with pytest.raises(ValueError, match=r"do = 'explode' is not known.*cut"):
        hub.fault("resolve", do="explode")


def test_counts_and_faults_are_exact_under_many_threads(hub):
    fault = hub.fault("resolve", do="status", times=10)
    threads = [threading.Thread(target=lambda: [fetch(hub.url + PATH) for _ in range(10)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (hub.count("resolve"), fault.hits, hub.bytes_sent()) == (80, 10, 70 * len(FILE) + 10 * len(error_body()))


def error_body() -> bytes:
    return json.dumps({"error": "injected fault"}).encode()


def test_closing_waits_for_no_client():
    before = set(threading.enumerate())
    with HubServer() as server:
        server.commit("Owner/data", {"part.bin": bytes(1 << 26)})
        address = ("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
        idle, stalled, deaf = (socket.create_connection(address) for _ in range(3))
        server.fault("stalled", do="stall", seconds=600)
        stalled.sendall(b"GET /stalled HTTP/1.1\r\nHost: x\r\n\r\n")
        deaf.sendall(f"GET {PATH} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        deadline = time.monotonic() + 20
        while server.count() < 2 or server.bytes_sent() == 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        start = time.monotonic()
    assert time.monotonic() - start < 20
    assert set(threading.enumerate()) <= before
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)
    for client in (idle, stalled, deaf):
        client.close()


def test_a_process_of_its_own_obeys_its_administrator(tmp_path):
    folder = tmp_path / "datasets" / "Owner" / "data"
    folder.mkdir(parents=True)
    (folder / "part.bin").write_bytes(FILE)
    faults = json.dumps([{"where": "resolve", "do": "status", "status": 503}])
    command = [sys.executable, "-m", "tests.hub_server", "--folder", str(tmp_path), "--faults", faults]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            url = process.stdout.readline().strip()
            assert [fetch(url + PATH)[0] for _ in range(2)] == [503, 200]
            fault = json.dumps({"where": "tree", "do": "missing"}).encode()
            assert fetch(f"{url}/admin/faults", data=fault, method="POST")[0] == 200
            assert fetch(f"{url}/api/datasets/Owner/data/tree/main")[0] == 404
            assert json.loads(fetch(f"{url}/admin/counts")[2]) == {"resolve": 2, "tree": 1}
            (folder / "part.bin").write_bytes(b"new")
            commit = json.dumps({"repo_id": "Owner/data", "folder": str(folder)}).encode()
            sha = json.loads(fetch(f"{url}/admin/commit", data=commit, method="POST")[2])["sha"]
            assert fetch(f"{url}/datasets/Owner/data/resolve/{sha}/part.bin")[2] == b"new"
            status, _, body = fetch(f"{url}/admin/faults", data=b'{"where": "tree", "do": "x"}', method="POST")
            assert (status, b"is not known" in body) == (400, True)
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 0


def test_generated_documents_are_all_different_and_follow_from_the_seed():
    code = [stack_parts(2, 25, seed, 10) for seed in (0, 1)]
    prose = [fineweb_parts(2, 25, seed, 10) for seed in (0, 1)]
    texts = [text for parts in prose for part in parts.values() for text in column(part, "text")]
    files = [file for parts in code for part in parts.values() for files in column(part, "files") for file in files]
    contents = [file["content"] for file in files if not file["content"].isspace()]
    assert len(set(texts)) == len(texts) == 100
    assert len(set(contents)) == len(contents) > 150
    assert len(contents) < len(files)
    assert any(file["is_vendor"] for file in files)
    assert stack_parts(2, 25, 0, 10) == code[0]
    part = pq.ParquetFile(io.BytesIO(code[0]["data/train-00001-of-00002.parquet"]))
    assert [part.metadata.row_group(group).num_rows for group in range(part.num_row_groups)] == [10, 10, 5]
    assert {"repo_path", "files"} < set(part.schema_arrow.names)
    assert [field.name for field in part.schema_arrow.field("files").type.value_type] == [
        "file_path",
        "content",
        "language",
        "is_vendor",
        "size",
    ]


def column(part: bytes, name: str) -> list:
    return pq.read_table(io.BytesIO(part), columns=[name])[name].to_pylist()
