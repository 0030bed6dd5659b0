"""`anabatic run`: the stages of a recipe, one process each, in order; what is done and unchanged is skipped.

<out>/pipeline.jsonl          "event": "stage", "state": stale, run, skip, done, fail or interrupted, "seconds"
<out>/<stage>/stage.yaml      the resolved settings the stage ran with
<out>/<stage>/stage.json      its key and state: started, then done
<out>/<stage>.old/            what the stage had made before its settings changed
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from anabatic.config import load
from anabatic.config.pipeline import PipelineJob
from anabatic.core import child, json_text, log
from anabatic.core.errors import AnabaticError, ConfigError, Failure
from anabatic.core.jsonl import JsonlWriter
from anabatic.core.paths import alone, cannot_write, require_place, write_atomic
from anabatic.core.text import did_you_mean, duration
from anabatic.recipes import stage_checks
from anabatic.recipes.stage_process import StageProcess
from anabatic.recipes.stages import Plan, State, plan, read_state, state_of, survey, told_together

__all__ = ["plan", "run"]

_EVENT = {"done": "done", "failed": "fail", "interrupted": "interrupted"}


def run(
    job: PipelineJob,
    *,
    start: str | None = None,
    only: Sequence[str] = (),
    dry_run: bool = False,
    vars: dict[str, str] | None = None,
    program: Sequence[str] = child.PROGRAM,
) -> int:
    """Run a pipeline and return its exit code: 0, the code of the stage that failed, or 130 when interrupted.

    Args:
        job: the recipe.
        start: run this stage from scratch, and all after it.
        only: run these stages from scratch, and no other.
        dry_run: say what would run and why; nothing is written.
        vars: values that override the recipe's `vars`.
        program: how to start `anabatic`; the stage's command and `-c FILE` are appended.

    Raises:
        ConfigError: a stage's settings are wrong, or a name is unknown. Nothing has run then.
        UserError: a stage would be refused (`stage_checks`); all that is wrong is told together. Nothing has run then.
        Failure: the folder cannot be written, the disk has no room for what the stages make, or another `anabatic run`
            works in the folder.
    """
    require_place(Path(job.out))
    stages, wrong = survey(job, vars or {})
    todo = _choose(stages, start, only)
    problems = stage_checks.check(stages, todo, wrong)
    if dry_run:
        _announce(stages, todo, problems)
    if found := [error for errors in problems.values() for error in errors]:
        raise told_together(found)
    out = Path(job.out)
    stage_checks.warn_of_disk(out, stages, todo)
    if dry_run:
        return 0
    try:
        out.mkdir(parents=True, exist_ok=True)
        with alone(out, "`anabatic run`"), StageProcess(program) as process:
            forced = set(todo) if start or only else set()
            return _Run(job, out, process).all(stages, todo, forced)
    except OSError as error:
        raise cannot_write(out, error) from error


def _choose(stages: list[Plan], start: str | None, only: Sequence[str]) -> dict[str, str]:
    """Return stage -> why it runs; the others are skipped."""
    names = [stage.name for stage in stages]
    for name in (*([start] if start else []), *only):
        if name not in names:
            raise ConfigError(f'no stage "{name}".{did_you_mean(name, names)}', f"stages: {', '.join(names)}")
    if start and only:
        raise ConfigError("both --from and --only are given", "use one of them")
    todo: dict[str, str] = {}
    for position, stage in enumerate(stages):
        if only:
            reason = "asked for by --only" if stage.name in only else ""
        elif start and position >= names.index(start):
            reason = "asked for by --from"
        else:
            rerun = [need for need in stage.needs if need in todo]
            reason = state_of(stage).why or (f"stage {rerun[0]} runs again" if rerun else "")
        if reason:
            todo[stage.name] = reason
    return todo


def _announce(stages: list[Plan], todo: dict[str, str], problems: dict[str, list[AnabaticError]]) -> None:
    for stage in stages:
        word = "run " if stage.name in todo else "skip"
        why = todo.get(stage.name) or _why_not(stage)
        wrong = len(problems.get(stage.name, []))
        checked = f"; {wrong} problem{'s' * (wrong > 1)}" if wrong else "; checked" if stage.name in todo else ""
        log.info(f"{word}  {stage.name}: {stage.command.name} -> {stage.folder} ({why}){checked}")


def _why_not(stage: Plan) -> str:
    """Only --from and --only leave out a stage that is not done."""
    return "done and unchanged" if state_of(stage).done else "not asked for"


class _Run:
    """One pass over the stages: rows for the table at the end, and the events."""

    def __init__(self, job: PipelineJob, out: Path, process: StageProcess) -> None:
        self.job = job
        self.out = out
        self.process = process
        self.events = JsonlWriter(out / "pipeline.jsonl")
        self.rows: list[tuple[str, str, float]] = []

    def all(self, stages: list[Plan], todo: dict[str, str], forced: set[str]) -> int:
        """Run the stages in `todo`, those in `forced` from scratch; stop at the first that fails."""
        self.event("pipeline_start", stages=[stage.name for stage in stages], run=list(todo))
        for name in _mark_stale(stages, set(todo), forced):
            self.event("stage", stage=name, state="stale")
        code = 0
        for position, stage in enumerate(stages, start=1):
            where = f"[{position}/{len(stages)}] {stage.name}"
            if stage.name not in todo:
                self.skip(stage, where)
                continue
            code = self.process.interrupted or self.one(stage, where, todo[stage.name])
            if code:
                break
        self.event("pipeline_end", code=code)
        self.events.close()
        self.summary()
        return code

    def skip(self, stage: Plan, where: str) -> None:
        """Say why a stage is skipped."""
        state = state_of(stage)
        log.info(f"{where}: skipped, {_why_not(stage)}")
        self.rows.append((stage.name, "skipped", state.seconds) if state.done else (stage.name, "not run", 0.0))
        if state.done:
            self.event("stage", stage=stage.name, state="skip")

    def one(self, stage: Plan, where: str, why: str) -> int:
        """Run one stage; return 0 when it is done."""
        before = _make_room(stage, state_of(stage))
        _write_state(stage, "started", before)
        write_atomic(stage.folder / "stage.yaml", load.dump(stage.job))
        log.info(f"{where}: anabatic {stage.command.name} ({why})")
        self.event("stage", stage=stage.name, state="run", command=stage.command.name, why=why)
        began = time.monotonic()
        code = self.process.run([*stage.command.name.split(), "-c", str(stage.folder / "stage.yaml")])
        seconds = round(time.monotonic() - began, 3)
        word = self.verdict(stage, code)
        _write_state(stage, "done" if word == "done" else "started", round(before + seconds, 3))
        self.rows.append((stage.name, word, seconds))
        self.event("stage", stage=stage.name, state=_EVENT[word], code=code, seconds=seconds)
        self.report()
        return self.outcome(stage, word, code, seconds)

    def outcome(self, stage: Plan, word: str, code: int, seconds: float) -> int:
        """Tell the user how a stage ended and how to go on; return the exit code."""
        if word == "interrupted":
            log.warn(f"stage {stage.name} was interrupted after {duration(seconds)}; what it saved is kept")
            log.info("to continue, run the same command again, without --from and --only; done stages are skipped")
            return self.process.interrupted or code or 1
        if word == "failed":
            log.warn(f"stage {stage.name} failed with exit code {code}{_meaning(code)}, in {stage.folder}")
            log.info("earlier stages stay done: mend the cause and run the same command again")
        return code

    def verdict(self, stage: Plan, code: int) -> str:
        """`done`, `interrupted` (it can go on) or `failed`."""
        if self.process.interrupted or code in (130, 143):
            complete = code == 0 and (not stage.command.trains or _finished(stage))
            return "done" if complete else "interrupted"
        if code:
            return "failed"
        return "interrupted" if stage.command.trains and not _finished(stage) else "done"

    def event(self, name: str, **values: Any) -> None:
        """Append one line to pipeline.jsonl."""
        self.events.write({"time": time.time(), "event": name, **values})

    def report(self) -> str:
        """Write the report of what there is so far."""
        from anabatic.train.report import write_pipeline_report

        return str(write_pipeline_report(self.out, self.job) or self.out / "report.html")

    def summary(self) -> None:
        """Print the table of stages and where the report is."""
        path = self.report()
        width = max(len(name) for name, _, _ in self.rows)
        log.info("")
        for name, word, seconds in self.rows:
            log.info(f"  {name:{width}}  {word:11}  {duration(seconds):>8}")
        total = sum(seconds for _, word, seconds in self.rows if word != "skipped")
        log.info(f"  {'total':{width}}  {'':11}  {duration(total):>8}")
        log.info(f"report: {path}")


def _finished(stage: Plan) -> bool:
    """A training stage says itself whether it came to its end."""
    path = stage.output / "summary.json"
    if not path.is_file():
        return False
    try:
        return json_text.read(path).get("finished") is True
    except (ValueError, AttributeError) as error:
        raise Failure(f"{path} is not readable: {error}", "remove it and run the stage again with --from") from error


def _meaning(code: int) -> str:
    if code <= 128:
        return ""
    memory = "; the machine probably ran out of memory" if code == 137 else ""
    return f" (killed by signal {code - 128}{memory})"


def _mark_stale(stages: list[Plan], todo: set[str], forced: set[str]) -> list[str]:
    """Forget what a stage has made that must be made again, and return the names of such stages.

    A stage that runs without one that it is made from having to run first keeps what it has: it may go on.
    Without this, a run that is interrupted half way would leave later stages that look done, made from older ones.
    """
    stale: list[str] = []
    for stage in stages:
        rebuilt = stage.name in forced or any(need in todo or need in stale for need in stage.needs)
        left = read_state(stage)
        if left is None or not (rebuilt or (stage.name in todo and not state_of(stage).resumable)):
            continue
        write_atomic(stage.folder / "stage.json", json.dumps({**left, "state": "again"}, indent=1, ensure_ascii=False))
        stale.append(stage.name)
    return stale


def _make_room(stage: Plan, state: State) -> float:
    """Start in an empty folder, unless the same job was interrupted there and can go on.

    Returns the seconds that the interrupted job has run already.
    """
    old = stage.folder.with_name(stage.folder.name + ".old")
    if state.resumable and not stage.command.trains:
        shutil.rmtree(stage.folder)  # half of an answer or a table: such a stage starts over
    elif stage.folder.exists() and not state.resumable and old.exists() and _holds_nothing(stage):
        shutil.rmtree(stage.folder)  # it must not push out an earlier result
    elif stage.folder.exists() and not state.resumable:
        if old.exists():
            shutil.rmtree(old)
        os.replace(stage.folder, old)
        log.info(f"the earlier result of {stage.name} is kept in {old} until the next time")
    stage.folder.mkdir(parents=True, exist_ok=True)
    return state.seconds if state.resumable else 0.0


def _holds_nothing(stage: Plan) -> bool:
    """True for what a stage leaves that failed before it had made or saved anything."""
    made = any((stage.folder / file).exists() for file in stage.command.makes)
    return not made and not any(stage.folder.glob("checkpoint-*"))


def _write_state(stage: Plan, state: str, seconds: float) -> None:
    content = {"state": state, "key": stage.key, "seconds": seconds, "parts": stage.parts}
    write_atomic(stage.folder / "stage.json", json.dumps(content, indent=1, ensure_ascii=False))
