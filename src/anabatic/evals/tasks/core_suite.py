"""The CORE evaluation (DCLM, arXiv 2406.11794): 22 tasks in a folder, one figure of how far a model is from chance.

The bundle is a folder with `core.yaml` (tasks), `eval_data/` (their rows) and `eval_meta_data.csv` (what guessing
scores, in percent). Shuffles, examples, delimiters and what is scored are as in nanochat (nanochat/core_eval.py and
scripts/base_eval.py).
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from anabatic.config.loading import yaml_reader
from anabatic.config.task import EvalTask, TaskData, TaskGroup
from anabatic.core.errors import ConfigError, DataError
from anabatic.evals.tasks import core_bundle

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
        return core_bundle.fetch_bundle()
    for path in (folder, folder / "eval_bundle"):
        if (path / "core.yaml").is_file():
            return path
    raise ConfigError(
        f"the CORE tasks are read from their bundle, and {folder} holds no core.yaml",
        f"unpack {core_bundle.URL} there, or leave --tasks-from out to fetch it",
    )


def load_tasks(root: Path) -> tuple[TaskGroup, list[EvalTask]]:
    """Return the group and its tasks.

    Raises:
        ConfigError: core.yaml is broken.
        DataError: eval_meta_data.csv is missing, or does not know a task.
    """
    source = yaml_reader.read_yaml(root / "core.yaml")
    chances, sums = _read_chances(root / "eval_meta_data.csv"), core_bundle.read_checksums(root)
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
