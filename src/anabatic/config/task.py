"""What a task of `anabatic eval` is: where its rows lie, what is asked, and when an answer is right."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from anabatic.config.sections.common import require_setting
from anabatic.core.errors import ConfigError

Kind = Literal["choices", "cloze", "completion", "perplexity", "generate"]
Metric = Literal["acc", "acc_norm", "acc_bytes", "acc_tokens", "exact", "perplexity", "bits_per_byte"]
Extract = Literal["text", "first_line", "first_word", "number", "final_number", "letter", "code", "regex"]
Check = Literal["equal", "number", "contains", "generated", "python", "instructions"]

METRICS: dict[Kind, tuple[Metric, ...]] = {
    "choices": ("acc", "acc_norm", "acc_bytes", "acc_tokens"),
    "cloze": ("acc", "acc_norm", "acc_bytes", "acc_tokens"),
    "completion": ("acc", "perplexity"),
    "perplexity": ("bits_per_byte", "perplexity"),
    "generate": ("exact",),
}
"""What each kind measures; the first is the one that counts unless `metric` names another."""
TEXT_METRICS: tuple[Metric, ...] = ("bits_per_byte", "perplexity")
"""Those that are no shares of items."""


@dataclass(kw_only=True)
class TaskData:
    """Where rows lie."""

    files: list[str] = field(default_factory=list)
    """Files or globs, beside the task's file or in the folder of `--tasks-from`: .jsonl[.gz|.zst], .json, .csv, .tsv,
    .parquet."""
    hub: str = ""
    """OWNER/NAME of a data set on Hugging Face."""
    config: str = ""
    """Which part of the data set."""
    split: str = "test"
    """Which split."""
    also: list[str] = field(default_factory=list)
    """Other names that the files have where people keep them by hand."""
    task: str = ""
    """A generated task: spelling, counting, arithmetic, identity."""
    sha256: dict[str, str] = field(default_factory=dict)
    """Name of a file -> its checksum; a file of that name with another one is refused."""


@dataclass(kw_only=True)
class EvalTask:
    """One task. Templates are jinja2, with the row's columns as variables, in a sandbox."""

    name: str = ""
    about: str = ""
    kind: Kind = "choices"
    data: TaskData = field(default_factory=TaskData)
    prompt: str = ""
    choices: Any = None
    contexts: Any = None
    continuation: str = ""
    answer: Any = None
    keep: str = ""
    group_by: str = ""
    description: str = ""
    between: str = " "
    shots: int = 0
    shots_data: TaskData = field(default_factory=TaskData)
    shots_draw: Literal["random", "first", "core"] = "random"
    shots_same: str = ""
    shots_between: str = "\n\n"
    metric: Metric | None = None
    chance: float | None = None
    chat: bool = False
    system: str = ""
    images: Any = None
    stop: list[str] = field(default_factory=list)
    max_new_tokens: int | None = None
    extract: Extract = "text"
    pattern: str = ""
    check: Check = "equal"
    program: str = ""
    tests: str = ""
    helpers: str = ""

    def __post_init__(self) -> None:
        where = self.name or "the task"
        require_setting(where.isprintable(), f"name is {where!r}", "use letters in one line")
        sources = [name for name in ("files", "hub", "task") if getattr(self.data, name)]
        require_setting(
            len(sources) == 1,
            f"data of {where} names {' and '.join(sources) or 'no rows'}",
            "give one of data.files, data.hub, data.task",
        )
        for name in ("keep", "group_by", "shots_same"):
            value = getattr(self, name)
            same = f'{name} of {where} is "{value}" for every row'
            require_setting(not value or "{" in value, same, f'write "{{{{ {value} }}}}" for what comes of a row')
        apart = self.examples_data
        require_setting(
            apart is None or apart is self.shots_data or bool(self.data.hub),
            f"shots_data of {where} names a part of a data set, and data.files or data.task have none",
            "give shots_data: {files: [...]}, or leave it out: examples are other rows then",
        )
        for name in _REQUIRED_FIELDS[self.kind]:
            require_setting(
                getattr(self, name) not in ("", None),
                f"{name} of {where} is not given",
                f"a task of the kind {self.kind} has {', '.join(_REQUIRED_FIELDS[self.kind])}",
            )
        require_setting(self.shots >= 0, f"shots is {self.shots}", "use 0 or more")
        require_setting(
            self.metric is None or self.metric in METRICS[self.kind],
            f"metric is {self.metric}, a task of the kind {self.kind} has {', '.join(METRICS[self.kind])}",
            "choose one of them, or leave it out",
        )
        require_setting(
            self.chance is None or 0 <= self.chance < 1, f"chance is {self.chance}", "use a share from 0 to below 1"
        )
        require_setting(
            not (self.shots and self.kind == "perplexity"),
            f"shots is {self.shots}, and whole texts have no examples",
            "leave shots out",
        )
        require_setting(
            not self.chat or self.kind in _CHAT_ONLY_FIELDS,
            f"chat is true, and a task of the kind {self.kind} is not asked in conversations",
            f"use the kind {' or '.join(_CHAT_ONLY_FIELDS)}",
        )
        shows = self.images in (None, "") or (self.chat and self.kind == "generate" and not self.shots)
        problem = f"images of {where} is given, and pictures are shown in conversations without examples"
        require_setting(shows, problem, "use kind: generate and chat: true, and leave shots out")
        longest = self.max_new_tokens
        require_setting(
            longest is None or longest >= 1, f"max_new_tokens is {longest}", "use 1 or more, or leave it out"
        )
        require_setting(all(self.stop), "a text of stop is empty", "leave it out")
        if self.kind == "generate":
            self._require_grader(where)

    def _require_grader(self, where: str) -> None:
        for name in ("program", "tests"):
            missing = self.check == "python" and not getattr(self, name)
            require_setting(
                not missing, f"{name} of {where} is not given", "check: python runs `program`, and `tests` apart"
            )
        require_setting(
            not (self.extract == "regex" and not self.pattern), "pattern is not given", "extract: regex needs one"
        )
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ConfigError(f"pattern {self.pattern!r}: {error}", "give a regular expression of Python") from error
        require_setting(
            self.answer not in ("", None) or self.check not in _ANSWER_METRICS,
            f"answer of {where} is not given, and check: {self.check} compares with it",
            'give one, answer: "{{ column }}"',
        )
        require_setting(
            self.check != "generated" or bool(self.data.task),
            f"check is generated, and the rows of {where} are not",
            "check: generated goes with data: {task: NAME}",
        )

    @property
    def examples_data(self) -> TaskData | None:
        """Where examples lie; None: among the task's own rows. What `shots_data` leaves out is as in `data`."""
        given = self.shots_data
        if given == TaskData():
            return None
        if given.files or given.hub or given.task:
            return given
        return replace(self.data, config=given.config or self.data.config, split=given.split)

    @property
    def main_metric(self) -> Metric:
        """The metric that counts."""
        return self.metric or METRICS[self.kind][0]


_CHAT_ONLY_FIELDS: tuple[Kind, ...] = ("choices", "generate")
_ANSWER_METRICS: tuple[Check, ...] = ("equal", "number", "contains", "generated")
_REQUIRED_FIELDS: dict[Kind, tuple[str, ...]] = {
    "choices": ("prompt", "choices", "answer"),
    "cloze": ("contexts", "continuation", "answer"),
    "completion": ("prompt", "continuation"),
    "perplexity": ("prompt",),
    "generate": ("prompt",),
}


@dataclass(kw_only=True)
class TaskGroup:
    """Several tasks and one figure for all."""

    name: str = ""
    about: str = ""
    tasks: list[str] = field(default_factory=list)
    """Names of tasks or of other groups."""
    aggregate: Literal["mean", "centred", "none"] = "mean"
    """mean: of the metrics that count; centred: of (metric - chance) / (1 - chance); none: no figure."""

    def __post_init__(self) -> None:
        require_setting(bool(self.tasks), f"tasks of {self.name or 'the group'} is empty", "name tasks")
