"""Check the files of a job and their first rows, and what earlier stages of a pipeline will write. No torch."""

from __future__ import annotations

import glob
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anabatic.config.loading import command_table
from anabatic.core.errors import ConfigError, DataError, UserError
from anabatic.core.paths import RunFolder, require_place
from anabatic.data.readers import prompts, sources
from anabatic.data.readers.document import ColumnMapping, Document, RowFormat
from anabatic.data.readers.file_formats import get_reader
from anabatic.data.readers.long_rows import LongRowCounter
from anabatic.data.readers.row_use import require_good_answer
from anabatic.hub import datasets
from anabatic.plan import model_facts, model_shape

IsStageOutput = Callable[[str], bool]
"""Whether a path lies where an earlier stage will write."""

_FIRST_ROWS = 32
_MAX_QUESTIONS = 2000
"""Rows of questions whose lengths are looked at."""
_MAX_CHARS_PER_TOKEN = 16
"""No tokenizer makes tokens that are longer on average: what has more than so many characters for every token of room
is too long for certain."""
_FORMAT_GUESSES = re.compile(r"Did you mean [^?]*\?")
_BUILT_IN = ("task:", "chat:", "stdlib:")
_PLAIN_TEXT_SUFFIXES = (".txt", ".md", ".py")
"""Read as one document: nothing can be wrong with a row."""


def check_data_files(command: str, job: Any, is_stage_output: IsStageOutput) -> Iterator[UserError]:
    """Yield what is wrong with the files that a job reads: not there, not readable, of another form, too long."""
    row = command_table.COMMANDS.get(command)
    own_check = None if row is None else row.import_precheck()
    if own_check is not None:
        yield from own_check(job, is_stage_output)
        return
    of = _FILE_CHECKS.get(command)
    for name in list_sources(job):
        if of is None or is_stage_output(name):
            continue
        try:
            of(job, name)
        except UserError as error:
            yield error
    try:
        if command in _WEIGHTED_SOURCE_COMMANDS:
            sources.parse_sources(job.data.train)
    except UserError as error:
        yield error


def find_absent_files(job: Any) -> dict[str, str]:
    """Return the files of a job that are not there, and what is to be said of each."""
    found = {}
    for name in list_sources(job):
        source = sources.parse_source(name)
        try:
            if sources.source_kind(source) == "hub":
                found[name] = f"{name} is downloaded when the job reads it"
                continue
            is_present = sources.source_kind(source) != "glob" or bool(
                glob.glob(os.path.expanduser(source.path), recursive=True)
            )
        except DataError as error:
            if not source.path.startswith(_BUILT_IN):
                guess = _FORMAT_GUESSES.search(error.hint)
                found[name] = f"{error}{f'. {guess[0]}' if guess else ''}"
            continue
        if not is_present:
            found[name] = f"{name}: no such files"
    return found


def list_sources(job: Any) -> list[str]:
    """Return the files that a job names: `data.train` and `data.valid`, or `data` and `inputs` that are
    lists."""
    data = getattr(job, "data", None)
    if data is None or isinstance(data, list):
        specs = list(data or [])
    else:
        held_out = getattr(data, "valid", ()) if getattr(data, "holds_out", True) else ()  # `none` is no file
        specs = [*getattr(data, "train", ()), *held_out]
    inputs = getattr(job, "inputs", None)
    return [*specs, *(inputs if isinstance(inputs, list) else ())]


def _find_source_files(job: Any, name: str) -> tuple[sources.DataSource, list[Path]]:
    """Return a source and its files; of a hub only the first one, and only if it is in the cache."""
    source = sources.parse_source(name)
    kind = sources.source_kind(source)
    if kind == "task":
        from anabatic.data.builtin import synthetic_tasks

        synthetic_tasks.get_tasks(source.path.removeprefix("task:"))
    if kind == "hub":
        return source, datasets.list_cached_files(sources.resolve_hub_source(source, is_check=True))[:1]
    return source, sources.list_source_files(source) if kind in ("file", "folder", "glob") else []


def _read_first_documents(job: Any, name: str) -> list[Document]:
    """Return the first documents of a source, of its first file alone."""
    _, paths = _find_source_files(job, name)
    if not paths or paths[0].name.lower().endswith(_PLAIN_TEXT_SUFFIXES):
        return []
    media = str(paths[0].absolute().parent) if _reads_pictures(job) else None
    columns = ColumnMapping(job.data.text_column, tuple(sorted(job.data.columns.items())), media_folder=media)
    reader = get_reader(paths[0])
    assert reader is not None  # `files` keeps only those that have one
    found: list[Document] = []
    form = RowFormat()
    for item in _wrap_read_errors(itertools.islice(reader(paths[0], paths[0].name, columns), _FIRST_ROWS), paths[0]):
        if isinstance(item, Document):
            found, form = [*found, item], item.row_format
        elif job.data.on_bad_row == "fail":
            item.explain_against_format(form).raise_error()
    return found


def _reads_pictures(job: Any) -> bool:
    """Return whether a job may train a model that sees: its pictures are looked at when the rows are tokenised."""
    if not hasattr(job, "vision"):
        return False
    config = model_facts.read_local_config(job.model)
    return not config or model_shape.sees_pictures(config)


