import pytest

from tests.hub_server import FOREVER, fineweb_parts, readme, stack_parts
from titan_loom.config.job_config import Data, Source, Streaming
from titan_loom.data.retry import Access
from titan_loom.data.sources import is_on_hub, list_parts, list_sources
from titan_loom.errors import ReadError, UserError

REPO = "Owner/corpus"


def parts_of(streaming: Streaming | None = None, **source):
    return list_parts("web", Source(**{"path": REPO, **source}), Access("web", streaming or Streaming()))


def refuse(match, streaming=None, **source):
    with pytest.raises(UserError, match=match) as raised:
        parts_of(streaming, **source)
    assert "\n" not in str(raised.value)


def names(parts) -> list[str]:
    return [part.name for part in parts.parts]


@pytest.fixture
def corpus(hub):
    """Two configurations in folders, as fineweb-edu has them."""
    sample = fineweb_parts(2, 4, seed=0, row_group_size=4)
    whole = fineweb_parts(3, 4, seed=1, row_group_size=4, folder="data/CC-1")
    card = readme({"default": "data/*/*", "sample-10BT": "sample/10BT/*"})
    hub.commit(REPO, sample | whole | {"README.md": card})
    return hub


def test_what_is_on_the_hub_and_what_is_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "here").mkdir(parents=True)
    assert is_on_hub("HuggingFaceFW/fineweb-edu")
    assert not any(map(is_on_hub, ["owner/here", "./x", "a/b/c", "/a", "embedded:code", "~/x", "../x", ""]))


def test_a_configuration_is_what_the_card_says(corpus):
    assert names(parts_of(config="sample-10BT")) == ["sample/10BT/000_00000.parquet", "sample/10BT/001_00000.parquet"]
    assert corpus.requests("tree")[-1].path.endswith("/sample/10BT")
    assert len(names(parts_of())) == 3
    assert all(part.path.startswith(f"hf://datasets/{REPO}@") for part in parts_of().parts)


def test_without_a_card_the_files_of_the_split(hub):
    parts = stack_parts(2, 4, seed=0, row_group_size=4)
    other = {name.replace("train", "test"): content for name, content in parts.items()}
    hub.commit(REPO, parts | other)
    assert names(parts_of(format="repository")) == sorted(parts)
    assert names(parts_of(format="repository", split="test")) == sorted(other)


def test_a_card_with_splits_and_folders(hub):
    card = (
        b"---\nconfigs:\n- config_name: en\n  data_dir: en\n- config_name: de\n  data_files:\n  - split: train\n"
        b"    path: ['de/a*', 'de/b*']\n  - split: test\n    path: de/t*\n---\n"
    )
    (part,) = fineweb_parts(1, 4, seed=0, row_group_size=4).values()
    files = ["en/x/1.parquet", "de/a1.parquet", "de/b1.parquet", "de/c1.parquet", "de/t1.parquet"]
    hub.commit(REPO, dict.fromkeys(files, part) | {"README.md": card})
    assert names(parts_of(config="en")) == ["en/x/1.parquet"]
    assert names(parts_of(config="de")) == ["de/a1.parquet", "de/b1.parquet"]
    assert names(parts_of(config="de", split="test")) == ["de/t1.parquet"]
    refuse(r"data\.sources\.web\.config is not set; the configurations of Owner/corpus are en, de")
    refuse(r"split = 'dev' is not in Owner/corpus: the splits are train, test", config="de", split="dev")


def test_mistakes_are_one_sentence_that_says_what_to_do(corpus):
    refuse(r"path = 'Owner/corpse' is no local.*shows no dataset of that name: check the spelling", path="Owner/corpse")
    refuse(r"config = 'sample-1BT' is not in Owner/corpus.*are default, sample-10BT", config="sample-1BT")
    refuse(r"revision = 'v9' is no branch, tag or commit of Owner/corpus", revision="v9")
    refuse(r"needs the columns repo_path.*lacks .*repo_path.* and has dump, id", format="repository")
    corpus.commit("Owner/code", {"a.py": b"x = 1\n"})
    refuse(r"'Owner/code' has no parquet or jsonl file", path="Owner/code")


def test_a_gated_dataset(corpus, monkeypatch):
    corpus.gate(REPO)
    refuse(r"path = 'Owner/corpus' is gated: accept its terms at http.*/datasets/Owner/corpus and set HF_TOKEN")
    monkeypatch.setenv("HF_TOKEN", "hf_another")
    refuse(r"is gated")
    monkeypatch.setenv("HF_TOKEN", "hf_accepted")
    assert len(names(parts_of())) == 3


def test_no_network_says_how_to_train_offline(corpus, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    refuse(r"HF_HUB_OFFLINE is set: unset it, or to train offline, give .*embedded:code")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    refuse(r"Hub at http://127\.0\.0\.1:9 cannot be reached .*check the network.*embedded:code.*embedded:prose")


def test_a_repository_is_listed_once_in_its_pages(corpus):
    corpus.hub.page_size = 2
    data = Data(lanes=8, sources={"web": Source(path=REPO)})
    (parts,) = list_sources(data).values()
    # Three files and a folder: two pages. The footers were counted here, for all lanes of all ranks.
    assert corpus.count("tree") == 2
    assert corpus.count("revision") == 1
    assert parts.rows == (4, 4, 4)
    asked = corpus.count()
    assert len(parts.shards(8)) == 8
    assert corpus.count() == asked


def test_a_pinned_commit_is_reused_when_the_branch_has_moved(corpus):
    data = Data(lanes=2, sources={"web": Source(path=REPO)})
    before = list_sources(data)["web"]
    corpus.commit(REPO, fineweb_parts(4, 4, seed=5, row_group_size=4, folder="data/CC-2"))
    assert list_sources(data, {"web": before.commit})["web"] == before
    moved = list_sources(data)["web"]
    assert moved.commit != before.commit and len(moved.parts) == 7


@pytest.mark.parametrize("where", ["revision", "tree", r"README\.md"])
@pytest.mark.parametrize(
    "fault", [{"do": "status"}, {"do": "status", "status": 429, "retry_after": 0}, {"do": "cut"}, {"do": "truncate"}]
)
def test_listing_survives_what_passes(corpus, where, fault):
    expected = parts_of()
    corpus.fault(where, times=2, **fault)
    assert parts_of() == expected


@pytest.mark.parametrize("where", ["revision", "tree"])
def test_listing_ends_with_the_reason_when_it_does_not_pass(corpus, where):
    corpus.fault(where, do="status", status=503, times=FOREVER)
    with pytest.raises(
        ReadError, match=r"data\.sources\.web: the .* of Owner/corpus cannot be read: status 503; it was"
    ):
        parts_of(Streaming(failures_per_hour=3))
    assert corpus.count(where) == 4


def test_listing_does_not_wait_for_ever(corpus):
    expected = parts_of()
    corpus.fault("tree", do="stall")
    corpus.fault("revision", do="stall_body")
    assert parts_of(Streaming(read_timeout_seconds=0.3)) == expected
