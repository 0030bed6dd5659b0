"""Models by name, from both hubs: what is fetched, what is refused, and what is said without a connection."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from anabatic.core import paths
from anabatic.core.errors import ConfigError, DataError
from anabatic.hub import model_download
from anabatic.models import pretrained
from anabatic.parallel.world import World, init_world, leave_world
from anabatic_testing.multiprocess import find_free_port, spawn_ranks
from unit.hub.hub_server import Hub, serving

FILES = {
    "config.json": b'{"model_type": "qwen3"}',
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b'{"eos_token": "x"}',
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": bytes(range(256)) * 40,
    "README.md": b"# read me",
    "pytorch_model.bin": b"pickle",
    "training_args.pt": b"pickle",
    "consolidated.safetensors": b"the same again",
    "original/model.safetensors": b"another format",
}
WANTED = sorted(["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "model.safetensors"])
BOTH = pytest.mark.parametrize("which", model_download.HUBS)


@pytest.fixture(autouse=True)
def _hubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    for name in ("HF_HUB_OFFLINE", "ANABATIC_HUB", "USE_MODELSCOPE_HUB", "MODELSCOPE_DOMAIN", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving(Hub(dict(FILES))) as made:
        monkeypatch.setenv("HF_ENDPOINT", made.url)
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", made.url)
        yield made


@BOTH
def test_only_what_is_read_is_fetched_and_only_once(which: model_download.Hub, served: Hub) -> None:
    folder = model_download.fetch_model("acme/tiny", which)
    assert sorted(path.name for path in folder.iterdir() if path.name in FILES) == WANTED
    assert served.got() == WANTED
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    served.asked.clear()
    assert model_download.fetch_model("acme/tiny", which) == folder
    assert served.got() == []


@BOTH
def test_a_changed_file_is_fetched_again(which: model_download.Hub, served: Hub) -> None:
    """Of the same size: the checksum says so. Hugging Face gives another commit for it."""
    model_download.fetch_model("acme/tiny", which)
    if which == "huggingface":
        return
    served.asked.clear()
    served.files["config.json"] = b'{"model_type": "qwen2"}'
    assert (model_download.fetch_model("acme/tiny", which) / "config.json").read_bytes() == served.files["config.json"]
    assert served.got() == ["config.json"]


@BOTH
def test_offline_the_cache_is_enough(which: model_download.Hub, served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    folder = model_download.fetch_model("acme/tiny", which)
    served.asked.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert model_download.fetch_model("acme/tiny", which) == folder
    with pytest.raises(
        DataError, match=r"acme/other: no such folder, .*in the cache, and HF_HUB_OFFLINE is set"
    ) as caught:
        model_download.fetch_model("acme/other", which)
    assert "unset HF_HUB_OFFLINE" in caught.value.hint and "folder" in caught.value.hint
    assert served.asked == []


@BOTH
def test_no_connection(which: model_download.Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"http://127.0.0.1:{find_free_port()}"
    monkeypatch.setenv("HF_ENDPOINT", url)
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", url)
    with pytest.raises(DataError, match=rf"acme/tiny: no such folder.*{url} cannot be reached") as caught:
        model_download.fetch_model("acme/tiny", which)
    assert "HF_ENDPOINT" in caught.value.hint and "mirror" in caught.value.hint


@BOTH
def test_a_name_that_nobody_knows(which: model_download.Hub, served: Hub) -> None:
    if which == "huggingface":
        served.headers = {"X-Error-Code": "RepoNotFound"}
    with pytest.raises(DataError, match="acme/other: neither a folder here nor a model of http://127") as caught:
        model_download.fetch_model("acme/other", which)
    assert "spelling" in caught.value.hint


@BOTH
@pytest.mark.parametrize("status", [401, 403])
def test_a_model_behind_terms(which: model_download.Hub, status: int, served: Hub) -> None:
    served.status, served.headers = status, {"X-Error-Code": "GatedRepo"}
    with pytest.raises(DataError, match="acme/tiny: http://.* gives it only to those who have") as caught:
        model_download.fetch_model("acme/tiny", which)
    assert "HF_TOKEN" in caught.value.hint or "MODELSCOPE_API_TOKEN" in caught.value.hint


@BOTH
def test_a_hub_that_is_down(which: model_download.Hub, served: Hub) -> None:
    served.status = 503
    with pytest.raises(DataError, match="acme/tiny: ") as caught:
        model_download.fetch_model("acme/tiny", which)
    assert "HF_ENDPOINT" in caught.value.hint


@pytest.mark.process
@BOTH
def test_a_download_that_breaks_off_leaves_nothing_half(which: model_download.Hub, served: Hub, tmp_path: Path) -> None:
    served.cut = "model.safetensors"
    with pytest.raises(DataError, match=r"acme/tiny: the download .*from http://.* broke off") as caught:
        model_download.fetch_model("acme/tiny", which)
    assert "start again" in caught.value.hint
    assert not [path for path in tmp_path.rglob("model.safetensors") if path.exists()]
    served.cut = ""
    assert (model_download.fetch_model("acme/tiny", which) / "model.safetensors").read_bytes() == FILES[
        "model.safetensors"
    ]


def test_a_wrong_byte_is_found(served: Hub) -> None:
    served.spoilt = "model.safetensors"
    with pytest.raises(DataError, match=r"download of model.safetensors from .* broke off: its checksum is another"):
        model_download.fetch_model("acme/tiny", "modelscope")


@pytest.mark.parametrize("path", ["../config.json", "/etc/config.json", "a/../../config.json", "..\\config.json"])
def test_a_path_out_of_the_folder_is_refused(path: str, served: Hub) -> None:
    served.files[path] = b"{}"
    with pytest.raises(DataError, match="lists the path"):
        model_download.fetch_model("acme/tiny", "modelscope")


def test_something_else_that_answers(served: Hub) -> None:
    served.page = b"<html>Welcome</html>"
    with pytest.raises(DataError, match="does not answer as ModelScope does"):
        model_download.fetch_model("acme/tiny", "modelscope")


@pytest.mark.parametrize("name", ["acme/tiny", "Qwen/Qwen2.5-0.5B-Instruct", "a/b_c"])
def test_hub_names(name: str) -> None:
    assert paths.is_hub_id(name)


@pytest.mark.parametrize(
    "name", ["./tiny", "../tiny", "/a/b", "~/tiny", "a/b/c", "tiny", "a/", "/a", "a/.b", "a b/c", ""]
)
def test_paths_are_no_hub_names(name: str) -> None:
    assert not paths.is_hub_id(name)


def test_what_is_here_is_no_hub_name(tmp_path: Path, served: Hub) -> None:
    os.chdir(tmp_path)
    (tmp_path / "acme" / "tiny").mkdir(parents=True)
    assert not paths.is_hub_id("acme/tiny")
    with pytest.raises(DataError, match="acme/tiny holds no config.json"):
        pretrained.resolve_model_folder("acme/tiny", "modelscope")
    assert served.asked == []


@BOTH
def test_resolve_takes_names(which: model_download.Hub, served: Hub) -> None:
    assert (pretrained.resolve_model_folder("acme/tiny", which) / "config.json").is_file()


def test_who_chooses_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    assert model_download.resolve_hub() == "huggingface"
    monkeypatch.setenv("USE_MODELSCOPE_HUB", "1")
    assert model_download.resolve_hub() == "modelscope"
    monkeypatch.setenv("ANABATIC_HUB", "huggingface")
    assert model_download.resolve_hub() == "huggingface"
    assert model_download.resolve_hub("modelscope") == "modelscope"
    monkeypatch.setenv("ANABATIC_HUB", "hugingface")
    with pytest.raises(ConfigError, match="ANABATIC_HUB is 'hugingface'"):
        model_download.resolve_hub()


def fetch_together(cache: str) -> None:
    from huggingface_hub import constants

    from anabatic.config.sections.common import DeviceSettings
    from anabatic.device.device import select_device

    constants.HF_HUB_OFFLINE, constants.HF_HUB_CACHE = False, cache
    world: World = init_world(select_device(DeviceSettings(type="cpu")))
    assert world.size == 2
    for which in model_download.HUBS:
        assert (model_download.fetch_model("acme/tiny", which, world) / "model.safetensors").is_file()
    leave_world(world)


@pytest.mark.process
def test_one_process_of_a_node_fetches(served: Hub, tmp_path: Path) -> None:
    spawn_ranks(fetch_together, 2, str(tmp_path / "hf"))
    sent = [one for one in served.asked if one.startswith("FILE")]
    assert sorted(sent) == sorted(f"FILE {name}" for name in 2 * WANTED)
    lists = [one for one in served.asked if "/tree/" in one or one.endswith("/repo/files")]
    assert len(lists) == 2


def test_a_slip_in_a_run_is_told_to_no_hub(tmp_path: Path, served: Hub) -> None:
    os.chdir(tmp_path)
    (tmp_path / "runs" / "tiny").mkdir(parents=True)
    (tmp_path / "runs" / "tiny" / "metrics.jsonl").touch()
    for name in ("runs/tny", "run/tiny", "output/x"):
        assert not paths.is_hub_id(name)
        with pytest.raises(DataError, match="does not exist"):
            pretrained.resolve_model_folder(name)
    assert paths.is_hub_id("run/tiny", "modelscope") and not paths.is_hub_id("runs/tny", "modelscope")
    assert served.asked == []