def _wrap_read_errors(items: Iterable[Any], path: Path) -> Iterator[Any]:
    try:
        yield from items
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}", "look at its permissions and its disk") from error


def _check_single_answers(job: Any, name: str) -> None:
    for row in _read_first_documents(job, name):
        if job.data.on_bad_row == "fail":
            require_good_answer(row)


def _check_preference_pairs(job: Any, name: str) -> None:
    labels = getattr(job, "loss_type", "") == "kto"
    source, paths = _find_source_files(job, name)
    rows = _read_first_documents(job, name)
    if any(row.messages is None for row in rows) or (paths and paths[0].name.lower().endswith(_PLAIN_TEXT_SUFFIXES)):
        expected_text = (
            ("answers with labels", "messages and label") if labels else ("pairs of answers", "chosen and rejected")
        )
        raise DataError(f"{source.path} is plain text, not {expected_text[0]}", f"name rows of {expected_text[1]}")
    for row in rows:
        if row.rejected is None and not (labels and row.label is not None) and job.data.on_bad_row == "fail":
            what = "one answer without a label" if labels else "one answer, where a pair has two"
            hint = '"label" is true or false' if labels else 'a pair is "prompt", "chosen" and "rejected"'
            raise DataError(f"{row.location}: {what}", hint)


def _check_questions(job: Any, name: str) -> None:
    source, paths = _find_source_files(job, name)
    rewards = {each.partition("=")[0] for each in job.rewards}
    room = job.batch.resolved_seq_len - 1
    long, rows = LongRowCounter(f"{name}: questions", room, job.data.long_share), 0
    found = _read_prompt_rows(paths, job.data.columns, job.data.on_bad_row, _reads_pictures(job))
    for row in itertools.islice(found, source.rows or _MAX_QUESTIONS):
        rows += 1
        if row.messages is None:
            raise DataError(
                f"{row.location}: plain text, not a question", "give rows with a prompt, query, question or messages"
            )
        if "answer" in rewards and not (row.answer or "").strip():
            raise DataError(
                f"{row.location}: the row has no answer, and the reward is `answer`",
                "give rows an answer, or name another reward",
            )
        length = sum(len(turn.get("content") or "") for turn in row.messages) // _MAX_CHARS_PER_TOKEN
        if length > room:
            long.count_row(length, row.location)
    if (
        rows < _MAX_QUESTIONS or long.count > max(0.5, long.max_fraction) * rows
    ):  # of more rows the first may not be like the rest
        _require_room_for_answers(long, rows)


def _require_room_for_answers(long: LongRowCounter, rows: int) -> None:
    if long.exceeds_limit(rows):
        long.check_fraction(rows, "raise batch.seq_len, if the model has the positions")


def _read_prompt_rows(
    paths: list[Path], columns: dict[str, str], on_bad_row: str, sees: bool
) -> Iterator[prompts.PromptRow]:
    for item in prompts.read_prompts([str(path) for path in paths], columns, "" if sees else None):
        if isinstance(item, prompts.PromptRow):
            yield item
        elif on_bad_row == "fail":
            item.raise_error()


def _check_prompt_file(job: Any, name: str) -> None:
    paths = _find_source_files(job, name)[1] if prompts.is_hub_file(name) else [Path(name)]
    # `infer` alone has a checkpoint in place of a model
    sees = hasattr(job, "ckpt_dir") and model_shape.sees_pictures(model_facts.read_local_config(job.model))
    found = itertools.islice(_read_prompt_rows(paths, job.columns, job.on_bad_row, sees), _FIRST_ROWS)
    if not paths:
        return
    if not any(True for _ in found):
        raise DataError(f"{name}: there is no row", "give files with rows")


_FILE_CHECKS: dict[str, Callable[[Any, str], Any]] = {
    "tokenizer train": _read_first_documents,
    "tokenizer eval": _read_first_documents,
    "pretrain": _check_single_answers,
    "sft": _check_single_answers,
    "dpo": _check_preference_pairs,
    "reward": _check_preference_pairs,
    "rl": _check_questions,
    "eval": _read_first_documents,
    "infer": _check_prompt_file,
}
_WEIGHTED_SOURCE_COMMANDS = ("pretrain", "sft", "dpo", "reward")


TEXT_MODEL_COMMANDS = (
    "pretrain", "sft", "dpo", "rl", "merge", "export", "checkpoint export", "classify pretrain", "vision build",
)  # fmt: skip
"""Commands that make a model which writes text."""
OTHER_MODEL_COMMANDS = {"reward": "a reward model", "classify train": "a classifier"}
"""Commands that make a model which writes no text."""
UNKNOWN_COMMAND = "run"
"""Stands for a stage whose command is none."""


