"""The CORE evaluation (DCLM, arXiv 2406.11794): its bundle is fetched once and verified; 22 tasks, one centered figure.

The bundle is a folder with `core.yaml` (tasks), `eval_data/` (their rows) and `eval_meta_data.csv` (what guessing
scores, in percent). Shuffles, examples, delimiters and what is scored are as in nanochat (nanochat/core_eval.py and
scripts/base_eval.py).
"""

from __future__ import annotations

import csv
import hashlib
import http.client
import json
import os
import urllib.error
import urllib.request
import zipfile
from pathlib import Path
from typing import Any

from anabatic.config.loading import yaml_reader
from anabatic.config.task import EvalTask, TaskData, TaskGroup
from anabatic.core import json_reader, log
from anabatic.core.errors import ConfigError, DataError
from anabatic.core.formatting import format_size
from anabatic.core.paths import get_cache_root, lock_folder, make_write_error, open_atomic_folder, require_space

CORE_NAME = "core"
_KIND_SETTINGS: dict[str, dict[str, Any]] = {
    "multiple_choice": dict(
        kind="choices", prompt="{{ query }}", choices="{{ choices }}", answer="{{ gold }}", metric="acc_tokens"
    ),
    "schema": dict(
        kind="cloze", contexts="{{ context_options }}", continuation="{{ continuation }}", answer="{{ gold }}",
        metric="acc_tokens",
    ),
    "language_modeling": dict(kind="completion", prompt="{{ context }}", continuation="{{ continuation }}"),
}  # fmt: skip
"""Kind in the bundle -> what it is here."""


def find_bundle(folder: Path | None) -> Path:
    """Return the folder of the bundle: the one given, or `eval_bundle` in it; without a folder it is fetched.

    Raises:
        ConfigError: the folder holds none.
        DataError: it cannot be fetched.
    """
    if folder is None:
        return fetch_bundle()
    for path in (folder, folder / "eval_bundle"):
        if (path / "core.yaml").is_file():
            return path
    raise ConfigError(
        f"the CORE tasks are read from their bundle, and {folder} holds no core.yaml",
        f"unpack {URL} there, or leave --tasks-from out to fetch it",
    )


def load_tasks(root: Path) -> tuple[TaskGroup, list[EvalTask]]:
    """Return the group and its tasks.

    Raises:
        ConfigError: core.yaml is broken.
        DataError: eval_meta_data.csv is missing, or does not know a task.
    """
    source = yaml_reader.read_yaml(root / "core.yaml")
    chances, sums = _read_chances(root / "eval_meta_data.csv"), read_checksums(root)
    rows = source.tree.get("icl_tasks")
    if not isinstance(rows, list) or not rows:
        raise ConfigError(f"{source.origin}: no list icl_tasks", "unpack the bundle again")
    made = []
    for at, row in enumerate(rows):
        where = source.format_location(("icl_tasks", at))
        try:
            made.append(_make_task(row, chances, sums))
        except KeyError as error:
            raise ConfigError(f"{where}the task has no {error}", "unpack the bundle again") from error
        except (TypeError, ValueError, IndexError, ConfigError) as error:
            raise ConfigError(f"{where}{error}", "unpack the bundle again") from error
    return TaskGroup(name=CORE_NAME, tasks=[one.name for one in made], aggregate="centred"), made


def _make_task(row: dict[str, Any], chances: dict[str, float], sums: dict[str, str]) -> EvalTask:
    label, kind = row["label"], row["icl_task_type"]
    if kind not in _KIND_SETTINGS:
        raise ValueError(f"{label} is of the kind {kind}; known are {', '.join(_KIND_SETTINGS)}")
    if label not in chances:
        raise ValueError(f"eval_meta_data.csv does not know {label}")
    file = f"eval_data/{row['dataset_uri']}"
    known = {Path(file).name: sums[file]} if file in sums else {}
    return EvalTask(
        name=label,
        data=TaskData(files=[file], sha256=known),
        shots=row["num_fewshot"][0],
        shots_draw="core",
        between=row.get("continuation_delimiter", " "),
        chance=chances[label],
        **_KIND_SETTINGS[kind],
    )


