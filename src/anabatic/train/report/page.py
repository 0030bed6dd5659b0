"""`report.html`: one self-contained page about a run or a pipeline, for a browser without a network."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from anabatic.config.pipeline import PipelineJob
from anabatic.core.formatting import format_count, format_duration, format_size
from anabatic.core.json_reader import to_finite_number
from anabatic.core.paths import RunFolder, write_atomic
from anabatic.train.report import run_data
from anabatic.train.report.charts import Chart, Curve, draw_chart, draw_levels_chart, smooth_points
from anabatic.train.report.run_data import GeneratedSample, RunData, parse_time, read_pipeline, read_run

TEMPLATE_FOLDER = Path(__file__).parent
MAX_TEXT_CHARS = 4000
MAX_SAMPLES = 8
MAX_EVENTS = 200
MISSING = "–"
_HELDOUT_METRICS = ("bpb", "perplexity", "accuracy", "reward", "answer_tokens")
_ANSWER_SIDES = ("chosen", "rejected")

_STATE_LABELS = {
    "done": ("done", "✓"),
    "skip": ("up to date", "✓"),
    "fail": ("failed", "✕"),
    "interrupted": ("interrupted", "…"),
    "run": ("unfinished", "…"),
    "stale": ("out of date", "…"),
    "": ("not run", "○"),
}

# Control characters are spelled out, what no HTML file can hold becomes the replacement character.
_UNSAFE_CHARACTERS: dict[int, int | str] = {
    **{code: f"\\x{code:02x}" for code in (*range(32), *range(0x7F, 0xA0)) if code not in (9, 10, 13)},
    **{code: "\ufffd" for code in (*range(0xD800, 0xE000), 0xFFFE, 0xFFFF)},
}


def write_run_report(folder: Path) -> Path:
    """Write `folder/report.html` about one training run and return its path.

    Parts of the run that are missing are missing from the page; the page is written whole or not at all.

    Raises:
        Failure: the disk is full or the folder refuses writes.
    """
    run = read_run(folder, folder.resolve().name)
    return _write_page(folder, render_run_page(folder, run))


def render_run_page(folder: Path, run: RunData) -> str:
    """Return the page about one training run."""
    return _render_page(folder, run.name, [run])


def write_pipeline_report(out: Path, job: PipelineJob) -> Path:
    """Write `out/report.html` about all stages of `job`, those not yet run included, and return its path.

    Raises:
        Failure: the disk is full or the folder refuses writes.
    """
    return _write_page(out, _render_page(out, job.title or out.resolve().name, read_pipeline(out, job), table=True))


def _write_page(folder: Path, page: str) -> Path:
    path = RunFolder(folder).report
    write_atomic(path, page)
    return path


def _render_page(folder: Path, title: str, runs: Sequence[RunData], table: bool = False) -> str:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATE_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    sections = [_build_section(run) for run in runs]
    script = (TEMPLATE_FOLDER / "report.js").read_text(encoding="utf-8")
    page = environment.get_template("report.html.j2").render(
        title=title,
        style=Markup((TEMPLATE_FOLDER / "report.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        head=_header_parts(folder, runs),
        machine=_machine_rows(runs),
        notes=[(run.name, note) for run in runs for note in run.notes],
        bits=_bits_per_byte(runs),
        tasks=_latest_tasks(runs),
        facts=_summary_facts(runs) if table else [],
        stages=_stage_rows(runs) if table else [],
        sections=[section for section in sections if section["large"] or not table],
        others=[section for section in sections if not section["large"]],
        evaluations=[(run.name, rows) for run in runs if (rows := _task_scores(run))],
        chats=[(run.name, [_format_message(row) for row in run.chat]) for run in runs if run.chat],
        written=_format_date(time.time()),
    )
    return page.translate(_UNSAFE_CHARACTERS)


def _header_parts(folder: Path, runs: Sequence[RunData]) -> list[str]:
    ended = max((run.end_time for run in runs if run.end_time is not None), default=None)
    seconds = sum(run.seconds or 0.0 for run in runs)
    parts = [_format_date(ended) if ended else "", format_duration(seconds) if seconds else "", str(folder)]
    return [part for part in parts if part]


def _machine_rows(runs: Sequence[RunData]) -> list[tuple[str, str]]:
    devices = [event for run in runs for event in run.events if event.get("event") == "device"]
    names = dict.fromkeys(str(event.get("name", "")) for event in devices if event.get("type") != "cpu")
    formats = dict.fromkeys(str(event["dtype"]) for event in devices if event.get("dtype"))
    rows = [("processor", run_data.describe_cpu()), ("memory", run_data.describe_memory())]
    if devices:
        rows.append(("accelerator", ", ".join(names) or "none, trained on the processor"))
        rows.append(("number format", ", ".join(formats) or MISSING))
    rows.append(("software", " · ".join(f"{name} {version}" for name, version in run_data.list_versions())))
    if commit := run_data.find_commit(TEMPLATE_FOLDER):
        rows.append(("commit", commit))
    return rows


def _bits_per_byte(runs: Sequence[RunData]) -> dict[str, Any] | None:
    """The last evaluation's bits per byte compared with gzip's."""
    for run in reversed(runs):
        values = run.evaluation.get("bits_per_byte")
        model = to_finite_number(values.get("model")) if isinstance(values, dict) else None
        if not isinstance(values, dict) or model is None:
            continue
        gzip = to_finite_number(values.get("gzip9"))
        top = max(model, gzip or 0.0) or 1.0
        bars = [("this model", f"{model:.3f}", 100 * model / top, True)]
        verdict = ""
        if gzip:
            bars.append(("gzip -9", f"{gzip:.3f}", 100 * gzip / top, False))
            verdict = f"{abs(1 - model / gzip):.0%} {'fewer' if model <= gzip else 'more'} bits than gzip -9"
        amount = to_finite_number(values.get("bytes"))
        return {
            "stage": f"{run.name} (out of date)" if run.state == "stale" else run.name,
            "value": f"{model:.3f}",
            "verdict": verdict,
            "bars": bars,
            "over": f"{format_size(amount)} of held-out text" if amount else "held-out text",
        }
    return None


def _latest_tasks(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    return next((rows for run in reversed(runs) if (rows := _task_scores(run))), [])


def _task_scores(run: RunData) -> list[dict[str, Any]]:
    tasks = run.evaluation.get("tasks")
    if not isinstance(tasks, dict):
        return []
    return [_format_task(str(name), task) for name, task in tasks.items() if isinstance(task, dict)]


def _format_task(name: str, task: dict[str, Any]) -> dict[str, Any]:
    accuracy, chance, num_items = (to_finite_number(task.get(key)) for key in ("accuracy", "chance", "n"))
    examples = task.get("examples")
    rows = [row for row in examples if isinstance(row, dict)] if isinstance(examples, list) else []
    return {
        "name": name,
        "accuracy": MISSING if accuracy is None else f"{accuracy:.1%}",
        "chance": MISSING if chance is None else f"{chance:.1%}",
        "width": 100 * min(1.0, max(0.0, accuracy or 0.0)),
        "mark": None if chance is None else 100 * min(1.0, max(0.0, chance)),
        "asked": "" if num_items is None else f"{num_items:,.0f} questions",
        "examples": [
            {
                **{key: _shorten_text(_to_text(row.get(key, ""))) for key in ("prompt", "reply", "answer")},
                "correct": row.get("correct") is True,
            }
            for row in rows
        ],
    }


def _summary_facts(runs: Sequence[RunData]) -> list[tuple[str, str]]:
    """The strip of numbers under the scores."""
    summaries = [run.summary for run in runs if run.curves or "tokens" in run.summary]
    tokens, seconds, steps = (
        [value for summary in summaries if (value := to_finite_number(summary.get(key))) is not None]
        for key in ("tokens", "seconds", "steps")
    )
    params = [value for summary in summaries if (value := to_finite_number(summary.get("params")))]
    peaks = [value for summary in summaries if (value := to_finite_number(summary.get("peak_memory_bytes")))]
    rows = [
        ("parameters", format_count(params[-1]) if params else ""),
        ("training tokens", format_count(sum(tokens)) if tokens else ""),
        ("optimizer steps", f"{sum(steps):,.0f}" if steps else ""),
        ("training time", format_duration(sum(seconds)) if seconds else ""),
        ("tokens per second", format_count(sum(tokens) / sum(seconds)) if tokens and sum(seconds) else ""),
        ("peak memory", format_size(max(peaks)) if peaks else ""),
        *_device_facts(summaries),
    ]
    return [(name, value) for name, value in rows if value]


def _device_facts(summaries: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Means over the training; of several stages each counts as long as it took."""

    def weighted_mean(key: str) -> float | None:
        known = [
            (value, to_finite_number(each.get("seconds")) or 0.0)
            for each in summaries
            if (value := to_finite_number(each.get(key))) is not None
        ]
        weight = sum(seconds for _, seconds in known)
        return sum(value * seconds for value, seconds in known) / weight if weight else None

    util, power, energy = (
        weighted_mean("device_util_pct"),
        weighted_mean("device_power_w"),
        weighted_mean("energy_wh_per_mtoken"),
    )
    return [
        ("device utilisation", "" if util is None else f"{util:.0f} %"),
        ("device power", "" if power is None else f"{power:,.0f} W"),
        ("energy per million tokens", "" if energy is None else f"{energy:,.3g} Wh"),
    ]


