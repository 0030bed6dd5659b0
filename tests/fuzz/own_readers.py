"""Readers of the small files that commands keep for themselves: nothing in them may end a command with a traceback."""

from __future__ import annotations

import json
import shutil
import sqlite3
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from anabatic.core import formatting, heartbeat
from anabatic.core.errors import Failure
from anabatic.core.paths import RunFolder
from anabatic.data.readers.source_parts import PartPlan
from anabatic.data.shards import builder_team
from anabatic.evals.tasks import core_suite
from anabatic.hub import modelscope_models
from anabatic.launch.local import spawn, worker_reports
from anabatic.launch.schedulers import requeue
from anabatic.monitor.run_data import RunFiles
from anabatic.recipes import answer_shards, hub_data
from anabatic.recipes.chat import slash_commands
from anabatic.recipes.pipeline import stage_plan
from anabatic.train.auto.state import AutoState
from anabatic.train.checkpoint.memory_store import MemoryStore
from anabatic.train.metrics import recorder
from anabatic_sim import simulation_report
from anabatic_sim.profiling import tasks
from anabatic_studio.jobs.store import StudioStore
from fuzz.engine import Good
from fuzz.reading import Reader

RECORD = {"hf:a/b": {"commit": "c", "subset": "d", "split": "e"}}
SEAL = {"version": 1, "run": "run", "setup": "setup", "bytes": 0, "crc32": 0}
SLURM = {"SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": "3"}
AUTO = {"lowered": 1, "place": "cpu", "way": ["ddp", False, "none"], "micro": 1024, "batch": 4096, "most": 2048,
        "refused": [["zero3", True, "full"]]}  # fmt: skip
COLUMNS = len(simulation_report._STEP_COLUMNS)
CELLS = [4, 100, 5, 6, 7, 8, 1, 2, 1, 1]
PROCESS = {
    "pid": 9, "now": [5] * COLUMNS, "steps": [[2] * COLUMNS, [4] * COLUMNS], "operators": {"aclnnMm": CELLS},
    "collectives": {"allReduce": CELLS}, "syncs": {"a.py:3\titem": CELLS}, "unfused": {"a: b": CELLS},
    "dropped_events": 0, "started_ns": 1, "devices": 1,
}  # fmt: skip
EVENT = '{"ph":"X","pid":0,"tid":1,"ts":1,"dur":2,"name":"a"},\n'
TASK = {"kind": "operator", "stream": 1, "thread": 2, "api": "aclnnMm", "unit": "cube", "launch_begin_ns": 1,
        "launch_end_ns": 2, "start_ns": 3, "ns": 4, "at_ns": 1, "bytes": 10, "flops": 10}  # fmt: skip
SETTINGS = {
    "devices": "3",
    "types": 0,
    "metrics": 1,
    "pid": 9,
    "soc": "Ascend910B3",
    "cube_cores": 20,
    "vector_cores": 40,
}
PLAN = {"version": 1, "rule": {"fraction": 0.1, "chosen": [1, 2], "cuts_texts": False},
        "parts": [[["/a.jsonl", "a.jsonl", [0, 10, 1], 10]]]}  # fmt: skip


def _json(name: str, value: Any) -> list[Good]:
    return [Good(name, json.dumps(value).encode(), "json")]


def restarts(path: Path) -> None:
    """Start a job of Slurm again."""
    requeue.require_progress(path.parent, 5, False, SLURM)


def _database() -> list[Good]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "studio.sqlite"
        store = StudioStore(path)
        for number in range(3):
            job = store.add_job("sft", f"job {number}", "seed: 1\n", "runs/a", "/work")
            store.update_job(job, devices=[0, 1], state="running", pid=12)
        store.close()
        with sqlite3.connect(path) as rows:
            rows.execute("INSERT INTO notes VALUES ('runs/a', 'good', '[\"best\"]', 1.0)")
        rows.close()
        return [Good("studio.sqlite", path.read_bytes())]


def jobs(path: Path) -> None:
    """Open the queue of the studio, and look at all that it holds."""
    copy = path.with_suffix(".copy")
    shutil.copyfile(path, copy)
    store = StudioStore(copy)
    try:
        store.list_jobs()
        store.list_jobs(("queued", "running"))
        store.get_notes()
        store.add_job("sft", "new", "seed: 2\n", "runs/b", "/work")
    finally:
        store.close()
        copy.unlink()


def _reports() -> list[Good]:
    return [
        *_json("ranks.json", [0, 1]), *_json("failed.json", {"0": 1, "1": -15}), Good("rank-0.code", b"75"),
        Good("rank-1.error", b"error: no memory"), Good("rank-0.beat", b"%20d%20d" % (12, 7)),
    ]  # fmt: skip


def reports(path: Path) -> None:
    """Read what workers report."""
    report = worker_reports.read_worker_report(path.parent)
    str((report.silent_ranks, worker_reports.is_stop_requested(report.codes.values())))
    heartbeat.read_heartbeat(path.parent / "rank-0.beat")


