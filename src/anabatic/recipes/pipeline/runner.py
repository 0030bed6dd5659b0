"""`anabatic run`: check all stages of a recipe, then run one process each, in order; what is done and unchanged is
skipped.

<out>/pipeline.jsonl          "event": "stage", "state": stale, run, skip, done, fail or interrupted, "seconds"
<out>/<stage>/stage.yaml      the resolved settings the stage ran with
<out>/<stage>/stage.json      its key and state: started, then done
<out>/<stage>.old/            what the stage had made before its settings changed
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from anabatic.config.loading import settings
from anabatic.config.pipeline import PipelineJob
from anabatic.core import json_reader, log, relaunch
from anabatic.core.errors import AnabaticError, ConfigError, Failure, UserError
from anabatic.core.formatting import did_you_mean, format_duration, format_size
from anabatic.core.json_reader import JsonlWriter
from anabatic.core.paths import lock_folder, make_write_error, require_place, write_atomic
from anabatic.plan import depth_dial, job_rules, model_facts, model_shape
from anabatic.plan.shapes.decoder_shape import DecoderShape
from anabatic.recipes.pipeline import stage_process
from anabatic.recipes.pipeline.stage_plan import (
    StagePlan,
    StageState,
    compare_stage_state,
    plan_stages,
    plan_stages_with_problems,
    read_stage_state,
)
from anabatic.recipes.pipeline.stage_process import StageProcess, can_be_forked
from anabatic.recipes.prechecks import jobs
from anabatic.recipes.prechecks.data_files import StageOutput, predict_stage_output

__all__ = ["plan_stages", "run"]

_EVENT_STATES = {"done": "done", "failed": "fail", "interrupted": "interrupted"}


def run(
    job: PipelineJob,
    *,
    start: str | None = None,
    only: Sequence[str] = (),
    dry_run: bool = False,
    vars: dict[str, str] | None = None,
    program: Sequence[str] = relaunch.PROGRAM_COMMAND,
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
        UserError: a stage would be refused (`stage_checks`); all that is wrong is reported together. Nothing has run
        then.
        Failure: the folder cannot be written, the disk has no room for what the stages make, or another `anabatic run`
            works in the folder.
    """
    require_place(Path(job.out))
    stages, wrong = plan_stages_with_problems(job, vars or {})
    reasons = _choose_stages(stages, start, only)
    problems = check_stages(stages, reasons, wrong)
    if dry_run:
        _log_stage_plan(stages, reasons, problems)
    job_rules.raise_problems(error for errors in problems.values() for error in errors)
    out = Path(job.out)
    warn_low_disk_space(out, stages, reasons)
    if dry_run:
        return 0
    try:
        out.mkdir(parents=True, exist_ok=True)
        running = [stage for stage in stages if stage.name in reasons]
        with (
            lock_folder(out, "`anabatic run`"),
            StageProcess(program, stage_process.list_preload_modules(running)) as process,
        ):
            forced = set(reasons) if start or only else set()
            return _PipelineRun(job, out, process).run_stages(stages, reasons, forced)
    except OSError as error:
        raise make_write_error(out, error) from error


def _choose_stages(stages: list[StagePlan], start: str | None, only: Sequence[str]) -> dict[str, str]:
    """Return stage -> why it runs; the others are skipped."""
    names = [stage.name for stage in stages]
    for name in (*([start] if start else []), *only):
        if name not in names:
            raise ConfigError(f'no stage "{name}".{did_you_mean(name, names)}', f"stages: {', '.join(names)}")
    if start and only:
        raise ConfigError("both --from and --only are given", "use one of them")
    reasons: dict[str, str] = {}
    for position, stage in enumerate(stages):
        if only:
            reason = "asked for by --only" if stage.name in only else ""
        elif start and position >= names.index(start):
            reason = "asked for by --from"
        else:
            rerun = [need for need in stage.depends_on if need in reasons]
            reason = compare_stage_state(stage).rerun_reason or (f"stage {rerun[0]} runs again" if rerun else "")
        if reason:
            reasons[stage.name] = reason
    return reasons


