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
from anabatic.core.jsonl import number
from anabatic.core.paths import RunFolder, write_atomic
from anabatic.core.text import count, duration, size
from anabatic.train import report_machine
from anabatic.train.report_charts import Chart, Line, chart, smooth
from anabatic.train.report_levels import levels_chart
from anabatic.train.report_read import Run, Sample, moment, read_pipeline, read_run

HERE = Path(__file__).parent
LONGEST_TEXT = 4000
MOST_SAMPLES = 8
MOST_EVENTS = 200
NONE = "–"
_HELD_OUT = ("bpb", "perplexity", "accuracy", "reward", "answer_tokens")
_ANSWERS = ("chosen", "rejected")

_STATES = {
    "done": ("done", "✓"),
    "skip": ("up to date", "✓"),
    "fail": ("failed", "✕"),
    "interrupted": ("interrupted", "…"),
    "run": ("unfinished", "…"),
    "stale": ("out of date", "…"),
    "": ("not run", "○"),
}

# Control characters are spelled out, what no HTML file can hold becomes the replacement character.
_UNSAFE: dict[int, int | str] = {
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
    return _write(folder, run_page(folder, run))


def run_page(folder: Path, run: Run) -> str:
    """Return the page about one training run."""
    return _page(folder, run.name, [run])


def write_pipeline_report(out: Path, job: PipelineJob) -> Path:
    """Write `out/report.html` about all stages of `job`, those not yet run included, and return its path.

    Raises:
        Failure: the disk is full or the folder refuses writes.
    """
    return _write(out, _page(out, job.title or out.resolve().name, read_pipeline(out, job), table=True))


def _write(folder: Path, page: str) -> Path:
    path = RunFolder(folder).report
    write_atomic(path, page)
    return path


def _page(folder: Path, title: str, runs: Sequence[Run], table: bool = False) -> str:
    environment = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    sections = [_section(run) for run in runs]
    script = (HERE / "report.js").read_text(encoding="utf-8")
    page = environment.get_template("report.html.j2").render(
        title=title,
        style=Markup((HERE / "report.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        head=_head(folder, runs),
        machine=_machine(runs),
        notes=[(run.name, note) for run in runs for note in run.notes],
        bits=_bits(runs),
        tasks=_latest_tasks(runs),
        facts=_facts(runs) if table else [],
        stages=_stages(runs) if table else [],
        sections=[section for section in sections if section["large"] or not table],
        others=[section for section in sections if not section["large"]],
        evaluations=[(run.name, rows) for run in runs if (rows := _tasks(run))],
        chats=[(run.name, [_message(row) for row in run.chat]) for run in runs if run.chat],
        written=_date(time.time()),
    )
    return page.translate(_UNSAFE)


def _head(folder: Path, runs: Sequence[Run]) -> list[str]:
    ended = max((run.ended for run in runs if run.ended is not None), default=None)
    seconds = sum(run.seconds or 0.0 for run in runs)
    parts = [_date(ended) if ended else "", duration(seconds) if seconds else "", str(folder)]
    return [part for part in parts if part]


def _machine(runs: Sequence[Run]) -> list[tuple[str, str]]:
    devices = [event for run in runs for event in run.events if event.get("event") == "device"]
    names = dict.fromkeys(str(event.get("name", "")) for event in devices if event.get("type") != "cpu")
    formats = dict.fromkeys(str(event["dtype"]) for event in devices if event.get("dtype"))
    rows = [("processor", report_machine.cpu()), ("memory", report_machine.memory())]
    if devices:
        rows.append(("accelerator", ", ".join(names) or "none, trained on the processor"))
        rows.append(("number format", ", ".join(formats) or NONE))
    rows.append(("software", " · ".join(f"{name} {version}" for name, version in report_machine.versions())))
    if commit := report_machine.commit(HERE):
        rows.append(("commit", commit))
    return rows


def _bits(runs: Sequence[Run]) -> dict[str, Any] | None:
    """The last evaluation's bits per byte beside gzip's."""
    for run in reversed(runs):
        values = run.evaluation.get("bits_per_byte")
        model = number(values.get("model")) if isinstance(values, dict) else None
        if not isinstance(values, dict) or model is None:
            continue
        gzip = number(values.get("gzip9"))
        top = max(model, gzip or 0.0) or 1.0
        bars = [("this model", f"{model:.3f}", 100 * model / top, True)]
        verdict = ""
        if gzip:
            bars.append(("gzip -9", f"{gzip:.3f}", 100 * gzip / top, False))
            verdict = f"{abs(1 - model / gzip):.0%} {'fewer' if model <= gzip else 'more'} bits than gzip -9"
        amount = number(values.get("bytes"))
        return {
            "stage": f"{run.name} (out of date)" if run.state == "stale" else run.name,
            "value": f"{model:.3f}",
            "verdict": verdict,
            "bars": bars,
            "over": f"{size(amount)} of held-out text" if amount else "held-out text",
        }
    return None


def _latest_tasks(runs: Sequence[Run]) -> list[dict[str, Any]]:
    return next((rows for run in reversed(runs) if (rows := _tasks(run))), [])


def _tasks(run: Run) -> list[dict[str, Any]]:
    tasks = run.evaluation.get("tasks")
    if not isinstance(tasks, dict):
        return []
    return [_task(str(name), task) for name, task in tasks.items() if isinstance(task, dict)]


def _task(name: str, task: dict[str, Any]) -> dict[str, Any]:
    accuracy, chance, asked = (number(task.get(key)) for key in ("accuracy", "chance", "n"))
    examples = task.get("examples")
    rows = [row for row in examples if isinstance(row, dict)] if isinstance(examples, list) else []
    return {
        "name": name,
        "accuracy": NONE if accuracy is None else f"{accuracy:.1%}",
        "chance": NONE if chance is None else f"{chance:.1%}",
        "width": 100 * min(1.0, max(0.0, accuracy or 0.0)),
        "mark": None if chance is None else 100 * min(1.0, max(0.0, chance)),
        "asked": "" if asked is None else f"{asked:,.0f} questions",
        "examples": [
            {
                **{key: _shorten(_plain(row.get(key, ""))) for key in ("prompt", "reply", "answer")},
                "correct": row.get("correct") is True,
            }
            for row in rows
        ],
    }


def _facts(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """The strip of numbers under the scores."""
    summaries = [run.summary for run in runs if run.curves or "tokens" in run.summary]
    tokens, seconds, steps = (
        [value for summary in summaries if (value := number(summary.get(key))) is not None]
        for key in ("tokens", "seconds", "steps")
    )
    params = [value for summary in summaries if (value := number(summary.get("params")))]
    peaks = [value for summary in summaries if (value := number(summary.get("peak_memory_bytes")))]
    rows = [
        ("parameters", count(params[-1]) if params else ""),
        ("training tokens", count(sum(tokens)) if tokens else ""),
        ("optimizer steps", f"{sum(steps):,.0f}" if steps else ""),
        ("training time", duration(sum(seconds)) if seconds else ""),
        ("tokens per second", count(sum(tokens) / sum(seconds)) if tokens and sum(seconds) else ""),
        ("peak memory", size(max(peaks)) if peaks else ""),
        *_device_facts(summaries),
    ]
    return [(name, value) for name, value in rows if value]


def _device_facts(summaries: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Means over the training; of several stages each counts as long as it took."""

    def mean(key: str) -> float | None:
        known = [
            (value, number(each.get("seconds")) or 0.0)
            for each in summaries
            if (value := number(each.get(key))) is not None
        ]
        weight = sum(seconds for _, seconds in known)
        return sum(value * seconds for value, seconds in known) / weight if weight else None

    util, power, energy = mean("device_util_pct"), mean("device_power_w"), mean("energy_wh_per_mtoken")
    return [
        ("device utilisation", "" if util is None else f"{util:.0f} %"),
        ("device power", "" if power is None else f"{power:,.0f} W"),
        ("energy per million tokens", "" if energy is None else f"{energy:,.3g} Wh"),
    ]


def _stages(runs: Sequence[Run]) -> list[dict[str, Any]]:
    longest = max((run.seconds or 0.0 for run in runs), default=0.0) or 1.0
    rows = []
    for run in runs:
        word, sign = _STATES.get(run.state, (run.state, "·"))
        tokens = number(run.summary.get("tokens"))
        loss, what = _final_loss(run)
        rows.append(
            {
                "name": run.name,
                "title": run.title or run.command,
                "state": run.state or "none",
                "word": word,
                "sign": sign,
                "seconds": NONE if run.seconds is None else duration(run.seconds),
                "share": 100 * (run.seconds or 0.0) / longest,
                "tokens": NONE if tokens is None else count(tokens),
                "loss": NONE if loss is None else f"{loss:.3f}",
                "what": what,
            }
        )
    return rows


def _final_loss(run: Run) -> tuple[float | None, str]:
    last = (
        ("valid_reward", "valid_reward", "held-out reward"),
        ("valid_loss", "valid_loss", "held-out"),
        ("train_loss", "loss", "training"),
    )
    for key, curve, what in last:
        value = number(run.summary.get(key))
        if value is None:
            value = next((y for _, y in reversed(run.curves.get(curve, [])) if y is not None), None)
        if value is not None:
            return value, what
    return None, ""


def story(run: Run) -> dict[str, Any]:
    """Return what is told of a run beside its charts: facts, samples, events, config; all of it plain text."""
    began = next((time for event in run.events if (time := moment(event.get("time"))) is not None), None)
    return {
        "name": run.name,
        "title": run.title or run.command,
        "facts": _facts([run]) if run.curves else [],
        "samples": _samples(run.samples),
        "events": [_event(event, began) for event in run.events[-MOST_EVENTS:]],
        "hidden_events": max(0, len(run.events) - MOST_EVENTS),
        "config": run.config,
    }


def _section(run: Run) -> dict[str, Any]:
    charts = _charts(run)
    section = {**story(run), "loss": charts[0], "charts": [drawn for drawn in charts[1:] if drawn]}
    return {**section, "large": any(section[key] for key in ("loss", "charts", "samples"))}


def _charts(run: Run) -> list[Chart | None]:
    """The loss first, then the small ones, on one horizontal axis; None where the run has no such numbers."""
    every = [step for points in run.curves.values() for step, _ in points]
    resumes = [event for event in run.events if event.get("event") == "resume"]
    common: dict[str, Any] = {
        "steps": (min(every), max(every)) if every else None,
        "marks": [(int(step), "resumed") for event in resumes if (step := number(event.get("step")))],
    }
    losses = [*_noisy(run, "loss", "training"), Line("held out", run.curves.get("valid_loss", []), "points", 2)]
    held_out = {key: [Line("held out", run.curves.get(f"valid_{key}", []), "points", 2)] for key in _HELD_OUT}
    accuracy = [*_noisy(run, "accuracy", "training"), *held_out["accuracy"]]
    answers = [Line(side, run.curves.get(f"rewards/{side}", []), colour=n) for n, side in enumerate(_ANSWERS, 1)]
    answered = [*_noisy(run, "answer_tokens", "training"), *held_out["answer_tokens"]]
    rewarded = bool(run.curves.get("reward"))
    rate = [Line("learning rate", run.curves.get("lr", []))]
    unit = "of a pair" if answers[0].points else "of the advantages" if rewarded else "nats per token"
    loss = chart(f"Loss, {unit}", losses, lambda y: f"{y:.4g}", **common)
    reward = chart("Mean reward", [*_noisy(run, "reward", "training"), *held_out["reward"]], _three, **common)
    return [
        reward if rewarded else loss,
        loss if rewarded else None,
        chart("Held-out bits per byte", held_out["bpb"], lambda y: f"{y:.4g}", **common),
        chart("Held-out perplexity", held_out["perplexity"], lambda y: f"{y:.4g}", **common),
        chart("Accuracy", accuracy, lambda y: f"{100 * y:.4g} %", **common),
        chart("Rewards: chosen, rejected", answers, lambda y: f"{y:.3g}", **common),
        chart("Tokens of an answer", answered, _three, zero=True, **common),
        chart("Truncated answers", _noisy(run, "truncated"), lambda y: f"{100 * y:.4g} %", zero=True, **common),
        chart("Entropy of the answers, nats per token", _noisy(run, "entropy"), _three, zero=True, **common),
        chart("Divergence from the reference, nats per token", _noisy(run, "kl"), _three, zero=True, **common),
        chart("Log-probability: engine to training", _noisy(run, "logprob_diff"), _three, zero=True, **common),
        chart("Learning rate", rate, lambda y: f"{y:.3g}", zero=True, **common),
        chart("Gradient norm", _noisy(run, "grad_norm"), lambda y: f"{y:.3g}", zero=True, **common),
        chart("Tokens per second", _noisy(run, "tokens_per_s"), _count, zero=True, **common),
        chart("Device utilisation: mean, least, most", _utilisation(run), lambda y: f"{y:.0f} %", zero=True, **common),
        chart("Device power", _noisy(run, "device_power_w_mean"), lambda y: f"{y:,.0f} W", zero=True, **common),
        levels_chart(run.draws, common["steps"]),
    ]


def _utilisation(run: Run) -> list[Line]:
    kinds = (("mean", "line", 1), ("min", "raw", 2), ("max", "raw", 2))
    return [Line(kind, run.curves.get(f"device_util_pct_{kind}", []), style, colour) for kind, style, colour in kinds]


def _three(number: float) -> str:
    return f"{number:.3g}"


def _count(number: float) -> str:
    return count(number).replace(".0", "")


def _noisy(run: Run, key: str, name: str = "") -> list[Line]:
    """A measured curve, faint, under its moving average; the curve alone when it is short."""
    points = run.curves.get(key, [])
    smoothed = smooth(points)
    space = f"{name}, " if name else ""
    if smoothed is points:
        return [Line(name or "measured", points)]
    return [Line(f"{space}measured", points, "raw"), Line(f"{space}smoothed", smoothed)]


def _samples(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """By prompt: what the model wrote at up to eight moments, the first and the last among them."""
    prompts: dict[str, list[Sample]] = {}
    for sample in samples:
        prompts.setdefault(sample.prompt, []).append(sample)
    result = []
    for prompt, all_texts in prompts.items():
        most = min(MOST_SAMPLES, len(all_texts))
        chosen = [all_texts[round(i * (len(all_texts) - 1) / max(1, most - 1))] for i in range(most)]
        texts = [(_when(sample), _shorten(sample.text)) for sample in chosen]
        result.append({"prompt": _shorten(prompt), "texts": texts, "all": len(all_texts)})
    return result


def _when(sample: Sample) -> str:
    return f"{sample.step:,}" if sample.reward is None else f"{sample.step:,} (reward {sample.reward:.3g})"


def _event(event: dict[str, Any], began: float | None) -> tuple[str, str, str]:
    when = moment(event.get("time"))
    shown = "" if when is None or began is None else f"+{duration(max(0.0, when - began))}"
    rest = [f"{key} {_plain(value)}" for key, value in event.items() if key not in ("time", "event")]
    return shown, str(event.get("event", "")), ", ".join(rest)


def _message(row: dict[str, Any]) -> tuple[str, str]:
    return str(row.get("role", "")), _shorten(_plain(row.get("content", "")))


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _shorten(text: str) -> str:
    rest = len(text) - LONGEST_TEXT
    return text if rest <= 0 else f"{text[:LONGEST_TEXT]} … ({rest:,} characters more)"


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
