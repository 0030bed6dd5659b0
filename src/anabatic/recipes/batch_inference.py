"""`anabatic infer`: rows in, answers out, in the same order, by a model, an adapter or a checkpoint; a stopped job
resumes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from transformers import PreTrainedModel

from anabatic.config.infer import InferJob
from anabatic.config.loading import settings, yaml_reader
from anabatic.config.loading import settings as settings_module
from anabatic.config.sections.train_jobs import TuneJob
from anabatic.core import log
from anabatic.core.errors import DataError
from anabatic.core.formatting import did_you_mean, format_count, format_duration, to_valid_utf8
from anabatic.core.heartbeat import HEARTBEAT
from anabatic.core.paths import resolve_output_file
from anabatic.core.progress import ProgressBar
from anabatic.data.chat import custom_templates
from anabatic.data.readers.document import RowIssue
from anabatic.data.readers.long_rows import LongRowCounter
from anabatic.data.readers.prompts import PromptRow, read_prompts
from anabatic.data.readers.row_use import UnusedColumns
from anabatic.data.tokenizer import hf_folder as tokenizers
from anabatic.data.vision.row_objects import split_objects
from anabatic.data.vision.video_files import is_video, split_source
from anabatic.device.device import Device, select_device
from anabatic.infer.cache_sizing import make_engine
from anabatic.infer.dialogue import encode_continuation
from anabatic.infer.engine import Engine, PromptTooLong, Request
from anabatic.infer.loaded_model import LoadedModel, load_model_to_ask, load_picture_reader
from anabatic.models.lora import adapter, merging
from anabatic.models.pretrained import (
    build_meta_causal_lm,
    find_tokenizer_folder,
    load_folder_weights,
    load_model,
    prepare_model,
    require_engine_model,
    resolve_base_folder,
    resolve_merged_adapters,
    resolve_model_folder,
)
from anabatic.parallel.sharded_tensors import materialize_parameters
from anabatic.parallel.world import World, get_world_size
from anabatic.plan import model_facts, model_shape
from anabatic.plan.model_format import describe_wrong_model
from anabatic.recipes import hub_data
from anabatic.recipes.answer_shards import AnswerShard, merge_shards
from anabatic.recipes.training.trained_model import choose_trained_prefixes
from anabatic.train.checkpoint import manifest, storage

if TYPE_CHECKING:
    from anabatic.infer.picture_prompts import PictureReader
    from anabatic.models.vision.prompt_pictures import PromptPictures

_MAX_PENDING_ROWS = 512
"""Answers that wait for an earlier one to be written."""


@dataclass
class InferenceRow:
    """A row that is being answered, or was skipped.

    Attributes:
        row_index: of the row among all rows, from 0.
        skip_reason: why it was skipped.
    """

    row_index: int
    prompt_row: PromptRow | None = None
    request: Request | None = None
    skip_reason: str = ""

    @property
    def is_done(self) -> bool:
        """True when its line can be written."""
        return self.request is None or bool(self.request.finish_reason)


def run(job: InferJob) -> int:
    """Answer the rows as the job says; return the exit code.

    Raises:
        ConfigError: `out` is there already, or was begun by another job.
        DataError: the model or its tokenizer cannot be used; a file or a row cannot be read.
        Failure: `out` cannot be written.
    """
    rank, ranks = log.get_rank(), get_world_size()
    job = replace(job, inputs=hub_data.pin_specs(job.inputs)[0])
    out = resolve_output_file(job.out, "answers.jsonl")
    part = AnswerShard(out, _resume_identity(job), rank, ranks, job.resume)
    if not part.is_finished:
        began, totals = time.perf_counter(), [0, 0, 0]
        try:
            rows = _count_rows(job)
            with ProgressBar("rows", rows // ranks) as bar:
                engine, pictures = _load_engine(job, ranks)
                places = _prepare_requests(job, engine, pictures, part.num_rows, rank, ranks, rows)
                for place in _generate_in_order(job, engine, places):
                    part.write_row(_format_answer(job, engine, place, totals))
                    bar.update(part.num_rows)
            part.mark_finished()
        finally:
            part.close()
        _log_throughput(totals, time.perf_counter() - began, engine)
    if rank == 0:
        written, skipped = merge_shards(out, ranks, HEARTBEAT.record_beat)
        log.info(f"wrote {written:,} answers to {out}")
        if skipped:
            log.warn(f"{len(skipped):,} rows were skipped; first: {skipped[0]}")
    return 0


def _sees(job: InferJob) -> bool:
    folder = Path(job.ckpt_dir).expanduser() if job.ckpt_dir else None
    name = job.model if folder is None else str(folder)
    if folder is not None and (folder / "config.yaml").is_file() and not (folder / "config.json").is_file():
        name = str(yaml_reader.read_yaml(folder / "config.yaml").tree.get("model") or "")
    return model_shape.sees_pictures(model_facts.read_local_config(name))


def _resume_identity(job: InferJob) -> dict[str, Any]:
    """Return everything that determines the answers; a partly finished job continues only if it is unchanged."""
    kept = ("model", "ckpt_dir", "adapter", "inputs", "system", "raw", "quantize", "columns", "sampling", "on_bad_row")
    tree = settings.job_to_dict(job)
    more = {} if job.chat_template is None else {"chat_template": custom_templates.read_template(job.chat_template)}
    return {key: tree.get(key) for key in kept} | more


def _load_engine(job: InferJob, ranks: int) -> tuple[Engine, PictureReader | None]:
    device = select_device(job.device)
    if job.ckpt_dir:
        model, tokens = load_checkpoint_model(Path(job.ckpt_dir).expanduser(), device, job.adapter, job.quantize)
        tokenizer = tokenizers.load_tokenizer(custom_templates.folder_with_template(tokens, job.chat_template))
        pictures = load_picture_reader(model, tokenizer, resolve_model_folder(tokens)) if _sees(job) else None
        loaded = LoadedModel(Path(job.ckpt_dir), model, tokenizer, pictures)
    else:
        loaded = load_model_to_ask(job.model, device, job.adapter, job.chat_template, job.quantize)
    log.info(f"{loaded.folder} on {device.name} ({device.reasons['device']})")
    return make_engine(loaded.model, loaded.tokenizer, device, job.batching, ranks), loaded.pictures


def _count_rows(job: InferJob) -> int:
    """Count the rows before the model is asked: what is wrong with them is reported early."""
    total, unused = 0, UnusedColumns()
    for row in read_prompts(job.inputs, job.columns, "" if _sees(job) else None):
        if isinstance(row, PromptRow):
            unused.count_names(row.unused)
        elif job.on_bad_row == "fail":
            row.raise_error()
        total += 1
    unused.warn(", ".join(job.inputs))
    if not total:
        raise DataError(f"{', '.join(job.inputs)}: there is no row", "give files with rows")
    return total


def _prepare_requests(
    job: InferJob, engine: Engine, pictures: PictureReader | None, done: int, rank: int, ranks: int, rows: int
) -> Iterator[InferenceRow]:
    """Return this process's share of `rows` that is not answered yet, each row with its request.

    Raises:
        DataError: a row cannot be used; too many leave no room for an answer.
    """
    long = LongRowCounter(f"{', '.join(job.inputs)}: prompts", engine.max_len - 1, job.long_share, "--long-share")
    num_rows = len(range(rank, rows, ranks))
    for number, row in enumerate(read_prompts(job.inputs, job.columns, None if pictures is None else "")):
        if number % ranks != rank or number // ranks < done:
            continue
        if isinstance(row, RowIssue):
            yield InferenceRow(number, skip_reason=row.message)
            continue
        try:
            seed = job.sampling.seed
            sampling = job.sampling if seed is None else replace(job.sampling, seed=(seed + number) % 2**63)
            prompt, seen = _encode_prompt(job, engine.tokenizer, row, pictures)
            yield InferenceRow(number, row, engine.request(prompt, sampling, name=row.location, pictures=seen))
        except PromptTooLong as error:
            long.count_row(len(prompt), row.location)
            if long.exceeds_limit(num_rows):
                long.check_fraction(num_rows)
            yield InferenceRow(number, skip_reason=_locate_error(row, error))
        except DataError as error:
            if job.on_bad_row == "fail":
                hint = f"{error.hint}, or skip such rows with --on-bad-row skip" if row.pictures else error.hint
                raise DataError(_locate_error(row, error), hint) from error
            yield InferenceRow(number, skip_reason=_locate_error(row, error))


def _locate_error(row: PromptRow, error: DataError) -> str:
    return str(error) if str(error).startswith(row.location) else f"{row.location}: {error}"


def _encode_prompt(
    job: InferJob, tokenizer: Any, row: PromptRow, pictures: PictureReader | None
) -> tuple[list[int], PromptPictures | None]:
    """Return the tokens of a row: its turns through the chat template, or its text as a document begins; and its
    pictures."""
    if row.messages is None or job.raw or not tokenizer.chat_template:
        if row.messages is not None and len(row.messages) > 1:
            what = "raw is on" if job.raw else f"{tokenizer.name_or_path} has no chat template"
            raise DataError(
                f"{row.location}: {len(row.messages)} turns, and {what}", "give a prompt, or a model that chats"
            )
        if row.pictures:
            raise DataError(
                f"{row.location}: pictures without a chat template", "leave raw out, or use a model that chats"
            )
        return encode_continuation(tokenizer, row.messages[0]["content"] if row.messages else row.text), None
    system = job.system is not None and row.messages[0]["role"] not in ("system", "developer")
    begins = [{"role": "system", "content": to_valid_utf8(job.system or "")}] if system else []
    turns = [*begins, *row.messages]
    if pictures is None:
        return tokenizers.encode_chat(tokenizer, turns, row.tools), None
    return pictures.encode_row(turns, row.pictures, row.location, tools=row.tools)


def _generate_in_order(job: InferJob, engine: Engine, places: Iterator[InferenceRow]) -> Iterator[InferenceRow]:
    """Yield the rows in their order as they are answered; others are answered meanwhile."""
    window: deque[InferenceRow] = deque()
    more = True
    while more or window:
        while more and len(window) < _MAX_PENDING_ROWS and engine.get_load().waiting < job.batching.batch:
            place = next(places, None)
            more = place is not None
            if place is not None:
                window.append(place)
                engine.submit([place.request] if place.request else [])
        if engine.is_busy:
            engine.step()
            HEARTBEAT.record_beat()
        while window and window[0].is_done:
            yield window.popleft()


def _format_answer(job: InferJob, engine: Engine, place: InferenceRow, totals: list[int]) -> dict[str, Any]:
    """Return the line of a row, and count its tokens."""
    if place.request is None or place.prompt_row is None:
        return {"row": place.row_index, "skipped": place.skip_reason}
    prompt_row, request = place.prompt_row, place.request
    answer = engine.get_completion(request)
    for at, number in enumerate((1, len(request.prompt), len(answer.ids))):
        totals[at] += number
    line: dict[str, Any] = {"row": place.row_index, "id": prompt_row.id}
    line |= {"text": prompt_row.text} if prompt_row.messages is None else {"messages": prompt_row.messages}
    pictures, objects = split_objects(prompt_row.pictures)
    for column, videos in (("images", False), ("videos", True)):
        shown = [split_source(one) for one in pictures if is_video(one) == videos]
        line |= {column: shown} if shown else {}
    line |= {"objects": objects} if objects else {}
    line |= {"response": answer.text, "finish_reason": answer.finish_reason}
    line |= {} if prompt_row.label is None else {"label": prompt_row.label}
    line |= {"prompt_tokens": len(request.prompt), "response_tokens": len(answer.ids)}
    if job.sampling.top_logprobs:
        line |= {"logprobs": answer.logprobs, "top_logprobs": answer.top_logprobs}
    return line


def _log_throughput(totals: list[int], seconds: float, engine: Engine) -> None:
    rows, read_in, written = totals
    shared = engine.get_load().shared_tokens
    log.info(
        f"{rows:,} rows in {format_duration(seconds)}: {format_count(read_in)} tokens in ({format_count(shared)} "
        f"shared), {format_count(written)}"
        f" out, {written / max(seconds, 1e-9):,.1f} tokens/s"
    )


def load_checkpoint_model(
    path: Path, device: Device, adapters: Sequence[str] = (), quantize: Literal["none", "int8", "nf4"] = "none"
) -> tuple[PreTrainedModel, Path]:
    """Return the model of a checkpoint folder, and the folder with its tokenizer.

    Raises:
        DataError: nothing is there, or it is the checkpoint of a run whose model cannot be built from its settings.
        CheckpointError: its tensors do not fit.
    """
    if path.is_file():
        raise describe_wrong_model(path)
    if not path.is_dir():
        found = [one.name for one in path.parent.glob("checkpoint-*")] if path.parent.is_dir() else []
        contents = f"there are {', '.join(sorted(found)[:8])}" if found else "there is no checkpoint beside it"
        raise DataError(f"{path} does not exist.{did_you_mean(path.name, found)}", contents)
    if (path / "config.json").is_file() or (path / adapter.ADAPTER_CONFIG_FILE).is_file():
        named_folder = resolve_model_folder(path)
        require_engine_model(named_folder)
        adapters_to_merge = resolve_merged_adapters(adapters, named_folder)
        return load_model(
            named_folder, device.torch_device, device.dtype, adapters_to_merge, quantize
        ), _find_tokenizer_folder(named_folder, adapters_to_merge, path)
    return _load_run_checkpoint(path, device)


def _find_tokenizer_folder(named_folder: Path, adapters_to_merge: list[merging.WeightedAdapter], path: Path) -> Path:
    """Return the folder of the tokenizer; an adapter without one uses its base model's."""
    folder = find_tokenizer_folder(named_folder, adapters_to_merge)
    return folder if (folder / "tokenizer.json").is_file() else resolve_base_folder(named_folder)


