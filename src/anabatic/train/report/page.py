"""`report.html`: one self-contained page about a run or a pipeline, for a browser without a network."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from anabatic.config.pipeline import PipelineJob
from anabatic.core.formatting import format_count, format_size
from anabatic.core.json_reader import to_finite_number
from anabatic.core.language import Language, LocalizedText, choose_language
from anabatic.core.paths import RunFolder, write_atomic
from anabatic.monitor.run_data import GeneratedSample, RunData, parse_time, read_pipeline, read_run
from anabatic.train.report.charts import Chart, FigureCard, build_panels
from anabatic.train.report.localized_page import (
    EVENT_WORDS,
    FIELD_WORDS,
    MISSING,
    WORDS,
    as_text,
    describe_duration,
    format_date,
    get_known_text,
    get_text,
    join_texts,
    render_page,
)
from anabatic.train.report.run_facts import (
    NamedSource,
    describe_data,
    describe_machine,
    describe_sources,
    differ_in_kind,
    parse_sources,
    read_data_sources,
    summarize_runs,
)

MAX_TEXT_CHARS = 4000
MAX_SAMPLES = 8
MAX_EVENTS = 200
_PICTURE = re.compile(r"data:image/png;base64,[A-Za-z0-9+/=]{1,200000}")
_STATE_SIGNS = {"done": "✓", "skip": "✓", "fail": "✕", "interrupted": "…", "run": "…", "stale": "…", "": "○"}


def write_run_report(folder: Path, language: Language | None = None, path: Path | None = None) -> Path:
    """Write the page about one training run and return its path.

    Parts of the run that are missing are missing from the page; the page is written whole or not at all.

    Args:
        language: that the page is written in, before it asks the browser for the reader's; None: the locale's.
        path: of the page; None: `folder/report.html`.

    Raises:
        Failure: the disk is full or the folder refuses writes.
    """
    run = read_run(folder, folder.resolve().name)
    path = path or RunFolder(folder).report
    write_atomic(path, render_run_page(folder, run, language))
    return path


def render_run_page(folder: Path, run: RunData, language: Language | None = None) -> str:
    """Return the page about one training run."""
    return _render_page(folder, run.name, [run], language)


def write_pipeline_report(out: Path, job: PipelineJob, language: Language | None = None) -> Path:
    """Write `out/report.html` about all stages of `job`, those not yet run included, and return its path.

    Args:
        language: as of `write_run_report`.

    Raises:
        Failure: the disk is full or the folder refuses writes.
    """
    runs = read_pipeline(out, job)
    path = RunFolder(out).report
    write_atomic(path, _render_page(out, job.title or out.resolve().name, runs, language, table=True))
    return path


def _render_page(
    folder: Path, title: str, runs: Sequence[RunData], language: Language | None, table: bool = False
) -> str:
    sections = [_build_section(run) for run in runs]
    return render_page(
        "report.html.j2",
        language or choose_language(None, os.environ),
        title=title,
        heading=get_text("report"),
        head=_header_parts(folder, runs),
        machine=describe_machine(event for run in runs for event in run.events),
        notes=[(run.name, note) for run in runs for note in describe_notes(run)],
        bits=_bits_per_byte(runs),
        tasks=_latest_tasks(runs),
        facts=summarize_runs(runs) if table else [],
        stages=_stage_rows(runs) if table else [],
        sections=[section for section in sections if section["large"] or not table],
        others=[section for section in sections if not section["large"]],
        evaluations=[(run.name, rows) for run in runs if (rows := _task_scores(run))],
        chats=[(run.name, [_format_message(row) for row in run.chat]) for run in runs if run.chat],
    )


def describe_notes(run: RunData) -> list[LocalizedText]:
    """Return the texts of what is wrong with a run."""
    return [get_text(key, **figures) for key, figures in run.notes]


def _header_parts(folder: Path, runs: Sequence[RunData]) -> list[LocalizedText]:
    ended = max((run.end_time for run in runs if run.end_time is not None), default=None)
    seconds = sum(run.seconds or 0.0 for run in runs)
    parts = [format_date(ended)] if ended else []
    return [*map(as_text, parts), *([describe_duration(seconds)] if seconds else []), as_text(str(folder))]


def _bits_per_byte(runs: Sequence[RunData]) -> dict[str, Any] | None:
    """Return the last evaluation's bits per byte, those of gzip, and the text they were measured on."""
    for index, run in reversed(list(enumerate(runs))):
        values = run.evaluation.get("bits_per_byte")
        model = to_finite_number(values.get("model")) if isinstance(values, dict) else None
        if not isinstance(values, dict) or model is None:
            continue
        gzip = to_finite_number(values.get("gzip9"))
        top = max(model, gzip or 0.0) or 1.0
        bars = [(get_text("this_model"), f"{model:.3f}", 100 * model / top, True)]
        verdict = None
        if gzip:
            bars.append((as_text("gzip -9"), f"{gzip:.3f}", 100 * gzip / top, False))
            key = "fewer_bits" if model <= gzip else "more_bits"
            verdict = get_text(key, share=f"{abs(1 - model / gzip):.0%}", other="gzip -9")
        amount = to_finite_number(values.get("bytes"))
        over = get_text("heldout_bytes", size=format_size(amount)) if amount else get_text("heldout_text")
        sources = parse_sources(values.get("sources"))
        return {
            "stage": get_text("out_of_date", name=run.name) if run.state == "stale" else as_text(run.name),
            "value": f"{model:.3f}",
            "verdict": verdict,
            "bars": bars,
            "over": get_text("heldout_of", amount=over, sources=describe_sources(sources)) if sources else over,
            "warning": _warn_of_other_kind(sources, runs[: index + 1]),
        }
    return None