def _log_stage_plan(stages: list[StagePlan], reasons: dict[str, str], problems: dict[str, list[AnabaticError]]) -> None:
    for stage in stages:
        word = "run " if stage.name in reasons else "skip"
        reason = reasons.get(stage.name) or _skip_reason(stage)
        wrong = len(problems.get(stage.name, []))
        checked = f"; {wrong} problem{'s' * (wrong > 1)}" if wrong else "; checked" if stage.name in reasons else ""
        log.info(f"{word}  {stage.name}: {stage.command.name} -> {stage.folder} ({reason}){checked}")


def _skip_reason(stage: StagePlan) -> str:
    """Only --from and --only leave out a stage that is not done."""
    return "done and unchanged" if compare_stage_state(stage).is_done else "not asked for"


class _PipelineRun:
    """One pass over the stages: rows for the table at the end, and the events."""

    def __init__(self, job: PipelineJob, out: Path, process: StageProcess) -> None:
        self.job = job
        self.out = out
        self.process = process
        self.events = JsonlWriter(out / "pipeline.jsonl")
        self.summary_rows: list[tuple[str, str, float]] = []

    def run_stages(self, stages: list[StagePlan], reasons: dict[str, str], forced: set[str]) -> int:
        """Run the stages in `reasons`, those in `forced` from scratch; stop at the first that fails."""
        self.log_event("pipeline_start", stages=[stage.name for stage in stages], run=list(reasons))
        for name in _mark_stale_stages(stages, set(reasons), forced):
            self.log_event("stage", stage=name, state="stale")
        code = 0
        for position, stage in enumerate(stages, start=1):
            where = f"[{position}/{len(stages)}] {stage.name}"
            if stage.name not in reasons:
                self.skip_stage(stage, where)
                continue
            code = self.process.exit_code_if_interrupted or self.run_stage(stage, where, reasons[stage.name])
            if code:
                break
        self.log_event("pipeline_end", code=code)
        self.events.close()
        self.print_summary()
        return code

    def skip_stage(self, stage: StagePlan, where: str) -> None:
        """Say why a stage is skipped."""
        state = compare_stage_state(stage)
        log.info(f"{where}: skipped, {_skip_reason(stage)}")
        self.summary_rows.append(
            (stage.name, "skipped", state.seconds) if state.is_done else (stage.name, "not run", 0.0)
        )
        if state.is_done:
            self.log_event("stage", stage=stage.name, state="skip")

    def run_stage(self, stage: StagePlan, where: str, reason: str) -> int:
        """Run one stage; return 0 when it is done."""
        before = _prepare_stage_folder(stage, compare_stage_state(stage))
        _write_stage_state(stage, "started", before)
        write_atomic(stage.folder / "stage.yaml", settings.dump_job(stage.job))
        log.info(f"{where}: anabatic {stage.command.name} ({reason})")
        self.log_event("stage", stage=stage.name, state="run", command=stage.command.name, why=reason)
        began = time.monotonic()
        code = self.process.run(stage.command.name.split(), stage.folder / "stage.yaml", can_be_forked(stage))
        seconds = round(time.monotonic() - began, 3)
        word = self.classify_stage_exit(stage, code)
        _write_stage_state(stage, "done" if word == "done" else "started", round(before + seconds, 3))
        self.summary_rows.append((stage.name, word, seconds))
        self.log_event("stage", stage=stage.name, state=_EVENT_STATES[word], code=code, seconds=seconds)
        self.write_report()
        return self.log_stage_outcome(stage, word, code, seconds)

    def log_stage_outcome(self, stage: StagePlan, word: str, code: int, seconds: float) -> int:
        """Tell the user how a stage ended and how to continue; return the exit code."""
        if word == "interrupted":
            log.warn(f"stage {stage.name} was interrupted after {format_duration(seconds)}; what it saved is kept")
            log.info("to continue, run the same command again, without --from and --only; done stages are skipped")
            return self.process.exit_code_if_interrupted or code or 1
        if word == "failed":
            log.warn(f"stage {stage.name} failed with exit code {code}{_describe_exit_code(code)}, in {stage.folder}")
            log.info("earlier stages stay done: fix the cause and run the same command again")
        return code

    def classify_stage_exit(self, stage: StagePlan, code: int) -> str:
        """`done`, `interrupted` (it can continue) or `failed`."""
        if self.process.exit_code_if_interrupted or code in (130, 143):
            complete = code == 0 and (not stage.command.is_training or _is_training_finished(stage))
            return "done" if complete else "interrupted"
        if code:
            return "failed"
        return "interrupted" if stage.command.is_training and not _is_training_finished(stage) else "done"

    def log_event(self, name: str, **values: Any) -> None:
        """Append one line to pipeline.jsonl."""
        self.events.write({"time": time.time(), "event": name, **values})

    def write_report(self) -> str:
        """Write the report of what there is so far."""
        from anabatic.train.report.page import write_pipeline_report

        return str(write_pipeline_report(self.out, self.job) or self.out / "report.html")

    def print_summary(self) -> None:
        """Print the table of stages and where the report is."""
        path = self.write_report()
        width = max(len(name) for name, _, _ in self.summary_rows)
        log.info("")
        for name, word, seconds in self.summary_rows:
            log.info(f"  {name:{width}}  {word:11}  {format_duration(seconds):>8}")
        total = sum(seconds for _, word, seconds in self.summary_rows if word != "skipped")
        log.info(f"  {'total':{width}}  {'':11}  {format_duration(total):>8}")
        log.info(f"report: {path}")


