"""Results of each item, as written to samples.jsonl, and the figures over all of them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from anabatic.config.task import METRICS, EvalTask, Metric
from anabatic.data.builtin import synthetic_tasks
from anabatic.evals.confidence_intervals import Estimate, bootstrap_interval, wilson_interval
from anabatic.evals.likelihood import Likelihood
from anabatic.evals.tasks.items import EvalItem

ItemRecord = dict[str, Any]


def make_scored_record(task: EvalTask, item: EvalItem, found: Sequence[Likelihood]) -> ItemRecord:
    """Return the record of an item of which texts were scored."""
    record: ItemRecord = {"item": item.row_number, "place": item.source_location, "group": item.group}
    record["logprobs"] = [one.logprob for one in found]
    record["tokens"] = [one.num_tokens for one in found]
    if task.kind == "perplexity":
        text = str(item.pairs[0].context)
        return {**record, "bytes": len(text.encode()), "words": len(text.split())}
    if task.kind == "completion":
        return {**record, "right": {"acc": found[0].is_greedy}}
    picks = {metric: _pick_choice(metric, item, found) for metric in METRICS[task.kind]}
    right = {metric: pick == item.gold_index for metric, pick in picks.items()}
    return {**record, "answer": item.gold_index, "picks": picks, "right": right}


def _pick_choice(metric: Metric, item: EvalItem, found: Sequence[Likelihood]) -> int:
    """The choice with the largest log-probability: `acc` as it is, `acc_norm` by letter of the choice, `acc_bytes` by
    byte of UTF-8 (lm-evaluation-harness, lm_eval/api/task.py), `acc_tokens` by token (CORE). Of equals the first."""
    sizes = {
        "acc": [1] * len(found),
        "acc_norm": [len(label) for label in item.labels],
        "acc_bytes": [len(label.encode()) for label in item.labels],
        "acc_tokens": [one.num_tokens for one in found],
    }[metric]
    scores = [one.logprob / max(1, size) for one, size in zip(found, sizes, strict=True)]
    return scores.index(max(scores))


def make_reply_record(
    item: EvalItem, answer: str, reply: str, correct: bool, note: str = "", is_judged: bool = True
) -> ItemRecord:
    """Return the record of an item that was answered in own words; one that is not judged counts in no metric."""
    record: ItemRecord = {"item": item.row_number, "place": item.source_location, "group": item.group}
    record |= {"prompt": item.question, "reply": reply, "answer": answer, "right": {"exact": correct}}
    record |= {} if is_judged else {"unjudged": True}
    return {**record, "note": note} if note else record


def list_judged(records: Sequence[ItemRecord]) -> list[ItemRecord]:
    """Return the records that count in the metrics."""
    return [record for record in records if not record.get("unjudged")]


def compute_estimates(task: EvalTask, records: Sequence[ItemRecord], seed: int) -> dict[str, Estimate]:
    """Return each metric with its interval: shares by Wilson, the others by the bootstrap over items."""
    found: dict[str, Estimate] = {}
    records = list_judged(records)
    for metric in METRICS[task.kind]:
        if metric in ("perplexity", "bits_per_byte"):
            found[metric] = _estimate_text_metric(task, metric, records, seed)
        else:
            found[metric] = wilson_interval(sum(record["right"][metric] for record in records), len(records))
    return found


def _estimate_text_metric(task: EvalTask, metric: Metric, records: Sequence[ItemRecord], seed: int) -> Estimate:
    """Perplexity is per continuation (LAMBADA) or, of whole texts, per word; bits are per byte of UTF-8."""
    unit = "bytes" if metric == "bits_per_byte" else "words"
    rows = np.array([(sum(one["logprobs"]), 1 if task.kind == "completion" else one[unit]) for one in records])

    def compute_metric(part: np.ndarray) -> float:
        nats = -float(part[:, 0].sum() / max(1.0, part[:, 1].sum()))
        return nats / math.log(2) if metric == "bits_per_byte" else math.exp(min(nats, 700.0))

    return bootstrap_interval(rows, compute_metric, seed)


def average_by_group(task: EvalTask, records: Sequence[ItemRecord]) -> dict[str, dict[str, Any]]:
    """Return `{group: {metric that counts, n}}` where items have groups."""
    groups: dict[str, list[ItemRecord]] = defaultdict(list)
    for record in list_judged(records):
        if record["group"] and "right" in record:
            groups[record["group"]].append(record)
    counts = task.main_metric
    return {
        name: {counts: sum(one["right"].get(counts, False) for one in mine) / len(mine), "n": len(mine)}
        for name, mine in sorted(groups.items())
    }


def compute_chance(task: EvalTask, items: Sequence[EvalItem]) -> float:
    """Return what guessing scores: as the task says, else 1 in so many choices on average, else 0; of generated tasks
    the best constant reply."""
    if task.data.task:
        return synthetic_tasks.chance_accuracy(task.data.task)
    if task.chance is not None:
        return task.chance
    sizes = [len(item.labels) for item in items if item.labels]
    return sum(1 / size for size in sizes) / len(sizes) if sizes else 0.0