def _warn_of_other_kind(sources: Sequence[NamedSource], runs: Sequence[RunData]) -> LocalizedText | None:
    """Return a warning if an evaluation read another kind of text than the training before it."""
    for run in reversed(runs):
        data = read_data_sources(run) if run.curves else None
        if data is not None:
            if not differ_in_kind(data.train, sources):
                return None
            return get_text("data.eval_other_kind", sources=describe_sources(data.train), name=run.name)
    return None


def _latest_tasks(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    return next((rows for run in reversed(runs) if (rows := _task_scores(run))), [])


def _task_scores(run: RunData) -> list[dict[str, Any]]:
    tasks = run.evaluation.get("tasks")
    if not isinstance(tasks, dict):
        return []
    return [_format_task(str(name), task) for name, task in tasks.items() if isinstance(task, dict)]


def _format_task(name: str, task: dict[str, Any]) -> dict[str, Any]:
    accuracy, chance, blind, num_items = (
        to_finite_number(task.get(key)) for key in ("accuracy", "chance", "without_picture", "n")
    )
    examples = task.get("examples")
    rows = [row for row in examples if isinstance(row, dict)] if isinstance(examples, list) else []
    return {
        "name": name,
        "accuracy": MISSING if accuracy is None else f"{accuracy:.1%}",
        "chance": MISSING if chance is None else f"{chance:.1%}",
        "blind": None if blind is None else get_text("without_picture", value=f"{blind:.1%}"),
        "width": 100 * min(1.0, max(0.0, accuracy or 0.0)),
        "mark": None if chance is None else 100 * min(1.0, max(0.0, chance)),
        "asked": None if num_items is None else get_text("questions", count=f"{num_items:,.0f}"),
        "examples": [
            {
                **{key: _shorten_text(_to_text(row.get(key, ""))) for key in ("prompt", "reply", "answer")},
                "correct": row.get("correct") is True,
                "picture": picture if _PICTURE.fullmatch(picture := str(row.get("picture"))) else None,
            }
            for row in rows
        ],
    }


def _stage_rows(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    longest = max((run.seconds or 0.0 for run in runs), default=0.0) or 1.0
    rows = []
    for run in runs:
        is_known = run.state in _STATE_SIGNS
        tokens = to_finite_number(run.summary.get("tokens"))
        loss, what = _final_loss(run)
        rows.append(
            {
                "name": run.name,
                "title": run.title or run.command,
                "state": run.state or "none",
                "word": get_text(f"state.{run.state}") if is_known else as_text(run.state),
                "sign": _STATE_SIGNS.get(run.state, "·"),
                "seconds": MISSING if run.seconds is None else describe_duration(run.seconds),
                "share": 100 * (run.seconds or 0.0) / longest,
                "tokens": MISSING if tokens is None else format_count(tokens),
                "loss": MISSING if loss is None else f"{loss:.3f}",
                "what": what,
            }
        )
    return rows


def _final_loss(run: RunData) -> tuple[float | None, LocalizedText | None]:
    for key, curve in (("valid_reward", "valid_reward"), ("valid_loss", "valid_loss"), ("train_loss", "loss")):
        value = to_finite_number(run.summary.get(key))
        if value is None:
            value = next((y for _, y in reversed(run.curves.get(curve, [])) if y is not None), None)
        if value is not None:
            return value, get_text(f"what.{key}")
    return None, None


def describe_run(run: RunData) -> dict[str, Any]:
    """Return what is shown of a run next to its charts: facts, samples, events, config; all of it plain English."""
    described: dict[str, Any] = _to_english(_describe_run(run))
    return described


def _to_english(value: Any) -> Any:
    if isinstance(value, LocalizedText):
        return value.en
    if isinstance(value, dict):
        return {key: _to_english(part) for key, part in value.items()}
    return [_to_english(part) for part in value] if isinstance(value, (list, tuple)) else value


def _describe_run(run: RunData) -> dict[str, Any]:
    began = next((time for event in run.events if (time := parse_time(event.get("time"))) is not None), None)
    return {
        "name": run.name,
        "title": run.title or run.command,
        "facts": summarize_runs([run]) if run.curves else [],
        "samples": _group_samples(run.samples),
        "events": [_format_event(event, began) for event in run.events[-MAX_EVENTS:]],
        "hidden_events": max(0, len(run.events) - MAX_EVENTS),
        "config": run.config,
    }


def _build_section(run: RunData) -> dict[str, Any]:
    panels = build_panels(run)
    charts = [panel for panel in panels if isinstance(panel, Chart)]
    section = {
        **_describe_run(run),
        "cards": [panel for panel in panels if isinstance(panel, FigureCard)],
        "main": charts[0] if charts and charts[0] is panels[0] else None,
        "charts": [chart for chart in charts if chart is not panels[0]],
        "data": None,
        "data_warning": None,
    }
    data = read_data_sources(run) if run.curves else None
    if data is not None:
        section["data"] = describe_data(data)
        section["data_warning"] = get_text("data.other_kind") if data.is_other_kind else None
    return {**section, "large": bool(panels or section["samples"])}


def _group_samples(samples: Sequence[GeneratedSample]) -> list[dict[str, Any]]:
    """Group samples by prompt, up to eight of each, the first and the last among them."""
    prompts: dict[str, list[GeneratedSample]] = {}
    for sample in samples:
        prompts.setdefault(sample.prompt, []).append(sample)
    result = []
    for prompt, all_texts in prompts.items():
        num_shown = min(MAX_SAMPLES, len(all_texts))
        chosen = [all_texts[round(i * (len(all_texts) - 1) / max(1, num_shown - 1))] for i in range(num_shown)]
        texts = [(_format_sample_step(sample), _shorten_text(sample.text)) for sample in chosen]
        result.append({"prompt": _shorten_text(prompt), "texts": texts, "all": len(all_texts)})
    return result


def _format_sample_step(sample: GeneratedSample) -> LocalizedText:
    step = f"{sample.step:,}"
    return (
        as_text(step) if sample.reward is None else get_text("sample_reward", step=step, reward=f"{sample.reward:.3g}")
    )


def _format_event(event: dict[str, Any], began: float | None) -> tuple[LocalizedText, LocalizedText, LocalizedText]:
    when = parse_time(event.get("time"))
    elapsed = as_text("")
    if when is not None and began is not None:
        elapsed = join_texts(["+", describe_duration(max(0.0, when - began))], "", "")
    rest = [
        join_texts([get_known_text(FIELD_WORDS, key), _describe_value(value)], " ", " ")
        for key, value in event.items()
        if key not in ("time", "event")
    ]
    return elapsed, get_known_text(EVENT_WORDS, str(event.get("event", ""))), join_texts(rest)


def _describe_value(value: Any) -> str | LocalizedText:
    sources = parse_sources(value)  # empty unless the value names sources
    return describe_sources(sources) if sources else _to_text(value)


def _format_message(row: dict[str, Any]) -> tuple[str, LocalizedText, LocalizedText]:
    role = str(row.get("role", ""))
    word = get_text(f"role.{role}") if f"role.{role}" in WORDS else as_text(role)
    return role, word, _shorten_text(_to_text(row.get("content", "")))


def _to_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _shorten_text(text: str) -> LocalizedText:
    rest = len(text) - MAX_TEXT_CHARS
    if rest <= 0:
        return as_text(text)
    return get_text("more_characters", text=text[:MAX_TEXT_CHARS], count=f"{rest:,}")