def _is_training_finished(stage: StagePlan) -> bool:
    """Return whether the summary of a training stage says that it finished."""
    path = stage.output / "summary.json"
    if not path.is_file():
        return False
    try:
        return json_reader.read_json_file(path).get("finished") is True
    except (ValueError, AttributeError) as error:
        raise Failure(f"{path} is not readable: {error}", "remove it and run the stage again with --from") from error


def _describe_exit_code(code: int) -> str:
    if code <= 128:
        return ""
    memory = "; the machine probably ran out of memory" if code == 137 else ""
    return f" (killed by signal {code - 128}{memory})"


def _mark_stale_stages(stages: list[StagePlan], stage_names: set[str], forced: set[str]) -> list[str]:
    """Forget what a stage has made that must be made again, and return the names of such stages.

    A stage that runs without one that it is made from having to run first keeps what it has: it may continue.
    Without this, a run that is interrupted half way would leave later stages that look done, made from older ones.
    """
    stale: list[str] = []
    for stage in stages:
        rebuilt = stage.name in forced or any(need in stage_names or need in stale for need in stage.depends_on)
        left = read_stage_state(stage)
        if left is None or not (rebuilt or (stage.name in stage_names and not compare_stage_state(stage).is_resumable)):
            continue
        write_atomic(stage.folder / "stage.json", json.dumps({**left, "state": "again"}, indent=1, ensure_ascii=False))
        stale.append(stage.name)
    return stale


def _prepare_stage_folder(stage: StagePlan, state: StageState) -> float:
    """Start in an empty folder, unless the same job was interrupted there and can continue.

    Returns the seconds that the interrupted job has run already.
    """
    old = stage.folder.with_name(stage.folder.name + ".old")
    if state.is_resumable and not stage.command.is_training:
        shutil.rmtree(stage.folder)  # half of an answer or a table: such a stage starts over
    elif stage.folder.exists() and not state.is_resumable and old.exists() and _is_stage_folder_empty(stage):
        shutil.rmtree(stage.folder)  # it must not push out an earlier result
    elif stage.folder.exists() and not state.is_resumable:
        if old.exists():
            shutil.rmtree(old)
        os.replace(stage.folder, old)
        log.info(f"the earlier result of {stage.name} is saved as {old} until the next time")
    stage.folder.mkdir(parents=True, exist_ok=True)
    return state.seconds if state.is_resumable else 0.0


def _is_stage_folder_empty(stage: StagePlan) -> bool:
    """Return whether a folder holds only what a stage leaves that failed before it saved anything."""
    has_outputs = any((stage.folder / file).exists() for file in stage.command.output_files)
    return not has_outputs and not any(stage.folder.glob("checkpoint-*"))


def _write_stage_state(stage: StagePlan, state: str, seconds: float) -> None:
    content = {"state": state, "key": stage.cache_key, "seconds": seconds, "parts": stage.key_inputs}
    write_atomic(stage.folder / "stage.json", json.dumps(content, indent=1, ensure_ascii=False))


