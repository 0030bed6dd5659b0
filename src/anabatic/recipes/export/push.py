"""`anabatic push`: upload a model to a hub, with a model card made from its run."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from anabatic.config.export import PushJob
from anabatic.core import extras, json_reader, log, paths
from anabatic.core.errors import ConfigError, DataError
from anabatic.core.formatting import format_size
from anabatic.hub import model_upload
from anabatic.hub.model_download import Hub, resolve_hub
from anabatic.models.lora.adapter_config import ADAPTER_CONFIG_FILE
from anabatic.models.pretrained import resolve_model_folder
from anabatic.recipes.export import model_card
from anabatic.recipes.export.model_folder import LICENSE_PATTERNS

CARD_FILE = "README.md"
UPLOADED = (
    *("*.safetensors", "*.safetensors.index.json", "*.gguf", "*.jinja", "*.model", "merges.txt", "vocab.txt"),
    *("config.json", "adapter_config.json", "generation_config.json", "preprocessor_config.json", "chat_template.json"),
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", CARD_FILE, "Modelfile"),
    *("serving/*", *LICENSE_PATTERNS),
)
"""What belongs to a model. Anything else in the folder (logs, states of optimizers, settings with paths) stays here."""
_HUBS: dict[str, Hub] = {"hf": "huggingface", "ms": "modelscope"}
_CACHED_MODEL = re.compile(r"models--(?P<owner>[\w.-]+?)--(?P<name>[\w.-]+)", re.ASCII)
"""Folder of a model in the cache of huggingface_hub."""


def run(job: PushJob) -> int:
    """Upload as the job says.

    Raises:
        ConfigError: the base model has no name on a hub, there is no token, or the hub's client is not installed.
        DataError: the folder has no model, or the hub refuses or cannot be reached.
        Failure: the files cannot be put together.
    """
    folder = _find_model_folder(job.model)
    target = model_upload.UploadTarget(
        _HUBS[job.hub_scheme] if job.hub_scheme else resolve_hub(),
        job.repo_name,
        job.private,
        job.revision or "",
        job.license or "",
    )
    if target.hub == "modelscope" and not job.dry_run:
        extras.require_installed("modelscope_hub", "the upload to ModelScope")
    base_model = find_base_model(folder, job)
    with tempfile.TemporaryDirectory(prefix="anabatic-push-") as temporary:
        staged = Path(temporary)
        stage_files(folder, staged, base_model)
        if not (staged / CARD_FILE).is_file():
            is_adapter = (staged / ADAPTER_CONFIG_FILE).is_file()
            facts = model_card.read_card_facts(folder, target, base_model, is_adapter)
            (staged / CARD_FILE).write_text(model_card.build_model_card(facts), encoding="utf-8")
        files = sorted(path for path in staged.rglob("*") if path.is_file())
        if not any(path.suffix in (".safetensors", ".gguf") for path in files):
            raise DataError(f"{folder} has no weights: no *.safetensors", "give a run folder, or what `export` wrote")
        if job.dry_run:
            _print_plan(target, staged, files)
            return 0
        total = sum(path.stat().st_size for path in files)
        log.info(f"uploading {folder} to {target.page_url}: {len(files)} files, {format_size(total)}")
        model_upload.upload_model(
            target, staged, job.message or f"Upload {job.repo_name.rpartition('/')[2]} with anabatic"
        )
    log.info(f"uploaded {target.page_url}" + (f", branch {target.revision}" if target.revision else ""))
    return 0


def _find_model_folder(model: str) -> Path:
    path = Path(model).expanduser()
    if not path.exists():
        raise DataError(f"{model}: no such folder", "give a run folder, or the folder of a model or an adapter")
    return resolve_model_folder(path)


def find_base_model(folder: Path, job: PushJob) -> str:
    """Return `OWNER/NAME` of the model that was trained on; empty: none, or one that is not known.

    Raises:
        ConfigError: the folder holds an adapter, whose base model is a folder of this machine.
        DataError: a file of the folder or of its run is damaged.
    """
    if job.base_model:
        return job.base_model
    adapter = folder / ADAPTER_CONFIG_FILE
    named = str(_read_json(adapter).get("base_model_name_or_path") or "") if adapter.is_file() else ""
    trained = model_card.read_run_config(folder).get("model")
    trained = trained.get("path") if isinstance(trained, dict) else trained
    for name in (named, str(trained or "")):
        if cached := _CACHED_MODEL.search(name):
            return f"{cached['owner']}/{cached['name']}"
        if paths.is_hub_id(name, resolve_hub()):  # a program has written it, so it is no typo
            return name
    if adapter.is_file():
        raise ConfigError(
            f"{folder} is an adapter for {named or 'a model it does not name'}, which others do not have",
            "name that model with --base-model OWNER/NAME, or push the merged model: anabatic export MODEL -o FOLDER",
        )
    return ""


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json_reader.read_json_file(path)
    except ValueError as error:
        raise DataError(f"{path}: {error}", "fix the file, or train again") from error
    if not isinstance(found, dict):
        raise DataError(f"{path} is not an object", "fix the file, or train again")
    return found


def stage_files(folder: Path, staged: Path, base_model: str) -> None:
    """Put links to the files that are uploaded into an empty folder; an adapter names its base model as the hub has it.

    Raises:
        DataError: a file of the folder is damaged.
    """
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and any(_matches(name, pattern) for pattern in UPLOADED):
            (staged / name).parent.mkdir(parents=True, exist_ok=True)
            (staged / name).symlink_to(path.resolve())  # weights may be larger than the temporary folder
    for name in (ADAPTER_CONFIG_FILE, "config.json"):
        path = staged / name
        if path.is_file():
            _replace_names(path, base_model)


def _matches(name: str, pattern: str) -> bool:
    return fnmatch(name, pattern) and name.count("/") == pattern.count("/")


def _replace_names(path: Path, base_model: str) -> None:
    """Write a settings file anew, without paths of this machine."""
    tree = _read_json(path)
    changed = {**tree}
    if "base_model_name_or_path" in tree:
        changed["base_model_name_or_path"] = base_model
    changed.pop("_name_or_path", None)
    if changed != tree:
        path.unlink()  # the link, not the file of the run
        path.write_text(json.dumps(changed, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _print_plan(target: model_upload.UploadTarget, staged: Path, files: list[Path]) -> None:
    sys.stdout.write(f"{target.page_url}\n\n")
    for path in files:
        sys.stdout.write(f"{format_size(path.stat().st_size):>12}  {path.relative_to(staged).as_posix()}\n")
    card = (staged / CARD_FILE).read_text(encoding="utf-8", errors="replace")
    shown = "".join(one if one.isprintable() or one == "\n" else "?" for one in card)
    sys.stdout.write(f"\n{shown}")