@dataclass(frozen=True)
class StageOutput:
    """What a stage will have made.

    Attributes:
        stage, command: which, and what it runs.
        max_positions, vocab_size: of its model, or of its tokenizer; None: not known.
        config: what its model's config.json will say of family and blocks, as far as that is known.
        is_adapter: whether it is an adapter; None: not known.
    """

    stage: str
    command: str
    max_positions: int | None = None
    vocab_size: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    is_adapter: bool | None = None

    @property
    def has_model(self) -> bool:
        """Whether it makes a model, of whatever kind."""
        return self.command in (*TEXT_MODEL_COMMANDS, *OTHER_MODEL_COMMANDS)


EarlierOutputs = Mapping[str, StageOutput]
"""Folder of an earlier stage -> what it makes."""


def predict_stage_output(stage: str, command: str, job: Any, earlier: EarlierOutputs) -> StageOutput:
    """Return what a stage will have made."""
    base = model_facts.model_name(job)
    positions, vocab = read_model_sizes(base, earlier) if base else (None, None)
    config = read_model_config(base, earlier) if base else {}
    if command == "tokenizer train":
        vocab = job.vocab_size
    elif command == "pretrain" and not base:
        positions = job.batch.resolved_seq_len
        vocab = read_model_sizes(job.tokenizer or "", earlier)[1]
        config = {"model_type": "qwen3", "num_hidden_layers": job.model.resolved_depth}
    return StageOutput(stage, command, positions, vocab, config, _predicts_adapter(job, base, earlier))


def _predicts_adapter(job: Any, base: str, earlier: EarlierOutputs) -> bool | None:
    tuner = getattr(job, "tuner", "full")  # what has no choice makes a whole model
    return is_adapter(base, earlier) if tuner == "auto" else tuner == "lora"


def find_stage_output(name: str, earlier: EarlierOutputs) -> StageOutput | None:
    """Return what an earlier stage will have made of a path; None: it lies elsewhere."""
    return next(
        (output for folder, output in earlier.items() if absolute_path(name).is_relative_to(absolute_path(folder))),
        None,
    )


def absolute_path(name: str) -> Path:
    """Return the absolute path of a name; links are kept."""
    return Path(os.path.abspath(os.path.expanduser(name)))


def read_model_sizes(name: str, earlier: EarlierOutputs) -> tuple[int | None, int | None]:
    """Return positions and entries of the vocabulary of a model, as far as they are known."""
    stage_output = find_stage_output(name, earlier)
    if stage_output is not None:
        return stage_output.max_positions, stage_output.vocab_size
    config = model_facts.read_local_config(name)
    vocab = config.get("vocab_size")
    return model_facts.max_positions(config), vocab if isinstance(vocab, int) else None


def read_model_config(name: str, earlier: EarlierOutputs) -> Mapping[str, Any]:
    """Return the config.json of a model, as far as it is known; of an adapter that of its base."""
    stage_output = find_stage_output(name, earlier)
    return model_facts.read_local_config(name) if stage_output is None else stage_output.config


def is_adapter(name: str, earlier: EarlierOutputs) -> bool | None:
    """Return whether a model is an adapter; None: not known."""
    stage_output = find_stage_output(name, earlier)
    if stage_output is not None:
        return stage_output.is_adapter
    folder = model_facts.find_local_model(name)
    return None if folder is None else not (folder / "config.json").is_file()


_NEW_OUTPUT_COMMANDS = ("merge", "checkpoint export")
"""Commands that write a folder which must not be there."""
_RUN_FOLDER_COMMANDS = ("chat", "eval", "classify eval")
"""Commands besides the trainings that write into a run folder."""


def require_writable_output(command: str, job: Any, alone: bool) -> None:
    """Make sure that a command can write to its output.

    Args:
        alone: it is no stage of a pipeline, which looks at its own folder and moves aside what an earlier run has left.

    Raises:
        ConfigError: a file is in the place of a folder, or what is there is not to be replaced.
        Failure: the place refuses writes.
    """
    out = getattr(job, "out", None)
    if not out:
        return
    path = Path(out)
    if (
        command_table.COMMANDS.find_row(command).is_training
        or command in _RUN_FOLDER_COMMANDS
        or command.startswith("bench ")
    ):
        RunFolder(path).require_no_file()
        if alone:
            require_place(path)
        return
    path = path.expanduser()
    if not alone:
        return
    if command in _NEW_OUTPUT_COMMANDS:
        require_new_output(path)
    if command == "export":
        require_replaceable_output(path, job.overwrite)
    require_place(path.parent, path)


def require_new_output(out: Path) -> None:
    """Refuse to write over what is there.

    Raises:
        ConfigError: it exists.
    """
    if out.exists():
        raise ConfigError(f"{out} exists already", "choose another --out")


def require_replaceable_output(out: Path, overwrite: bool) -> None:
    """Only a model folder is ever replaced: a wrong -o must not cost anybody a run or a home.

    Raises:
        ConfigError: it exists, and is not to be replaced or is none.
    """
    if not out.exists() and not out.is_symlink():
        return
    if not overwrite:
        raise ConfigError(f"{out} exists already", "choose another -o FOLDER, or add --overwrite")
    if out.is_symlink() or not (out / "config.json").is_file() or any(out.glob("checkpoint-*")):
        raise ConfigError(f"{out} is no folder of a model, and is not replaced", "choose another -o FOLDER")
