"""Results of `anabatic eval` next to each other: one row for each figure, one column for each run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from anabatic.config.task import TEXT_METRICS
from anabatic.core.json_reader import to_finite_number

MISSING = "–"
MAX_ROWS = 200
MAX_NAME_CHARS = 200
_BITS_PER_BYTE = "bits per byte"


@dataclass(frozen=True)
class _Score:
    """One figure of one run; `low` and `high` are its 95 % interval, or its value."""

    value: float
    low: float
    high: float
    is_share: bool
    lower_is_better: bool = False
    facts: tuple[tuple[str, str], ...] = ()
    """Name -> text of what it is to be read with, for example the baseline."""


def compare_evaluations(evaluations: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare the contents of several `eval.json`.

    Returns:
        Rows with `name`, `values` (texts, one for each run), `best` (index; None unless one run's 95 % interval lies
        beyond the figures of all others), and `facts` (pairs of a name and a text: chance, items, gzip; what differs
        between runs has several texts with a slash). Empty: no run has results.
    """
    columns = [_read_scores(evaluation) for evaluation in evaluations]
    names = list(dict.fromkeys(name for column in columns for name in column))[:MAX_ROWS]
    rows = [_compare_scores(name, [column.get(name) for column in columns]) for name in names]
    models = [str(evaluation.get("model", MISSING))[-MAX_NAME_CHARS:] for evaluation in evaluations]
    return [{"name": "model", "values": models, "best": None, "facts": []}, *rows] if rows else []


def _compare_scores(name: str, scores: Sequence[_Score | None]) -> dict[str, Any]:
    facts: dict[str, dict[str, None]] = {}
    for score in scores:
        for fact, text in score.facts if score else ():
            facts.setdefault(fact, {})[text] = None
    return {
        "name": name[:MAX_NAME_CHARS],
        "values": [MISSING if score is None else _format_score(score) for score in scores],
        "best": _find_best(scores),
        "facts": [[fact, " / ".join(texts)] for fact, texts in facts.items()],
    }


def _find_best(scores: Sequence[_Score | None]) -> int | None:
    known = [(index, score) for index, score in enumerate(scores) if score is not None]
    if len(known) < 2:
        return None
    sign = -1 if known[0][1].lower_is_better else 1
    index, best = max(known, key=lambda pair: sign * pair[1].value)
    bound = min(sign * best.low, sign * best.high)
    return index if all(sign * other.value < bound for at, other in known if at != index) else None


def _format_score(score: _Score) -> str:
    def write(value: float) -> str:
        return f"{100 * value:.1f}" if score.is_share else f"{value:.4g}"

    unit = " %" if score.is_share else ""
    interval = f" ({write(score.low)} – {write(score.high)})" if score.low < score.high else ""
    return f"{write(score.value)}{unit}{interval}"


def _read_scores(evaluation: dict[str, Any]) -> dict[str, _Score]:
    scores: dict[str, _Score] = {}
    bits = _get_section(evaluation, "bits_per_byte")
    if (value := to_finite_number(bits.get("model"))) is not None:
        gzip = to_finite_number(bits.get("gzip9"))
        facts = (("gzip -9", f"{gzip:.4g}"),) if gzip is not None else ()
        scores[_BITS_PER_BYTE] = _Score(value, value, value, False, True, facts)
    for name, task in _get_section(evaluation, "tasks").items():
        if isinstance(task, dict) and (score := _read_task(task)) is not None:
            scores[str(name)] = score
    for name, group in _get_section(evaluation, "groups").items():
        value = to_finite_number(group.get("value")) if isinstance(group, dict) else None
        if value is not None:
            scores[str(name)] = _Score(value, *_read_interval(group, value), False)
    return scores


def _read_task(task: dict[str, Any]) -> _Score | None:
    metric = str(task.get("metric", ""))
    figure = _get_section(_get_section(task, "metrics"), metric)
    value = to_finite_number(figure.get("value", task.get("accuracy")))
    if value is None:
        return None
    is_share = metric not in TEXT_METRICS
    facts = []
    if is_share and (chance := to_finite_number(task.get("chance"))) is not None:
        facts.append(("chance", f"{100 * chance:.1f} %"))
    if (items := to_finite_number(task.get("n"))) is not None:
        facts.append(("items", f"{items:,.0f}"))
    if shots := to_finite_number(task.get("shots")):
        facts.append(("shots", f"{shots:.0f}"))
    return _Score(value, *_read_interval(figure, value), is_share, not is_share, tuple(facts))


def _read_interval(figure: dict[str, Any], value: float) -> tuple[float, float]:
    low, high = (to_finite_number(figure.get(name)) for name in ("low", "high"))
    if low is None or high is None or math.isnan(low) or not low <= value <= high:
        return value, value
    return low, high


def _get_section(tree: dict[str, Any], name: str) -> dict[str, Any]:
    section = tree.get(name)
    return section if isinstance(section, dict) else {}
