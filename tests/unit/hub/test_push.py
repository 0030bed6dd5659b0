"""`anabatic push` to both hubs: what is uploaded can be fetched again, nothing else leaves the machine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from anabatic.config.export import PushJob
from anabatic.config.loading import command_table, settings
from anabatic.config.sft import SftJob
from anabatic.core.errors import AnabaticError, ConfigError, DataError
from anabatic.hub import model_download
from anabatic.hub.model_download import Hub as HubName
from anabatic.recipes.export import push
from anabatic.recipes.export.model_card import CardFacts, build_model_card
from unit.hub.hub_server import serving
from unit.hub.push_server import PushHandler, PushHub

VISIBILITY = {"huggingface": "visibility", "modelscope": "Visibility"}
PREFIX = {"huggingface": "hf", "modelscope": "ms"}
# Of the HTTP library of huggingface_hub.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
BOTH = pytest.mark.parametrize("which", model_download.HUBS)
WEIGHTS = bytes(range(256)) * 40


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[PushHub]:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    with serving(PushHub({}, token="secret"), PushHandler) as made:
        assert isinstance(made, PushHub)
        monkeypatch.setenv("HF_ENDPOINT", made.url)
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", made.url)
        monkeypatch.setenv("HF_TOKEN", "secret")
        monkeypatch.setenv("MODELSCOPE_API_TOKEN", "secret")
        monkeypatch.setenv("MODELSCOPE_CREDENTIALS_PATH", "/nonexistent")
        yield made


def write(path: Path, content: str | bytes | dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, dict):
        content = json.dumps(content)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "exported"
    write(
        folder / "config.json",
        {"model_type": "qwen3", "_name_or_path": "/data/me/secret", "architectures": ["Qwen3ForCausalLM"]},
    )
    write(folder / "tokenizer.json", {"version": "1.0"})
    write(folder / "tokenizer_config.json", {"eos_token": "x"})
    write(folder / "model.safetensors", WEIGHTS)
    write(folder / "LICENSE", "the terms")
    write(folder / "serving" / "vllm-ascend.sh", "vllm serve")
    for name in ("optimizer.pt", "rank-0.log", "config.yaml", ".env", "secret/model.safetensors", "notes.md"):
        write(folder / name, "stays here")
    return folder


def make_run(root: Path, base: str, **more: Any) -> Path:
    tree = settings.default_tree(SftJob) | {"model": base, "tuner": "lora", **more}
    tree["data"] |= {"train": ["/data/me/private/chats.jsonl#50", "hf:acme/chats:train@0.5"]}
    tree["optim"] |= {"lr": 0.0003}
    write(root / "config.yaml", yaml.safe_dump(tree))
    rows = [
        {"kind": "train", "step": 1200, "loss": 1.0},
        {"kind": "eval", "step": 800, "valid_loss": 1.125, "valid_accuracy": 0.5},
        {"kind": "eval", "step": 1200, "valid_loss": 1.25, "valid_accuracy": 0.75},
    ]
    write(root / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    write(
        root / "summary.json",
        {"finished": True, "steps": 1200, "tokens": 5_000_000, "valid_loss": 1.25, "params": 7, "device": "910B"},
    )
    record = {"hf:acme/chats:train": {"commit": "0123456789" * 4, "license": "mit", "split": "train"}}
    write(root / "datasets.json", record)
    write(root / "final_model" / "adapter_config.json", {"peft_type": "LORA", "r": 16, "base_model_name_or_path": base})
    write(root / "final_model" / "adapter_model.safetensors", WEIGHTS)
    write(root / "final_model" / "tokenizer.json", {"version": "1.0"})
    return root


def read_metadata(card: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(card.split("---\n")[1])
    return found


@BOTH
def test_what_is_pushed_is_what_is_fetched(which: HubName, served: PushHub, model: Path) -> None:
    job = PushJob(model=str(model), to=f"{PREFIX[which]}:acme/tiny", license="apache-2.0", message="the first")
    assert push.run(job) == 0
    expected = {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors", "LICENSE", "README.md"}
    assert set(served.files) - {".gitattributes"} == expected | {"serving/vllm-ascend.sh"}
    assert b"stays here" not in b"".join(served.files.values()) and b"/data/me" not in b"".join(served.files.values())
    assert served.commits[0][1].startswith("the first") and served.stored == 1
    assert served.created[VISIBILITY[which]] in ("private", 1)
    folder = model_download.fetch_model("acme/tiny", which)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert read_metadata(served.files["README.md"].decode())["license"] == "apache-2.0"
    assert (model / "config.json").read_text().find("/data/me/secret") > 0  # the folder itself is as it was
    assert push.run(job) == 0 and served.stored == 1  # nothing is sent twice


@BOTH
def test_public_and_a_branch(which: HubName, served: PushHub, model: Path) -> None:
    served.branches.add("v2")
    push.run(PushJob(model=str(model), to=f"{PREFIX[which]}:acme/tiny", license="mit", private=False, revision="v2"))
    assert served.commits[0][0] == "v2"
    assert served.created[VISIBILITY[which]] in ("public", 5)


@BOTH
@pytest.mark.parametrize("part", ["create", "batch", "blobs", "commit"])
@pytest.mark.parametrize("status", [401, 403, 400, 413])
def test_refusals_say_what_to_do(which: HubName, part: str, status: int, served: PushHub, model: Path) -> None:
    if which == "modelscope" and part == "create":
        part = "/api/v1/models"
    served.refuse[part] = status
    with pytest.raises(AnabaticError) as caught:
        push.run(PushJob(model=str(model), to=f"{PREFIX[which]}:acme/tiny", license="mit"))
    assert "acme/tiny" in str(caught.value) and caught.value.hint
    assert not served.commits
    del served.refuse[part]
    assert push.run(PushJob(model=str(model), to=f"{PREFIX[which]}:acme/tiny", license="mit")) == 0


@BOTH
def test_without_a_token(which: HubName, served: PushHub, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.delenv("MODELSCOPE_API_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(model / "none"))
    with pytest.raises(ConfigError, match="token") as caught:
        push.run(PushJob(model=str(model), to=f"{PREFIX[which]}:acme/tiny", license="mit"))
    assert "TOKEN" in caught.value.hint


@pytest.mark.process
@BOTH
def test_nobody_answers(which: HubName, model: Path, served: PushHub, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_ENDPOINT", "MODELSCOPE_ENDPOINT"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with pytest.raises(DataError, match="127.0.0.1:9"):
        push.run(PushJob(model=str(model), to=f"{PREFIX[which]}:acme/tiny", license="mit"))


def test_modelscope_creates_nothing_without_a_license(served: PushHub, model: Path) -> None:
    with pytest.raises(ConfigError, match="license"):
        push.run(PushJob(model=str(model), to="ms:acme/tiny"))
    assert not served.exists and not served.commits


def test_an_adapter_of_a_run(served: PushHub, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "Qwen/Qwen2.5-0.5B")
    push.run(PushJob(model=str(run), to="acme/tiny"))
    card = served.files["README.md"].decode()
    assert read_metadata(card) == {
        "base_model": "Qwen/Qwen2.5-0.5B",
        "base_model_relation": "adapter",
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "datasets": ["acme/chats"],
        "tags": ["anabatic", "sft", "lora"],
    }
    assert "Data: chats.jsonl; acme/chats (split train, commit 012345678901, license mit)" in card
    assert (
        "after step 1,200" in card and "| validation loss | 1.25 |" in card and "| validation accuracy | 0.75 |" in card
    )
    assert "adapter | rank 16" in card and "1,200 steps, 5.0M tokens" in card
    assert re.search(r"optim:\n  lr: 0.0003\n", card) and "/data/me" not in card


@pytest.mark.parametrize(
    ("named", "base"),
    [
        ("{cache}/models--Qwen--Qwen2.5-0.5B/snapshots/0123", "Qwen/Qwen2.5-0.5B"),
        ("{cache}/my-base", ""),
    ],
)
def test_an_adapter_for_a_folder_of_this_machine(named: str, base: str, served: PushHub, tmp_path: Path) -> None:
    folder = named.format(cache=tmp_path)
    Path(folder).mkdir(parents=True)
    run = make_run(tmp_path / "run", folder)
    if not base:
        with pytest.raises(ConfigError, match="others do not have"):
            push.run(PushJob(model=str(run), to="acme/tiny"))
        assert not served.asked
        base = "acme/base"
    push.run(PushJob(model=str(run), to="acme/tiny", base_model=base if base == "acme/base" else None))
    assert json.loads(served.files["adapter_config.json"])["base_model_name_or_path"] == base
    assert str(tmp_path).encode() not in b"".join(served.files.values())
    assert json.loads((run / "final_model" / "adapter_config.json").read_text())["base_model_name_or_path"] == folder


def test_a_card_that_is_there_is_kept(served: PushHub, model: Path) -> None:
    write(model / "README.md", "# mine")
    push.run(PushJob(model=str(model), to="acme/tiny"))
    assert served.files["README.md"] == b"# mine"


def test_a_dry_run_asks_nobody(served: PushHub, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert push.run(PushJob(model=str(model), to="acme/tiny", dry_run=True)) == 0
    shown = capsys.readouterr().out
    assert "model.safetensors" in shown and "library_name: transformers" in shown and "optimizer.pt" not in shown
    assert not served.asked


@pytest.mark.parametrize("damage", ["config.yaml", "summary.json", "datasets.json", "final_model/adapter_config.json"])
@pytest.mark.parametrize("content", [b"\xff\xfe", b"{torn", b"[1, 2]"])
def test_damaged_files_are_named(damage: str, content: bytes, served: PushHub, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "Qwen/Qwen2.5-0.5B")
    (run / damage).write_bytes(content)
    try:
        push.run(PushJob(model=str(run), to="acme/tiny"))
    except AnabaticError as error:
        assert Path(damage).name in str(error)
        assert not served.asked
    else:
        assert damage in ("summary.json", "datasets.json") and content.startswith(b"[")  # says nothing, harms nothing


def test_no_weights(served: PushHub, model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(DataError, match="no weights"):
        push.run(PushJob(model=str(model), to="acme/tiny"))
    assert not served.asked


@pytest.mark.parametrize("where", ["nothing", "empty", "file"])
def test_no_model(where: str, served: PushHub, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write(tmp_path / "file", "x")
    with pytest.raises(AnabaticError, match=where):
        push.run(PushJob(model=str(tmp_path / where), to="acme/tiny"))
    assert not served.asked


@pytest.mark.parametrize(
    "wrong",
    [
        {"to": "tiny"},
        {"to": "gh:acme/tiny"},
        {"to": "acme/tiny/more"},
        {"to": "../tiny"},
        {"to": "acme/ti ny"},
        {"to": ""},
        {"model": ""},
        {"base_model": "/home/base"},
        {"license": "free\nfor: all"},
        {"revision": "-x"},
    ],
)
def test_wrong_settings(wrong: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        PushJob(**{"model": "runs/mine", "to": "acme/tiny", **wrong})


def test_a_card_without_a_run_and_of_every_kind() -> None:
    for hub in model_download.HUBS:
        for is_adapter in (False, True):
            card = build_model_card(CardFacts("acme/tiny", hub, "a/b" if is_adapter else "", is_adapter))
            metadata = read_metadata(card)
            assert metadata["library_name"] == ("peft" if is_adapter else "transformers")
            code = card.split("```python\n")[1].split("```")[0]
            compile(code, "card", "exec")
            assert ("modelscope" in code) == (hub == "modelscope") and "## Training" not in card


def test_the_command_of_a_run_is_known_by_its_settings() -> None:
    find_command = command_table.find_training_command
    for name in ("sft", "dpo", "pretrain", "rl", "reward"):
        tree = settings.default_tree(command_table.COMMANDS[name].import_job_class())
        found = find_command(tree)
        assert found is not None and found.name == name
    assert find_command({}) is None and find_command({"model": "x"}) is None


def test_the_results_are_those_of_the_model_that_is_pushed(served: PushHub, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "Qwen/Qwen2.5-0.5B")
    (run / "final_model").rename(run / "best_model")
    summary = json.loads((run / "summary.json").read_text()) | {"best_step": 800}
    write(run / "summary.json", summary)
    push.run(PushJob(model=str(run), to="acme/tiny"))
    card = served.files["README.md"].decode()
    assert "after step 800" in card and "| validation loss | 1.125 |" in card and "1.25 |" not in card


def test_no_folder_of_the_machine_is_in_the_settings_of_a_card(served: PushHub, tmp_path: Path) -> None:
    template, folder = "/data/me/chat.jinja", f"{tmp_path}/secret"
    run = make_run(tmp_path / "run", "Qwen/Qwen2.5-0.5B", chat_template=template)
    tree = yaml.safe_load((run / "config.yaml").read_text())
    tree["parallel"]["deepspeed"] = f"{folder}/ds.json"
    tree["lora"]["modules_to_save"] = ["embed_tokens"]
    write(run / "config.yaml", yaml.safe_dump(tree))
    push.run(PushJob(model=str(run), to="acme/tiny"))
    card = served.files["README.md"].decode()
    assert "chat_template: chat.jinja" in card and "deepspeed: ds.json" in card and "- embed_tokens" in card
    assert "/data/me" not in card and str(tmp_path) not in card


@pytest.mark.parametrize("base", ["runs/base", "./base", "saves/base"])
def test_a_relative_folder_is_no_name_of_a_hub(base: str, served: PushHub, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", base)
    with pytest.raises(ConfigError, match="others do not have"):
        push.run(PushJob(model=str(run), to="acme/tiny"))


def test_a_continued_pretraining_names_its_base(served: PushHub, model: Path) -> None:
    job_class = command_table.COMMANDS["pretrain"].import_job_class()
    tree = settings.default_tree(job_class)
    tree["model"]["path"] = "acme/base"
    write(model.parent / "config.yaml", yaml.safe_dump(tree))
    model.rename(model.parent / "final_model")
    push.run(PushJob(model=str(model.parent), to="acme/tiny"))
    metadata = read_metadata(served.files["README.md"].decode())
    assert (metadata["base_model"], metadata["base_model_relation"]) == ("acme/base", "finetune")


def test_data_sets_of_the_other_hub_are_no_metadata() -> None:
    config = {"data": {"train": ["ms:acme/chats", "hf:acme/more", "a.jsonl#5@0.5"]}}
    for hub, expected in (("huggingface", ["acme/more"]), ("modelscope", ["acme/chats"])):
        card = build_model_card(CardFacts("acme/tiny", hub, config=config))  # type: ignore[arg-type]
        assert read_metadata(card)["datasets"] == expected and "Data: acme/chats; acme/more; a.jsonl\n" in card


def test_weights_are_not_copied(served: PushHub, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def look(target: object, folder: Path, message: str) -> None:
        seen.append((folder / "model.safetensors").is_symlink())

    monkeypatch.setattr(push.model_upload, "upload_model", look)
    push.run(PushJob(model=str(model), to="acme/tiny"))
    assert seen == [True]