def _answers() -> list[Good]:
    lines = [
        [{"job": {"seed": 1}}, {"row": 0, "text": "a"}, {"row": 2, "text": "c"}],
        [{"job": {"seed": 1}}, {"row": 1, "text": "b"}],
    ]
    return [
        Good(f"a.jsonl.part-{rank}-of-2.done", b"".join(json.dumps(row).encode() + b"\n" for row in rows), "jsonl")
        for rank, rows in enumerate(lines)
    ]


def answers(path: Path) -> None:
    """Go on with a part, and put all parts together."""
    kept = {part: part.read_bytes() for part in path.parent.glob("a.jsonl.part-*")}
    out = path.parent / "a.jsonl"
    try:
        answer_shards.AnswerShard(out, {"seed": 1}, 0, 2, "auto")
        answer_shards.merge_shards(out, 2, lambda: None)
    finally:
        out.unlink(missing_ok=True)
        for part, data in kept.items():
            part.write_bytes(data)


def counters(path: Path) -> None:
    """Add up what simulated devices have counted."""
    found = simulation_report.read_processes(path.parent)
    simulation_report.group_by_launch(found)
    simulation_report.write_trace(path.parent, path.parent / "trace.out")


def _profile() -> list[Good]:
    return [
        *_json("PROF/host/sample.json", SETTINGS),
        *_json("PROF/host/start_info", {"collectionTimeBegin": "17.123", "clockMonotonicRaw": "12"}),
        Good("PROF/device_3/data/tasks.jsonl", json.dumps(TASK).encode() + b"\n", "jsonl"),
        Good("PROF/host/data/marks.jsonl", b""),
    ]


def profile(path: Path) -> None:
    """Read a profile of the simulator."""
    tasks.read_profile(next(one for one in path.parents if one.name == "PROF"))


def run_state(path: Path) -> None:
    """Ask all that looks at the end of a run whether it has come."""
    folder = RunFolder(path.parent)
    str((RunFiles(folder.root).is_finished, spawn._is_finished(folder, "seed: 1\n")))


def memory(path: Path) -> None:
    """Look for copies of a run in memory."""
    MemoryStore(path.parent, "run", "setup").list_whole_shards()


READERS = [
    Reader("starts of a job of Slurm", lambda: _json("restarts.json", {"job": "77", "steps": {"0": 5, "1": 5, "2": 6}}),
           restarts, 200, (Failure,)),
    Reader("queue of the studio", _database, jobs, 300),
    Reader("reports of workers", _reports, reports, 200),
    Reader("parts of answers", _answers, answers, 200),
    Reader("counters of simulated devices", lambda: [*_json("9.json", PROCESS), Good("9.trace", (EVENT * 3).encode())],
           counters, 200),
    Reader("profiles of the simulator", _profile, profile, 200),
    Reader("what auto has settled", lambda: _json("auto.json", AUTO),
           lambda path: AutoState.from_json(path.read_text(encoding="utf-8", errors="replace")), 200),
    Reader("data sets that a run records", lambda: _json("data.json", RECORD),
           lambda path: hub_data.read_records(path.parent, path.name), 100),
    Reader("plans of parts", lambda: _json("plan.json", PLAN), PartPlan.load, 150),
    Reader("sizes of parts", lambda: _json("meta.json", {"num_tokens": 5, "counts": {"documents": 2}}),
           lambda path: builder_team._read_part_size(path.parent), 100),
    Reader("stages", lambda: _json("stage.json", {"parts": {}, "key": "k", "seconds": 1.0, "state": "done"}),
           lambda path: stage_plan.read_stage_state(SimpleNamespace(folder=path.parent)), 100),  # type: ignore[arg-type]
    Reader("files of a model that were fetched",
           lambda: _json(modelscope_models._LIST_FILE, [{"path": "a.json", "size": 3, "checksum": ""}]),
           lambda path: modelscope_models._list_fetched(path.parent), 100),
    Reader("checksums of a bundle", lambda: _json(core_suite.CHECKSUMS_FILE, {"a": "b"}),
           lambda path: core_suite.read_checksums(path.parent), 60),
    Reader("the end of a run", lambda: [*_json("summary.json", {"finished": True}), Good("config.yaml", b"seed: 1\n")],
           run_state, 150),
    Reader("copies in memory", lambda: [*_json("shared-3.json", SEAL),
                                        Good("shared-3.bin", b"")], memory, 100),
    Reader("names of tracked runs", lambda: [Good("wandb.id", b"0123456789abcdef01234")],
           lambda path: recorder._load_run_id(path, 5), 60),
    Reader("conversations of /save", lambda: _json("chat.json", {"messages": [{"role": "user", "content": "a"}]}),
           slash_commands.read_conversation, 100),
    Reader("whole numbers", lambda: [Good("n.txt", b"12")],
           lambda path: formatting.parse_whole(path.read_text(encoding="utf-8", errors="replace")), 60),
]  # fmt: skip