def _load_run_checkpoint(path: Path, device: Device) -> tuple[PreTrainedModel, Path]:
    problem = manifest.find_first_fault(path)
    if problem:
        raise DataError(
            f"{path} holds no config.json or adapter_config.json, and as a checkpoint of ours {problem}",
            "give RUN/checkpoint-STEP as the training wrote it, or a model: -m RUN",
        )
    settings = yaml_reader.read_yaml(path / "config.yaml").tree
    if not isinstance(settings.get("model"), str):
        raise DataError(
            f"{path} is of a run that built its own model, which only its model folders describe",
            f"use them: -m {path.parent}",
        )
    job: TuneJob = settings_module.load_job(_infer_command(settings), [path / "config.yaml"])
    named_folder = resolve_model_folder(job.model)
    base = resolve_base_folder(named_folder)
    require_engine_model(base)
    adapters_to_merge = resolve_merged_adapters(job.adapter, named_folder)
    model = build_meta_causal_lm(base, device.dtype)
    if named_folder != base:
        adapter.insert_saved_adapter(model, named_folder)
    elif job.tuner == "lora":
        adapter.insert_adapter(model, job.lora, choose_trained_prefixes(job, model, is_full=False))
    elif job.tuner == "freeze":
        adapter.freeze_parameters(model, job.freeze)
    model = prepare_model(model, device.torch_device)
    materialize_parameters(model, device.torch_device, device.torch_device)
    load_folder_weights(model, base)
    merging.merge_adapters(model, adapters_to_merge)
    if job.tuner == "lora" and named_folder == base:
        adapter.init_adapter_weights(model, job.lora, job.seed)
    _load_trained_weights(path, model)
    log.info(f"{path}: the model of step {path.name.rpartition('-')[2]}, on {base}")
    tokens = Path(job.tokenizer) if job.tokenizer else _find_tokenizer_folder(named_folder, adapters_to_merge, path)
    return model, custom_templates.folder_with_template(tokens, job.chat_template)


def _infer_command(settings: dict[str, Any]) -> str:
    """Return the command that has these settings: that of preference pairs, or `sft`."""
    return "dpo" if "loss" in settings or "beta" in settings else "sft"


def _load_trained_weights(path: Path, model: PreTrainedModel) -> None:
    """Put what was trained into the model, in the model's format."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    buffers = {name for name, _ in model.named_buffers()}
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name in trained or name in buffers}
    wide = {f"model.{name}": tensor.detach().float() for name, tensor in tensors.items()}
    before = adapter.get_initial_products(model)
    storage.read_tensors(path, wide, World())
    for name, tensor in tensors.items():
        tensor.copy_(wide[f"model.{name}"])
    adapter.restore_pissa_base(model, before)