_OPTION = re.compile(r"--([a-z][a-z0-9.-]*)(?= |$)")
_SAVED_BYTES, _CHECKPOINT_BYTES = 4, 12
"""Bytes of a parameter in a saved model, and in a checkpoint with AdamW's two moments."""


def check_stages(
    stages: list[StagePlan], reasons: Mapping[str, str], wrong: Mapping[str, UserError]
) -> dict[str, list[AnabaticError]]:
    """Return what is wrong with the stages that are to run, by stage; nothing is loaded, and no torch.

    Args:
        reasons: stages that run.
        wrong: stages whose settings could not be read, and why.
    """
    earlier: dict[str, StageOutput] = {}
    found: dict[str, list[AnabaticError]] = {}
    for stage in stages:
        name, command = stage.name, stage.command.name
        if stage.job is None:
            found[name] = [wrong[name]]
            earlier[str(stage.output)] = StageOutput(name, command)
            continue
        errors = jobs.find_problems(command, stage.job, earlier) if name in reasons else []
        if errors:
            found[name] = [_add_stage_to_error(name, error) for error in errors]
        earlier[str(stage.output)] = predict_stage_output(name, command, stage.job, earlier)
    return found


def _add_stage_to_error(name: str, error: AnabaticError) -> AnabaticError:
    """Return the error with the name of the stage, and the options of its hint as settings of the stage."""
    hint = _OPTION.sub(lambda match: f"stages.{name}.job.{match[1].replace('-', '_')}:", error.hint)
    return type(error)(f"stages.{name}.job: {error}", hint)


def warn_low_disk_space(out: Path, stages: list[StagePlan], reasons: Mapping[str, str]) -> None:
    """Warn where there is no room for the models and checkpoints of the stages that run, as far as sizes are known.

    It is an estimate, and room may be made while they run: a full disk ends a stage with what was saved.
    """
    params: dict[str, int] = {}
    entries: dict[str, int] = {}
    needed_bytes = 0
    for stage in stages:
        job, folder = stage.job, str(stage.output)
        if stage.command.name == "tokenizer train":
            entries[folder] = job.vocab_size
        if not stage.command.is_training:
            continue
        params[folder] = _count_trained_params(job, params, entries)
        if stage.name in reasons:
            checkpoints = (job.save.keep_last if job.save.every else 1) * _CHECKPOINT_BYTES
            needed_bytes += params[folder] * (2 * _SAVED_BYTES + checkpoints)
    place = next(one for one in (out.absolute(), *out.absolute().parents) if one.exists())
    free = shutil.disk_usage(place).free
    if free < needed_bytes:
        log.warn(
            f"the stages write about {format_size(needed_bytes)} of models and checkpoints, {place} has"
            f" {format_size(free)} free: free some space,"
            " choose another folder with --out, or keep fewer checkpoints (save.keep_last)"
        )


def _count_trained_params(job: Any, params: Mapping[str, int], entries: Mapping[str, int]) -> int:
    """Return the parameters of what a stage trains, all of them saved; 0 where they are not known, or adapters are."""
    model = model_facts.model_name(job)
    if getattr(job, "tuner", "full") == "lora":
        return 0
    if model:
        of = next((count for folder, count in params.items() if Path(model).is_relative_to(folder)), None)
        is_local = Path(model).expanduser().is_dir() and bool(model_facts.read_local_config(model))
        return of if of is not None else _count_folder_params(model) if is_local else 0
    vocab = entries.get(str(getattr(job, "tokenizer", "")))
    if vocab is None:
        return 0
    plan = depth_dial.derive_model_sizes(job.model, vocab)
    sizes = {name: plan.get_int(name) for name in ("width", "depth", "heads", "kv_heads", "head_dim", "intermediate")}
    width, blocks, heads, kv_heads, head_dim, inner = sizes.values()
    tied = bool(plan.values["tie_embeddings"])
    return DecoderShape(vocab, width, blocks, heads, kv_heads, head_dim, inner, is_tied=tied, head_norms=True).params


def _count_folder_params(model: str) -> int:
    try:
        return model_shape.get_named_shape(model)[0].params
    except UserError:  # a family whose sizes are not counted: nothing is claimed about its files
        return 0