def _stage_rows(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    longest = max((run.seconds or 0.0 for run in runs), default=0.0) or 1.0
    rows = []
    for run in runs:
        word, sign = _STATE_LABELS.get(run.state, (run.state, "·"))
        tokens = to_finite_number(run.summary.get("tokens"))
        loss, what = _final_loss(run)
        rows.append(
            {
                "name": run.name,
                "title": run.title or run.command,
                "state": run.state or "none",
                "word": word,
                "sign": sign,
                "seconds": MISSING if run.seconds is None else format_duration(run.seconds),
                "share": 100 * (run.seconds or 0.0) / longest,
                "tokens": MISSING if tokens is None else format_count(tokens),
                "loss": MISSING if loss is None else f"{loss:.3f}",
                "what": what,
            }
        )
    return rows


def _final_loss(run: RunData) -> tuple[float | None, str]:
    last = (
        ("valid_reward", "valid_reward", "held-out reward"),
        ("valid_loss", "valid_loss", "held-out"),
        ("train_loss", "loss", "training"),
    )
    for key, curve, what in last:
        value = to_finite_number(run.summary.get(key))
        if value is None:
            value = next((y for _, y in reversed(run.curves.get(curve, [])) if y is not None), None)
        if value is not None:
            return value, what
    return None, ""


def describe_run(run: RunData) -> dict[str, Any]:
    """Return what is shown of a run next to its charts: facts, samples, events, config; all of it plain text."""
    began = next((time for event in run.events if (time := parse_time(event.get("time"))) is not None), None)
    return {
        "name": run.name,
        "title": run.title or run.command,
        "facts": _summary_facts([run]) if run.curves else [],
        "samples": _group_samples(run.samples),
        "events": [_format_event(event, began) for event in run.events[-MAX_EVENTS:]],
        "hidden_events": max(0, len(run.events) - MAX_EVENTS),
        "config": run.config,
    }


def _build_section(run: RunData) -> dict[str, Any]:
    charts = _build_charts(run)
    section = {**describe_run(run), "loss": charts[0], "charts": [chart for chart in charts[1:] if chart]}
    return {**section, "large": any(section[key] for key in ("loss", "charts", "samples"))}


def _build_charts(run: RunData) -> list[Chart | None]:
    """The loss first, then the small ones, on one horizontal axis; None where the run has no such numbers."""
    every = [step for points in run.curves.values() for step, _ in points]
    resumes = [event for event in run.events if event.get("event") == "resume"]
    common: dict[str, Any] = {
        "steps": (min(every), max(every)) if every else None,
        "marks": [(int(step), "resumed") for event in resumes if (step := to_finite_number(event.get("step")))],
    }
    losses = [
        *_smoothed_curves(run, "loss", "training"),
        Curve("held out", run.curves.get("valid_loss", []), "points", 2),
    ]
    held_out = {key: [Curve("held out", run.curves.get(f"valid_{key}", []), "points", 2)] for key in _HELDOUT_METRICS}
    accuracy = [*_smoothed_curves(run, "accuracy", "training"), *held_out["accuracy"]]
    answers = [Curve(side, run.curves.get(f"rewards/{side}", []), colour=n) for n, side in enumerate(_ANSWER_SIDES, 1)]
    answered = [*_smoothed_curves(run, "answer_tokens", "training"), *held_out["answer_tokens"]]
    rewarded = bool(run.curves.get("reward"))
    rate = [Curve("learning rate", run.curves.get("lr", []))]
    unit = "of a pair" if answers[0].points else "of the advantages" if rewarded else "nats per token"
    loss = draw_chart(f"Loss, {unit}", losses, lambda y: f"{y:.4g}", **common)
    reward = draw_chart(
        "Mean reward",
        [*_smoothed_curves(run, "reward", "training"), *held_out["reward"]],
        _format_three_digits,
        **common,
    )
    return [
        reward if rewarded else loss,
        loss if rewarded else None,
        draw_chart("Held-out bits per byte", held_out["bpb"], lambda y: f"{y:.4g}", **common),
        draw_chart("Held-out perplexity", held_out["perplexity"], lambda y: f"{y:.4g}", **common),
        draw_chart("Accuracy", accuracy, lambda y: f"{100 * y:.4g} %", **common),
        draw_chart("Rewards: chosen, rejected", answers, lambda y: f"{y:.3g}", **common),
        draw_chart("Tokens of an answer", answered, _format_three_digits, zero=True, **common),
        draw_chart(
            "Truncated answers", _smoothed_curves(run, "truncated"), lambda y: f"{100 * y:.4g} %", zero=True, **common
        ),
        draw_chart(
            "Entropy of the answers, nats per token",
            _smoothed_curves(run, "entropy"),
            _format_three_digits,
            zero=True,
            **common,
        ),
        draw_chart(
            "Divergence from the reference, nats per token",
            _smoothed_curves(run, "kl"),
            _format_three_digits,
            zero=True,
            **common,
        ),
        draw_chart(
            "Log-probability: engine to training",
            _smoothed_curves(run, "logprob_diff"),
            _format_three_digits,
            zero=True,
            **common,
        ),
        draw_chart("Learning rate", rate, lambda y: f"{y:.3g}", zero=True, **common),
        draw_chart("Gradient norm", _smoothed_curves(run, "grad_norm"), lambda y: f"{y:.3g}", zero=True, **common),
        draw_chart("Tokens per second", _smoothed_curves(run, "tokens_per_s"), _format_count, zero=True, **common),
        draw_chart(
            "Device utilisation: mean, least, most",
            _utilization_curves(run),
            lambda y: f"{y:.0f} %",
            zero=True,
            **common,
        ),
        draw_chart(
            "Device power", _smoothed_curves(run, "device_power_w_mean"), lambda y: f"{y:,.0f} W", zero=True, **common
        ),
        draw_levels_chart(run.level_counts, common["steps"]),
    ]


def _utilization_curves(run: RunData) -> list[Curve]:
    kinds = (("mean", "line", 1), ("min", "raw", 2), ("max", "raw", 2))
    return [Curve(kind, run.curves.get(f"device_util_pct_{kind}", []), style, colour) for kind, style, colour in kinds]


def _format_three_digits(number: float) -> str:
    return f"{number:.3g}"


def _format_count(number: float) -> str:
    return format_count(number).replace(".0", "")


def _smoothed_curves(run: RunData, key: str, name: str = "") -> list[Curve]:
    """A measured curve, faint, under its moving average; the curve alone when it is short."""
    points = run.curves.get(key, [])
    smoothed = smooth_points(points)
    space = f"{name}, " if name else ""
    if smoothed is points:
        return [Curve(name or "measured", points)]
    return [Curve(f"{space}measured", points, "raw"), Curve(f"{space}smoothed", smoothed)]


def _group_samples(samples: Sequence[GeneratedSample]) -> list[dict[str, Any]]:
    """By prompt: what the model wrote at up to eight moments, the first and the last among them."""
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


def _format_sample_step(sample: GeneratedSample) -> str:
    return f"{sample.step:,}" if sample.reward is None else f"{sample.step:,} (reward {sample.reward:.3g})"


def _format_event(event: dict[str, Any], began: float | None) -> tuple[str, str, str]:
    when = parse_time(event.get("time"))
    elapsed = "" if when is None or began is None else f"+{format_duration(max(0.0, when - began))}"
    rest = [f"{key} {_to_text(value)}" for key, value in event.items() if key not in ("time", "event")]
    return elapsed, str(event.get("event", "")), ", ".join(rest)


def _format_message(row: dict[str, Any]) -> tuple[str, str]:
    return str(row.get("role", "")), _shorten_text(_to_text(row.get("content", "")))


def _to_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _shorten_text(text: str) -> str:
    rest = len(text) - MAX_TEXT_CHARS
    return text if rest <= 0 else f"{text[:MAX_TEXT_CHARS]} … ({rest:,} characters more)"


def _format_date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
