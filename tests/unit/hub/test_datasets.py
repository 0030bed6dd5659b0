"""Data sets by name, from both hubs: what is downloaded, from which commit, and what is said when that fails."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from anabatic.config.data_commands import DataPreviewJob
from anabatic.config.sections.common import Data
from anabatic.core.errors import DataError, Failure
from anabatic.data.readers import sources
from anabatic.hub import datasets
from anabatic.hub.dataset_name import Scheme, parse_name
from anabatic.recipes.data_preview import preview_sources
from anabatic_testing.multiprocess import find_free_port
from unit.hub.hub_server import Hub, serving

README = """---
license: apache-2.0
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*
  - split: test
    path: data/test.jsonl
- config_name: small
  data_files: small.csv
---
# Rows
"""


def _rows(first: int, count: int) -> bytes:
    return b"".join(json.dumps({"text": f"row {first + index}"}).encode() + b"\n" for index in range(count))


FILES = {
    "README.md": README.encode(),
    "data/train-a.jsonl": _rows(0, 40),
    "data/train-b.jsonl": _rows(40, 60),
    "data/test.jsonl": _rows(1000, 5),
    "small.csv": b"text\nsmall 1\nsmall 2\n",
    "images/cat.png": b"not text",
}
BOTH = pytest.mark.parametrize("scheme", ["hf", "ms"])


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving(Hub(dict(FILES), "acme/rows", lfs={"data/train-b.jsonl"})) as made:
        monkeypatch.setenv("HF_ENDPOINT", made.url)
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", made.url)
        yield made


def read(spec: str) -> list[str]:
    """Read the texts of a source as a process that has just started does."""
    datasets._resolved.clear()
    datasets._logged.clear()
    found = sources.read_documents(sources.parse_source(spec), Data(train=[spec]))
    return [document.text or "" for document in found]


@BOTH
def test_a_split_is_read_in_order_and_only_its_files_are_downloaded(scheme: Scheme, served: Hub) -> None:
    assert read(f"{scheme}:acme/rows") == [f"row {index}" for index in range(100)]
    assert served.got() == ["README.md", "train-a.jsonl", "train-b.jsonl"]
    assert read(f"{scheme}:acme/rows:test") == [f"row {index}" for index in range(1000, 1005)]
    assert read(f"{scheme}:acme/rows/small") == ["small 1", "small 2"]


@BOTH
def test_a_file_is_downloaded_when_its_turn_comes(scheme: Scheme, served: Hub) -> None:
    assert read(f"{scheme}:acme/rows#30") == [f"row {index}" for index in range(30)]
    assert served.got() == ["README.md", "train-a.jsonl"]


@BOTH
def test_what_is_in_the_cache_is_not_downloaded_again(scheme: Scheme, served: Hub) -> None:
    first = read(f"{scheme}:acme/rows")
    served.asked.clear()
    assert read(f"{scheme}:acme/rows") == first
    assert served.got() == []
    pinned = sources.resolve_hub_source(sources.parse_source(f"{scheme}:acme/rows")).name
    served.asked.clear()
    assert read(str(pinned)) == first
    assert served.asked == []  # a commit never changes


@BOTH
def test_offline_the_cache_is_enough(scheme: Scheme, served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    first = read(f"{scheme}:acme/rows")
    served.asked.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert read(f"{scheme}:acme/rows") == first
    with pytest.raises(DataError, match="not .*in the cache, and HF_HUB_OFFLINE is set") as caught:
        read(f"{scheme}:acme/rows:test")
    assert "unset HF_HUB_OFFLINE" in caught.value.hint
    with pytest.raises(DataError, match="not in the cache, and HF_HUB_OFFLINE is set"):
        read(f"{scheme}:acme/other")
    assert served.asked == []


@BOTH
def test_a_recorded_commit_gives_the_same_rows_after_the_branch_moved(scheme: Scheme, served: Hub) -> None:
    first = read(f"{scheme}:acme/rows:test")
    pinned = sources.resolve_hub_source(sources.parse_source(f"{scheme}:acme/rows:test")).name
    assert pinned.is_pinned and parse_name(str(pinned)) == pinned
    served.files["data/test.jsonl"] = _rows(7, 5)
    served.commit = "f" * 40
    assert read(str(pinned)) == first
    assert read(f"{scheme}:acme/rows:test") == [f"row {index}" for index in range(7, 12)]


def test_modelscope_says_that_a_recorded_revision_is_gone(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    read("ms:acme/rows:test")
    pinned = sources.resolve_hub_source(sources.parse_source("ms:acme/rows:test")).name
    served.files["data/test.jsonl"] = _rows(7, 5)
    monkeypatch.setenv("ANABATIC_CACHE", str(Path(served.url).name))
    with pytest.raises(DataError, match="was recorded with the files .* and now has others") as caught:
        read(str(pinned))
    assert "leave out ~" in caught.value.hint


@BOTH
def test_license_and_size_are_logged_once(scheme: Scheme, served: Hub, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="anabatic"):
        read(f"{scheme}:acme/rows:test")
    lines = [line for line in caplog.text.splitlines() if "license apache-2.0" in line]
    assert len(lines) == 1 and "1 file, 105 B" in lines[0]


@BOTH
def test_a_preview_needs_the_first_file_alone(
    scheme: Scheme, served: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free = len(FILES["data/train-a.jsonl"]) + 10
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=free, used=0, free=free))
    with pytest.raises(Failure, match="are free"):
        read(f"{scheme}:acme/rows")
    (shown,) = preview_sources(DataPreviewJob(inputs=[f"{scheme}:acme/rows"], rows=40))
    assert [row.segments[0].text for row in shown.rows] == [f"row {index}" for index in range(40)]
    assert served.got() == ["README.md", "train-a.jsonl"]
    with caplog.at_level("WARNING", logger="anabatic"):
        (shown,) = preview_sources(DataPreviewJob(inputs=[f"{scheme}:acme/rows/small"], rows=5))
    assert len(shown.rows) == 2 and not caplog.text  # nobody has asked for five rows of it
    with pytest.raises(Failure, match="are free"):
        preview_sources(DataPreviewJob(inputs=[f"{scheme}:acme/rows"], rows=41))


def test_the_license_of_a_conversion_is_that_of_the_card(served: Hub) -> None:
    served.files = {"README.md": README.encode(), "default/test/0000.parquet": b""}
    datasets._resolved.clear()
    converted = datasets.resolve_dataset(parse_name("hf:acme/rows@refs/convert/parquet"))
    assert (converted.license, [file.path for file in converted.files]) == (
        "apache-2.0",
        ["default/test/0000.parquet"],
    )


@BOTH
def test_a_check_logs_nothing(scheme: Scheme, served: Hub, caplog: pytest.LogCaptureFixture) -> None:
    datasets._resolved.clear()
    datasets._logged.clear()
    source = sources.parse_source(f"{scheme}:acme/rows:test")
    with caplog.at_level("INFO", logger="anabatic"):
        sources.resolve_hub_source(source, is_check=True)
        assert "license" not in caplog.text
        sources.resolve_hub_source(source)
        sources.resolve_hub_source(source)
    assert caplog.text.count("license apache-2.0") == 1


@pytest.mark.process
@BOTH
def test_a_cut_download_is_continued(scheme: Scheme, served: Hub) -> None:
    served.cut_once = {"data/train-a.jsonl", "data/train-b.jsonl"}
    assert len(read(f"{scheme}:acme/rows")) == 100


@pytest.mark.process
@BOTH
def test_a_download_that_always_breaks_off_leaves_nothing_half(scheme: Scheme, served: Hub) -> None:
    served.cut = "data/test.jsonl"
    with pytest.raises(DataError, match=r"acme/rows: the download .*broke off") as caught:
        read(f"{scheme}:acme/rows:test")
    assert "start again" in caught.value.hint
    served.cut = ""
    assert len(read(f"{scheme}:acme/rows:test")) == 5


@BOTH
@pytest.mark.parametrize("path", ["data/train-a.jsonl", "data/train-b.jsonl"])
def test_a_wrong_byte_is_found_and_not_kept(scheme: Scheme, path: str, served: Hub) -> None:
    served.spoilt = path
    with pytest.raises(DataError, match=rf"download of {path} from .* broke off: its checksum is another"):
        read(f"{scheme}:acme/rows")
    served.spoilt = ""
    assert len(read(f"{scheme}:acme/rows")) == 100


@BOTH
def test_a_hub_that_is_busy_is_asked_again(scheme: Scheme, served: Hub) -> None:
    served.failing = 1
    assert len(read(f"{scheme}:acme/rows:test")) == 5


@BOTH
def test_a_hub_that_is_down(scheme: Scheme, served: Hub) -> None:
    served.status = 500
    with pytest.raises(DataError, match="acme/rows: http://127.* answers 500") as caught:
        read(f"{scheme}:acme/rows")
    assert "try again later" in caught.value.hint


@BOTH
def test_no_connection(scheme: Scheme, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"http://127.0.0.1:{find_free_port()}"
    monkeypatch.setenv("HF_ENDPOINT", url)
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", url)
    with pytest.raises(DataError, match=rf"acme/rows: .*{url} cannot be reached") as caught:
        read(f"{scheme}:acme/rows")
    assert "mirror" in caught.value.hint


@BOTH
@pytest.mark.parametrize("status", [401, 403])
def test_a_data_set_behind_terms(scheme: Scheme, status: int, served: Hub) -> None:
    served.status, served.headers = status, {"X-Error-Code": "GatedRepo"}
    with pytest.raises(DataError, match="acme/rows: http://.* gives it only to those who have") as caught:
        read(f"{scheme}:acme/rows")
    assert f"{served.url}/datasets/acme/rows" in caught.value.hint
    assert ("HF_TOKEN" if scheme == "hf" else "MODELSCOPE_API_TOKEN") in caught.value.hint


@BOTH
def test_a_token_opens_it_and_is_not_sent_elsewhere(
    scheme: Scheme, served: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.token, served.headers = "secret-1", {"X-Error-Code": "GatedRepo"}
    monkeypatch.setenv("HF_TOKEN", "secret-1")
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", "secret-1")
    assert len(read(f"{scheme}:acme/rows")) == 100
    assert set(served.tokens) == {""}


@BOTH
def test_a_name_that_nobody_knows(scheme: Scheme, served: Hub) -> None:
    served.headers = {"X-Error-Code": "RepoNotFound"}
    with pytest.raises(DataError, match="acme/other: not a data set.* of http://127") as caught:
        read(f"{scheme}:acme/other")
    assert "spelling" in caught.value.hint


def test_a_revision_that_is_not_there(served: Hub) -> None:
    with pytest.raises(DataError, match='acme/rows has no revision "mian". Did you mean "main"') as caught:
        read("hf:acme/rows@mian:test")
    assert "branches and tags: main" in caught.value.hint


@BOTH
def test_a_subset_or_split_that_is_not_there(scheme: Scheme, served: Hub) -> None:
    with pytest.raises(DataError, match='has no split "tset". Did you mean "test"') as caught:
        read(f"{scheme}:acme/rows:tset")
    assert caught.value.hint == "its splits: train, test"
    with pytest.raises(DataError, match='has no subset "smal". Did you mean "small"') as caught:
        read(f"{scheme}:acme/rows/smal")
    assert caught.value.hint == "its subsets: default, small"


@pytest.mark.parametrize("path", ["../a.jsonl", "/etc/a.jsonl", "a/../../a.jsonl", "..\\a.jsonl", "C:/a.jsonl"])
@BOTH
def test_a_path_out_of_the_folder_is_refused(scheme: Scheme, path: str, served: Hub) -> None:
    served.files[path] = b"{}"
    with pytest.raises(DataError, match="lists the path"):
        read(f"{scheme}:acme/rows")


@BOTH
def test_a_list_of_several_pages(scheme: Scheme, served: Hub) -> None:
    served.files |= {f"more/{number:04d}.png": b"" for number in range(450)}
    served.page_size = 100
    assert len(read(f"{scheme}:acme/rows:test")) == 5


def test_something_else_that_answers(served: Hub) -> None:
    served.page = b"<html>Welcome</html>"
    with pytest.raises(DataError, match="does not answer as ModelScope does"):
        read("ms:acme/rows")


@BOTH
def test_a_disk_that_is_too_small(scheme: Scheme, served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    name = parse_name(f"{scheme}:acme/rows")
    snapshot = datasets.resolve_dataset(name)
    huge = datasets.HubFile("data/huge.jsonl", 2**60, "")
    with pytest.raises(Failure, match="needs 1048576.0 TiB, but .* are free"):
        list(datasets.iter_local_files(datasets.DatasetSnapshot(snapshot.name, (*snapshot.files, huge))))
    assert served.got() == ["README.md"]
