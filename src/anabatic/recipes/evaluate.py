"""`anabatic eval`: bits per byte compared with gzip, tasks compared with a baseline."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from anabatic.config.evaluate import EvalJob
from anabatic.config.sections.common import require_setting
from anabatic.core import log
from anabatic.core.formatting import format_count, format_size
from anabatic.core.paths import RunFolder, get_cache_root, write_atomic
from anabatic.data.batching.validation_batches import ValidationBatches
from anabatic.data.chat import custom_templates
from anabatic.data.shards import dataset_cache
from anabatic.data.shards.builder_team import join_builder_team
from anabatic.data.tokenizer import hf_folder as tokenizers
from anabatic.device.device import select_device
from anabatic.evals import result_tables
from anabatic.evals.answer_cache import AnswerCache, fingerprint_model
from anabatic.evals.bits_per_byte import BitsPerByte, measure_bits_per_byte
from anabatic.evals.distributed_model import DistributedModel
from anabatic.evals.endpoint_model import EndpointModel
from anabatic.evals.local_model import LocalModel
from anabatic.evals.task_runner import (
    EvalOptions,
    EvaluatedModel,
    PreparedTask,
    TaskResult,
    prepare_task,
    require_runnable,
    run_task,
)
from anabatic.evals.tasks import registry
from anabatic.evals.tasks.registry import EvalPlan
from anabatic.infer.loaded_model import load_picture_reader
from anabatic.models.pretrained import (
    find_tokenizer_folder,
    load_config,
    load_model,
    require_engine_model,
    require_tokenizer_fits,
    resolve_merged_adapters,
    resolve_model_folder,
)
from anabatic.parallel.world import World, get_world_size, init_world, leave_world
from anabatic.recipes import hub_data

HUB_SOURCE = "hub"
"""`tasks_from` that says in a word: fetch them."""
MAX_LOSS_SEQ_LEN = 2048
"""Segment length of the loss when neither the job nor the model asks for less."""


def run(job: EvalJob) -> None:
    """Measure, print the table to stdout, and write eval.json, eval.md and samples.jsonl into the run folder.

    Raises:
        ConfigError: a task does not exist, or an endpoint is to be asked by several processes.
        DataError: the model, its tokenizer, the text or the rows of a task cannot be used.
        Failure: a file cannot be written, or the model is broken.
    """
    several = get_world_size()
    require_setting(
        not (job.endpoint and several > 1), f"endpoint is given, and {several} processes", "one process asks it"
    )
    if log.get_rank():
        _run_helper_rank(job)
        return
    # what is no model is said before rows are fetched; a hub's model comes after them
    local = resolve_model_folder(job.model) if Path(job.model).expanduser().exists() else None
    run_folder = None if local is None else _find_run_folder(job, local)
    out = _choose_output_folder(job, run_folder)
    records = hub_data.EvaluationRecords(out, run_folder, starts_over=job.resume == "never")
    data_sets = _task_data_folder(job)
    plan = registry.plan_tasks(job.tasks, data_sets)
    require_setting(bool(plan.tasks or not job.tasks), "tasks names none", "give --tasks arc_easy, or leave it out")
    options = EvalOptions(
        data_sets, job.shots, job.limit, job.seed, job.max_new_tokens, job.sandbox, records.resolve_dataset
    )
    prepared = [
        prepare_task(planned, options) for planned in plan.tasks
    ]  # what is wrong with rows is said before a model loads
    folder = local or resolve_model_folder(job.model)
    if out is not None:
        RunFolder(out).create_folder()
    records.write()
    result: dict[str, Any] = {"model": str(folder)}
    if job.endpoint:
        results = _evaluate_endpoint(job, prepared, folder, options, result)
    else:
        results = _evaluate_local_model(job, prepared, folder, options, result, records)
    if records.used:
        result["data_sets"] = records.used
    _write_results(job, plan, results, result, out)


def _evaluate_local_model(
    job: EvalJob,
    prepared: list[PreparedTask],
    folder: Path,
    how: EvalOptions,
    result: dict[str, Any],
    records: hub_data.EvaluationRecords,
) -> list[TaskResult]:
    """Load the model and measure it, with the help of the other processes."""
    model = _EvalModel(job, folder, records)
    log.info(f"{folder} on {model.device.name} ({model.device.reasons['device']})")
    if model.adapters:
        result["adapters"] = [str(adapter) for adapter in model.adapters]
    if job.data.valid or job.data.train:
        bits = model.measure_bits_per_byte()
        result["bits_per_byte"] = bits.as_json()
        sys.stdout.write(f"{_format_bits_per_byte(bits)}\n")
    found = []
    if prepared:
        found = _run_tasks(prepared, model.evaluator, how, AnswerCache(model.answer_cache, read=job.resume == "auto"))
        model.evaluator.close()
    leave_world(model.world)
    return found


def _run_helper_rank(job: EvalJob) -> None:
    """Measure the share of a process other than the first."""
    model = _EvalModel(job, resolve_model_folder(job.model), None)
    if job.data.valid or job.data.train:
        model.measure_bits_per_byte()
    if job.tasks:
        model.evaluator.serve_requests(model.answer_cache)
    leave_world(model.world)


class _EvalModel:
    """The model, loaded in this process, which has joined the others.

    Args:
        records: of the main process: the commits of the data sets.

    Attributes:
        answer_cache: of the answers of this very model: its files as they are, its adapters, its device and numbers.
    """

    def __init__(self, job: EvalJob, folder: Path, records: hub_data.EvaluationRecords | None) -> None:
        require_engine_model(folder)
        self.device = select_device(job.device)
        self.adapters = resolve_merged_adapters(job.adapter, folder)
        self.tokenizer_folder = custom_templates.folder_with_template(
            find_tokenizer_folder(folder, self.adapters), job.chat_template
        )
        self.tokenizer = tokenizers.load_tokenizer(self.tokenizer_folder)
        require_tokenizer_fits(load_config(folder), self.tokenizer, folder)
        self.world = init_world(self.device)
        self.job = hub_data.pin_evaluation_data(job, records, self.world)
        self.model = load_model(folder, self.device.torch_device, self.device.dtype, self.adapters)
        local = LocalModel(
            self.model,
            self.tokenizer,
            self.device,
            job.batch_tokens,
            job.batch_size,
            self.world,
            load_picture_reader(self.model, self.tokenizer, folder),
        )
        self.evaluator = DistributedModel(local, self.world)
        more = [self.device.type, str(self.device.dtype), *map(str, self.adapters)]
        more += [str(self.tokenizer_folder)] if job.chat_template else []
        name = fingerprint_model([folder, *(adapter.folder for adapter in self.adapters)], more)
        self.answer_cache = get_cache_root() / "evals" / f"{name}.jsonl"

    def measure_bits_per_byte(self) -> BitsPerByte:
        """Measure the held-out text; every process reads its share of it."""
        seq_len = self.job.seq_len or min(self.model.config.get_text_config().max_position_embeddings, MAX_LOSS_SEQ_LEN)
        batches = build_heldout_batches(self.job, self.tokenizer_folder, seq_len, self.world)
        log.info(
            f"measuring {format_count(batches.num_tokens)} tokens, {format_size(batches.num_bytes)} of held-out text"
        )
        return measure_bits_per_byte(self.model, self.tokenizer, batches, self.device, self.world)


def _evaluate_endpoint(
    job: EvalJob, prepared: list[PreparedTask], folder: Path, how: EvalOptions, result: dict[str, Any]
) -> list[TaskResult]:
    """Ask a served model; nothing is kept, for it may change behind its address."""
    tokenizer = tokenizers.load_tokenizer(custom_templates.folder_with_template(folder, job.chat_template))
    endpoint_model = EndpointModel(
        str(job.endpoint), tokenizer, load_config(folder).max_position_embeddings, job.batch_size
    )
    result |= {"endpoint": job.endpoint, "served": endpoint_model.model_name}
    return _run_tasks(prepared, endpoint_model, how, AnswerCache(None))


def _task_data_folder(job: EvalJob) -> Path | None:
    if job.tasks_from in (None, HUB_SOURCE):
        return None
    folder = Path(job.tasks_from).expanduser()
    require_setting(folder.is_dir(), f"tasks_from is {folder}, which is no folder", "name the folder of the data sets")
    return folder


def _run_tasks(
    prepared: list[PreparedTask], model: EvaluatedModel, options: EvalOptions, store: AnswerCache
) -> list[TaskResult]:
    found = []
    try:
        for each in prepared:
            require_runnable(each.task, model, options)
        for each in prepared:
            one = run_task(each, model, options, store)
            again = f", {one.num_cached:,} answers known from before" if one.num_cached else ""
            log.info(f"{one.task.name}: {len(one.records):,} items in {one.seconds:.1f} s{again}")
            found.append(one)
    finally:
        store.close()
    return found


def _write_results(
    job: EvalJob, plan: EvalPlan, task_results: list[TaskResult], result: dict[str, Any], out: Path | None
) -> None:
    """Print the table, and write the files."""
    sums = result_tables.compute_totals(plan.groups, task_results)
    if task_results:
        result |= result_tables.as_json(task_results, sums, job.show)
        result["settings"] = {"seed": job.seed, "shots": job.shots, "limit": job.limit}
        sys.stdout.write(result_tables.format_table(task_results, sums, job.show))
    if out is None:
        log.info("eval.json is not written: this model is in no run folder (give one with --out DIR)")
        return
    if task_results:
        rows = [{"task": one.task.name, **record} for one in task_results for record in one.records]
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write_atomic(out / "samples.jsonl", lines.encode("utf-8", "backslashreplace"))
        about = [f"Model: `{result['model']}`. Seed {job.seed}.", *_describe_data_sets(result.get("data_sets", {}))]
        write_atomic(out / "eval.md", result_tables.format_markdown("Evaluation", about, task_results, sums))
    write_atomic(out / "eval.json", json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    log.info(f"wrote {out / 'eval.json'}" + (", eval.md and samples.jsonl" if task_results else ""))


def build_heldout_batches(job: EvalJob, folder: Path, seq_len: int, world: World) -> ValidationBatches:
    """Tokenise the held-out text, or take it from the cache, and return this process's share of one pass over it."""
    specs = job.data.valid or job.data.train
    with join_builder_team(world, job.data.cache) as team:
        sets = dataset_cache.build_datasets(specs, folder, job.data, "valid", seq_len=seq_len, team=team)
    built = [part for part, _ in sets]
    limit = job.tokens or sum(part.num_tokens for part in built)
    return ValidationBatches(built, seq_len, max(job.batch_tokens, seq_len), limit, world.rank, world.size)


def _format_bits_per_byte(bits: BitsPerByte) -> str:
    return (
        f"bits per byte  {bits.model_bits:.4f}   gzip -9  {bits.gzip9:.4f}   "
        f"({bits.num_bytes:,} bytes, {bits.num_tokens:,} tokens)"
    )


def _describe_data_sets(records: hub_data.Records) -> list[str]:
    """Return a sentence for each data set of a hub."""
    return [
        f"Data: `{name}` at `{record['commit']}`, {record['license'] or 'no license named'}."
        for name, record in records.items()
    ]


def _choose_output_folder(job: EvalJob, run_folder: Path | None) -> Path | None:
    """Return the folder for eval.json: the one given, else the run folder of the model, unless adapters of
    other runs make another model of it."""
    return Path(job.out) if job.out else None if job.adapter else run_folder


def _find_run_folder(job: EvalJob, folder: Path) -> Path | None:
    """Return the run folder of a model."""
    for run in (RunFolder(job.model), RunFolder(folder.parent)):
        if run.config.is_file() or run.metrics.is_file():
            return run.root
    return None
