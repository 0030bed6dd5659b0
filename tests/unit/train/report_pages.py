"""A parsed report, and runs that have one of everything."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from anabatic.monitor.run_data import CURVE_KEYS
from anabatic.train.report.localized_page import EVENT_WORDS, FIELD_WORDS
from suite.fake_runs import START_TIME, write_jsonl

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """A parsed page: balanced tags, the visible text, the attributes and the scripts."""

    def __init__(self, source: str | Path) -> None:
        super().__init__(convert_charrefs=True)
        self.source = source.read_text(encoding="utf-8") if isinstance(source, Path) else source
        self.open: list[str] = []
        self.words: list[str] = []
        self.scripts: list[tuple[str, str]] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.feed(self.source)
        self.close()
        assert self.open == []
        self.text = " ".join("".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag == "script":
            self.scripts.append((dict(attrs).get("type") or "", ""))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            kind, before = self.scripts[-1]
            self.scripts[-1] = (kind, before + data)
        elif not self.open or self.open[-1] != "style":
            self.words.append(data + (" " if data.strip() else ""))

    def charts(self) -> list[list[dict[str, Any]]]:
        found = [json.loads(code) for kind, code in self.scripts if kind == "application/json"]
        return [one["series"] for one in found if "series" in one]

    def texts(self) -> list[list[str]]:
        """(English, Chinese) of what the page can say in both."""
        found: list[list[str]] = next(
            json.loads(code)["texts"] for kind, code in self.scripts if kind and '"texts"' in code
        )
        return found


def write_full_run(folder: Path, steps: int = 20, seed: int = 0) -> None:
    """Write a run with every metric, event, kind of data and evaluation, whose own texts are Chinese or numbers."""
    rows: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        train = {key: 1.0 + (step * 7 + seed) % 5 / 10 for key in CURVE_KEYS["train"]}
        rows.append({"step": step, "kind": "train", **train, "stage": 1 + step // 11, "samples": {"易": step, "难": 2}})
    rows.append({"step": steps, "kind": "eval", **dict.fromkeys(CURVE_KEYS["eval"], 1.25 + seed)})
    rows += [{"step": step, "kind": "sample", "prompt": "问", "text": "答" * 5000, "reward": 0.5} for step in range(9)]
    write_jsonl(folder / "metrics.jsonl", rows)
    fields = {name: 1 for name in FIELD_WORDS if name not in ("train", "heldout", "heldout_fraction", "name", "type")}
    events: list[dict[str, Any]] = [
        {"time": START_TIME + 200 * at, "event": name, **fields}
        for at, name in enumerate(EVENT_WORDS)
        if name != "data"
    ]
    events += [{"event": "start"}] * 300
    events.append({"event": "device", "type": "cpu", "dtype": "16"})
    kinds = ("text", "conversations", "pairs", "questions", "sequences", "其他")
    sources = [{"source": str(at), "kind": kind} for at, kind in enumerate(kinds)]
    events.append({"event": "data", "train": sources[:2], "heldout": sources[:1]})
    write_jsonl(folder / "events.jsonl", events)
    (folder / "config.yaml").write_text(f"一: {seed}\n二: 2\n", encoding="utf-8")
    summary = {"tokens": 10, "seconds": 4000 + seed, "steps": steps, "params": 7, "peak_memory_bytes": 1 << 30}
    summary |= {"device_util_pct": 50, "device_power_w": 300, "energy_wh_per_mtoken": 2, "valid_loss": 1.5}
    (folder / "summary.json").write_text(json.dumps(summary))
    examples = [{"prompt": "问", "reply": "答", "answer": "答", "correct": correct} for correct in (True, False)]
    task = {"accuracy": 0.5, "chance": 0.1, "n": 20, "examples": examples}
    bits = {"model": 1.5, "gzip9": 2.0, "bytes": 4096, "sources": sources}
    (folder / "eval.json").write_text(json.dumps({"bits_per_byte": bits, "tasks": {"任务": task}}))
    roles = ("system", "user", "assistant", "tool", "别人")
    write_jsonl(folder / "chat.jsonl", [{"role": role, "content": "你好"} for role in roles])