def _read_chances(path: Path) -> dict[str, float]:
    """Task -> what guessing scores, 0 to 1."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            return {row["Eval Task"]: float(row["Random baseline"]) / 100 for row in csv.DictReader(file)}
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}", "unpack the bundle again") from error
    except (KeyError, TypeError, ValueError) as error:
        what = "every row needs the columns Eval Task and Random baseline, a number"
        raise DataError(f"{path}: {what} ({error})", "unpack the bundle again") from error


URL = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"
"""Address in nanochat (scripts/base_eval.py)."""
SHA256 = "90a7c19e28ee7a52b4f6e1f87658deb9fde7f63deba2379045bdb1fe9ea5d200"
"""Of the file behind it in 2026, as several projects that pin it have recorded independently."""
URL_VARIABLE = "ANABATIC_CORE_URL"
SHA256_VARIABLE = "ANABATIC_CORE_SHA256"
CHECKSUMS_FILE = "files.json"
"""Path of every unpacked file -> its checksum."""
_BLOCK_BYTES = 1 << 20
_TIMEOUT_SECONDS = 60.0
"""Seconds without a byte."""
_OTHER_SOURCE_HINT = (
    f"set {URL_VARIABLE} to the address of a copy, or give the unpacked folder with --tasks-from FOLDER"
)


def fetch_bundle() -> Path:
    """Return the folder of the bundle, fetched if need be; a download that broke off resumes where it was.

    Raises:
        ConfigError: the checksum in ANABATIC_CORE_SHA256 is none, or HF_HUB_OFFLINE is set.
        DataError: the address does not answer, or gives another file.
        Failure: the cache cannot be written.
    """
    wanted = (os.environ.get(SHA256_VARIABLE) or SHA256).lower()
    if len(wanted) != 64 or set(wanted) - set("0123456789abcdef"):
        raise ConfigError(f"{SHA256_VARIABLE} is {wanted!r}", "a SHA-256 has 64 hexadecimal digits: sha256sum FILE")
    root = get_cache_root() / "core" / wanted[:16]
    bundle = root / "eval_bundle"
    if (bundle / "core.yaml").is_file():
        return bundle
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "on", "yes"):
        raise ConfigError(
            "the CORE bundle is not in the cache, and HF_HUB_OFFLINE is set", f"unset it, or {_OTHER_SOURCE_HINT}"
        )
    url = os.environ.get(URL_VARIABLE) or URL
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{URL_VARIABLE} is {url!r}", "give an address that begins with http:// or https://")
    try:
        root.mkdir(parents=True, exist_ok=True)
        with lock_folder(root, "download of the CORE bundle"):
            part = root / "eval_bundle.zip.part"
            _download_archive(url, part)
            _check_archive(part, wanted, url)
            _unpack_archive(part, bundle, url)
            part.unlink()
    except OSError as error:
        raise make_write_error(root, error, "choose another place with ANABATIC_CACHE") from error
    return bundle


def _download_archive(url: str, part: Path) -> None:
    there = part.stat().st_size if part.exists() else 0
    log.info(f"the CORE bundle: from {url}" + (f", going on behind {format_size(there)}" if there else ""))
    try:
        request = urllib.request.Request(url, headers={"Range": f"bytes={there}-"} if there else {})
        with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as answer:
            left = int(answer.headers.get("Content-Length") or 0)
            require_space(part, 5 * left, "choose another place with ANABATIC_CACHE")
            got = _write_blocks(answer, part, append=answer.status == http.HTTPStatus.PARTIAL_CONTENT)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return  # all of it is here already: the checksum tells
        raise DataError(f"{url} answers {error.code}", _OTHER_SOURCE_HINT) from error
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError, ValueError) as error:
        raise DataError(
            f"{url}: the download broke off: {error}", f"start again, it resumes; or {_OTHER_SOURCE_HINT}"
        ) from error
    if got < left:
        what = f"{url}: the download broke off: {got:,} of {left:,} bytes came"
        raise DataError(what, f"start again, it resumes; or {_OTHER_SOURCE_HINT}")


def _write_blocks(answer: http.client.HTTPResponse, part: Path, append: bool) -> int:
    got = 0
    with open(part, "ab" if append else "wb") as file:
        while block := answer.read(_BLOCK_BYTES):
            file.write(block)
            got += len(block)
    return got


def _check_archive(part: Path, wanted: str, url: str) -> None:
    found = _hash_file(part)
    if found != wanted:
        part.unlink()
        raise DataError(
            f"{url} gives a file with the checksum {found[:12]}..., and it should have {wanted[:12]}...",
            f"start again; if it is the bundle that you want, set {SHA256_VARIABLE}={found}; or {_OTHER_SOURCE_HINT}",
        )


def _unpack_archive(part: Path, bundle: Path, url: str) -> None:
    """Unpack the files below `eval_bundle/`, and remember their checksums."""
    try:
        with zipfile.ZipFile(part) as archive, open_atomic_folder(bundle) as folder:
            sums = {}
            for member in archive.infolist():
                inner = member.filename.partition("eval_bundle/")
                if member.is_dir() or inner[0] or not inner[2]:
                    continue
                path = folder / inner[2]
                if ".." in path.parts:  # a path from outside becomes a path here
                    raise DataError(f"{url} holds the path {member.filename!r}", "do not use this bundle")
                path.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(member) as source, open(path, "wb") as file:
                    while block := source.read(_BLOCK_BYTES):
                        file.write(block)
                sums[inner[2]] = _hash_file(path)
            if "core.yaml" not in sums:
                raise DataError(f"{url} holds no eval_bundle/core.yaml", _OTHER_SOURCE_HINT)
            (folder / CHECKSUMS_FILE).write_text(json.dumps(sums, indent=1) + "\n", encoding="utf-8")
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise DataError(f"{url} is no zip file that can be read: {error}", _OTHER_SOURCE_HINT) from error


def read_checksums(bundle: Path) -> dict[str, str]:
    """Return the checksums that were remembered when a bundle was unpacked; none of a folder that the user made."""
    path = bundle / CHECKSUMS_FILE
    try:
        found = json_reader.read_json_file(path) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}", "remove the folder: it is fetched again") from error
    return {str(name): str(sha) for name, sha in found.items()} if isinstance(found, dict) else {}


def _hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
