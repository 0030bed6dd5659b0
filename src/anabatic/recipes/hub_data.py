"""Data sets of hubs in a job: their revisions become commits, which the run folder records.

A run that is started again, or continued, reads the commits of its first start, whatever the branches are by then; an
evaluation that is repeated reads those of the first one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from anabatic.config.evaluate import EvalJob
from anabatic.config.sections.train_jobs import LoopJob
from anabatic.core import json_reader
from anabatic.core.errors import DataError
from anabatic.core.paths import RunFolder, make_write_error, write_atomic
from anabatic.core.relaunch import RETRY_VARIABLE
from anabatic.data.readers import sources
from anabatic.hub import datasets
from anabatic.hub.dataset_name import DatasetName, is_dataset_spec, parse_name
from anabatic.parallel.collectives import broadcast_text
from anabatic.parallel.world import World

Job = TypeVar("Job", bound=LoopJob)
Recorded = Mapping[str, Mapping[str, Any]]
Records = dict[str, dict[str, Any]]
"""Name as the recipe has it -> commit, subset, split, license, number of files and bytes."""
EVALUATION_RECORD_FILE = "eval_datasets.json"
"""File of an evaluation's folder that records the commits of its data sets."""


def pin_specs(
    specs: Sequence[str], recorded: Mapping[str, Mapping[str, Any]] | None = None
) -> tuple[list[str], Records]:
    """Return the specs with commits in place of revisions, and what is known of each data set.

    Args:
        specs: data sources; files and folders are returned as they are.
        recorded: data sets whose commit is decided already.

    Raises:
        ConfigError, DataError: a spec cannot be read, or the data set cannot be found.
    """
    pinned, records = [], Records()
    for spec in specs:
        if not is_dataset_spec(spec) or sources.source_kind(source := sources.parse_source(spec)) != "hub":
            pinned.append(spec)
            continue
        snapshot = _resolve_recorded(parse_name(source.path), recorded or {}, records)
        pinned.append(str(replace(source, path=str(snapshot.name))))
    return pinned, records


def _resolve_recorded(name: DatasetName, recorded: Recorded, records: Records) -> datasets.DatasetSnapshot:
    """Return a data set at its recorded commit, if there is one, and add it to the records."""
    before = recorded.get(str(name))
    snapshot = datasets.resolve_dataset(name if before is None else _apply_record(name, before))
    records[str(name)] = snapshot.to_record()
    if before is not None and not snapshot.license:  # a pinned commit of the Parquet conversion has no card
        records[str(name)]["license"] = before.get("license", "")
    return snapshot


def _apply_record(name: DatasetName, record: Mapping[str, Any]) -> DatasetName:
    return replace(name.pin(str(record["commit"])), subset=str(record["subset"]), split=str(record["split"]))


def pin_training_data(job: Job, world: World) -> Job:
    """Return the job with the commits of its data sets, and record them in the run folder; every rank calls this.

    Raises:
        ConfigError, DataError: a spec cannot be read, or a data set cannot be found.
        Failure: the run folder cannot be written.
    """
    data: Any = getattr(job, "data", None)
    train, valid = getattr(data, "train", []), getattr(data, "valid", [])
    if not any(map(is_dataset_spec, (*train, *valid))):
        return job
    text = ""
    if world.is_main_process:
        folder = RunFolder(job.out).root
        starts_over = job.save.resume == "never" and RETRY_VARIABLE not in os.environ
        recorded = {} if starts_over else read_records(folder)
        pinned_train, records = pin_specs(train, recorded)
        pinned_valid, valid_records = pin_specs(valid, recorded)
        _write_records(folder, {**recorded, **records, **valid_records})
        text = json.dumps([pinned_train, pinned_valid])
    train, valid = json_reader.loads(broadcast_text(text, world))
    changes: Any = {"data": replace(data, train=train, valid=valid)}
    return replace(job, **changes)


class EvaluationRecords:
    """The data sets of an evaluation: at the commits of the model's training, else of the first evaluation in `out`.

    The training decides because the held-out share of its data must be rows that it has not seen.

    Args:
        out: where the evaluation writes; None: nothing is recorded.
        run_folder: of the model's training, if there is one.
        starts_over: earlier evaluations do not count.

    Attributes:
        used: what this evaluation reads.

    Raises:
        DataError: a record is damaged.
    """

    def __init__(self, out: Path | None, run_folder: Path | None, starts_over: bool) -> None:
        self._out = out
        self._earlier = {} if out is None or starts_over else read_records(out, EVALUATION_RECORD_FILE)
        self._recorded = self._earlier | ({} if run_folder is None else read_records(run_folder))
        self.used = Records()

    def resolve_dataset(self, name: DatasetName) -> datasets.DatasetSnapshot:
        """Return the files of a data set of a task.

        Raises:
            DataError: it cannot be found.
        """
        return _resolve_recorded(name, self._recorded, self.used)

    def pin_specs(self, specs: Sequence[str]) -> list[str]:
        """Return data sources with commits; errors as of `pin_specs`."""
        pinned, records = pin_specs(specs, self._recorded)
        self.used |= records
        return pinned

    def write(self) -> None:
        """Record what is used for the next evaluation.

        Raises:
            Failure: the folder cannot be written.
        """
        if self._out is not None and self.used:
            _write_records(self._out, {**self._earlier, **self.used}, EVALUATION_RECORD_FILE)


def pin_evaluation_data(job: EvalJob, records: EvaluationRecords | None, world: World) -> EvalJob:
    """Return the job with the commits of the text to measure; every rank calls this.

    Args:
        records: of the main process, which decides.

    Raises:
        ConfigError, DataError, Failure: as `pin_training_data`.
    """
    specs = job.data.valid or job.data.train
    if not any(map(is_dataset_spec, specs)):
        return job
    text = ""
    if records is not None:
        text = json.dumps(records.pin_specs(specs))
        records.write()
    pinned = json_reader.loads(broadcast_text(text, world))
    return replace(job, data=replace(job.data, **{"valid" if job.data.valid else "train": pinned}))


def read_records(folder: Path, file: str = datasets.RECORD_FILE) -> Records:
    """Return the data sets that a run folder records; none if it has no such file.

    Raises:
        DataError: the file is damaged: another commit must not be read silently.
    """
    path = folder / file
    try:
        records = json_reader.read_json_file(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise _make_damage_error(path) from error
    is_valid = isinstance(records, dict) and all(
        isinstance(record, dict) and {"commit", "subset", "split"} <= record.keys() for record in records.values()
    )
    if not is_valid:
        raise _make_damage_error(path)
    return dict(records)


def _make_damage_error(path: Path) -> DataError:
    if path.name == EVALUATION_RECORD_FILE:
        return DataError(
            f"{path} is damaged, and tells which commits of the data earlier evaluations have read",
            "take the commits from data_sets in eval.json there, or read those of now with --resume never",
        )
    return DataError(
        f"{path} is damaged, and tells which commits of the data this run has read",
        "take the names of the data from config.yaml there, or start over with --save.resume never",
    )


def _write_records(folder: Path, records: Records, file: str = datasets.RECORD_FILE) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / file, json.dumps(records, indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        raise make_write_error(folder, error) from error
