"""The rule book: what makes a job impossible, asked of its settings, the shape of its model and its mesh. No torch.

Rules are pure functions that yield an error for everything that they find; `recipes/resolve.py` asks all of them. The
range of a single setting is checked where the setting is declared (`__post_init__`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from anabatic.config.dpo import DpoJob
from anabatic.config.loading.command_package import find_command_name
from anabatic.config.loading.command_table import COMMANDS
from anabatic.config.pretrain import PretrainJob
from anabatic.config.rl import RlJob
from anabatic.config.sections.common import BatchSettings, ContextMethod
from anabatic.config.sections.train_jobs import LoopJob, TuneJob, is_auto
from anabatic.config.sft import SftJob
from anabatic.core.errors import AnabaticError, ConfigError, MultipleErrors
from anabatic.device.table import Chip
from anabatic.plan import layer_names
from anabatic.plan.mesh_shape import MeshShape
from anabatic.plan.model_facts import ModelFacts
from anabatic.plan.model_shape import packs_pictures, sees_pictures
from anabatic.plan.shapes.attention_kinds import DeltaAttention, LatentAttention
from anabatic.plan.shapes.decoder_shape import DecoderShape

QUANT_METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors", "mxfp4", "gptq", "awq", "bitsandbytes")
"""`quant_method` of folders whose weights are read (`models.published_weights`)."""
ZERO3_HINT = "--parallel.strategy zero3 divides every model"


def raise_problems(problems: Iterable[AnabaticError]) -> None:
    """Raise what was found: one error as it is, several as `MultipleErrors`; nothing, if there is none."""
    found = list(problems)
    if found:
        raise found[0] if len(found) == 1 else MultipleErrors(found)


def find_chip_problems(chip: Chip) -> Iterator[ConfigError]:
    """Yield if a chip trains nothing."""
    if not chip.can_train:
        yield ConfigError(
            f"{chip.name} is made for inference, and this is a training",
            "plan it for 910B4, 910B3 or 910C; a trained model may be asked on it: `anabatic export --dtype fp16`",
        )


def find_layout_problems(job: LoopJob, mesh: MeshShape, model: ModelFacts) -> Iterator[ConfigError]:
    """Yield why a job cannot be trained on a mesh, whatever its batch is.

    Args:
        job: with `batch.seq_len` and the settings of its DeepSpeed file filled in.
        model: rules over a shape that is not known are left to those who build the model.
    """
    yield from _find_pipeline_problems(job)
    seq_len = job.batch.seq_len
    if seq_len is not None and 0 < (model.positions or 0) < seq_len:
        yield ConfigError(
            f"batch.seq_len is {seq_len}, the model was made{model.made_by} for {model.positions} positions",
            f"use --batch.seq-len {model.positions} or less",
        )
    divides_model = mesh.tensor * mesh.context * mesh.expert * mesh.pipeline > 1
    if divides_model and (shape := model.find_shape()) is not None:  # of a new model it reads a large tokenizer.json
        yield from find_shape_problems(
            shape,
            tensor=mesh.tensor,
            context=mesh.context,
            context_method=job.parallel.context_method,
            expert=mesh.expert,
            pipeline=mesh.pipeline,
            pipeline_chunks=job.parallel.pipeline_chunks,
            seq_len=job.batch.resolved_seq_len,
        )
    yield from _find_strategy_problems(job, mesh)
    yield from _find_weight_problems(model.config)
    if isinstance(job, TuneJob) and sees_pictures(model.config):
        yield from _find_picture_problems(job, divides_model)
        if not packs_pictures(model.config):
            yield from _find_own_forward_problems(job)
    if isinstance(job, TuneJob) and job.quantize != "none":
        yield from _find_quantize_problems(job, mesh, model.is_whole)


def _find_weight_problems(config: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Yield if nobody here reads the weights that a config.json describes."""
    sections = (config, config.get("text_config"))
    found = [one.get("quantization_config") for one in sections if isinstance(one, Mapping)]
    for method in (one.get("quant_method") for one in found if isinstance(one, Mapping)):
        if method not in QUANT_METHODS:
            yield ConfigError(
                f"the model's weights are quantized by {str(method)[:40]}, which are not read here",
                f"{', '.join(QUANT_METHODS)} are; or use the model's folder in bf16",
            )


def _find_picture_problems(job: TuneJob, divides_model: bool) -> Iterator[ConfigError]:
    """Yield what a training of a model that sees does not do yet."""
    reasons = {
        "tensor, context, expert and pipeline ranks": divides_model,
        "batch.packing false": not job.batch.packing,
        "quantize": job.quantize != "none",
        "curriculum.by loss": isinstance(job, SftJob) and job.curriculum.use and job.curriculum.by == "loss",
        "eval.sample_prompts": bool(job.eval.sample_prompts),
    }
    for what in (name for name, is_asked in reasons.items() if is_asked):
        yield ConfigError(f"{job.model} reads pictures, for which {what} is not supported yet", f"leave out {what}")


def _find_own_forward_problems(job: TuneJob) -> Iterator[ConfigError]:
    """Yield what a training does not do for a model whose rows are not packed."""
    what = f"{job.model} reads pictures in a way that is not packed, so that each row is a forward pass"
    if not (isinstance(job, SftJob) or isinstance(job, DpoJob) and job.loss_type != "kto"):
        yield ConfigError(f"{what}: only sft and dpo without --loss-type kto train it", "use sft")
    if job.parallel.strategy in ("zero2", "zero3"):  # ranks with more rows would wait for weights of those with fewer
        yield ConfigError(f"{what}, and ranks with {job.parallel.strategy} have to agree on those", "use ddp")
    sizes = {"vision.min_pixels": job.vision.min_pixels, "vision.max_pixels": job.vision.max_pixels}
    for name in (name for name, value in sizes.items() if value is not None):
        yield ConfigError(
            f"{what}, and {name} is set: its own processor decides the sizes",
            f"leave out {name}, and change preprocessor_config.json in the model's folder",
        )
    if job.vision.cache_gib:
        yield ConfigError(f"{what}, and its own processor keeps no pictures", "leave out vision.cache_gib")


def find_shape_problems(
    shape: DecoderShape,
    *,
    tensor: int = 1,
    context: int = 1,
    context_method: ContextMethod = "ulysses",
    expert: int = 1,
    pipeline: int = 1,
    pipeline_chunks: int = 1,
    seq_len: int = 0,
) -> Iterator[ConfigError]:
    """Yield why a model of this shape cannot be divided so.

    Args:
        seq_len: tokens of a segment; windows as long as that are none.
    """
    indivisible = list(_find_head_problems(shape, tensor))
    yield from indivisible
    if expert > 1:
        yield from find_expert_problems(sorted({kind.experts for kind, _ in shape.count_kinds()} - {0}), expert)
    if context > 1 and not indivisible:
        yield from _find_context_problems(shape, tensor, context, context_method, seq_len)
    if pipeline > 1:
        yield from find_layer_problems(shape.layers, pipeline, pipeline_chunks)


def _find_head_problems(shape: DecoderShape, tensor: int) -> Iterator[ConfigError]:
    others = [kind.attention for kind, _ in shape.count_kinds() if kind.attention]
    delta = [kind for kind in others if isinstance(kind, DeltaAttention) and kind.layout != "kimi"]
    if tensor > 1 and len(delta) < len(others):
        other = next(kind for kind in others if kind not in delta)
        yield ConfigError(
            f"parallel.tensor is {tensor}, and {other.label} is not divided among tensor ranks",
            "use --parallel.tensor 1; zero3 divides its weights",
        )
        return
    yield from find_tensor_problems(
        {
            "attention heads": [shape.heads],
            "key/value heads": [shape.kv_heads],
            "key heads of linear attention": [kind.key_heads for kind in delta],
            "inner neurons of MLPs": [
                layer.outputs for kind, _ in shape.count_kinds() for layer in kind.mlp_linears[:1]
            ],
        },
        tensor,
    )


def find_tensor_problems(counts: Mapping[str, Sequence[int]], tensor: int) -> Iterator[ConfigError]:
    """Yield if tensor ranks cannot divide what they share.

    Args:
        counts: what is divided -> how many of it the layers have.
    """
    sizes = [size for values in counts.values() for size in values]
    if any(size % tensor for size in sizes):
        described = ", ".join(
            f"{' and '.join(map(str, sorted(set(values))))} {name}" for name, values in counts.items() if values
        )
        common = math.gcd(*sizes)
        yield ConfigError(
            f"parallel.tensor is {tensor}, which does not divide all of the model's {described}",
            f"use {_list_divisors(common)}" if common > 1 else f"leave parallel.tensor at 1; {ZERO3_HINT}",
        )


def find_expert_problems(counts: Sequence[int], expert: int) -> Iterator[ConfigError]:
    """Yield if expert ranks cannot divide the experts of every layer (`models/experts/expert_parallel.py`).

    Args:
        counts: numbers of experts that layers have; empty: there are none.
    """
    if not counts:
        yield ConfigError(
            f"parallel.expert is {expert}, and the model has no layers of stacked experts",
            f"leave parallel.expert at 1; {ZERO3_HINT}",
        )
    elif any(count % expert for count in counts):
        common = math.gcd(*counts)
        yield ConfigError(
            f"parallel.expert is {expert}, which does not divide {' and '.join(map(str, counts))} experts",
            f"use {_list_divisors(common, 2)}" if common > 1 else "leave parallel.expert at 1",
        )


def _find_context_problems(
    shape: DecoderShape, tensor: int, context: int, method: ContextMethod, seq_len: int
) -> Iterator[ConfigError]:
    """Yield why context ranks cannot exchange what the attention of every block needs (`parallel/context_ring.py`)."""
    linear = []
    for kind, count in shape.count_kinds():
        attention = kind.attention
        if isinstance(attention, DeltaAttention) and attention.layout == "kimi":
            yield ConfigError(
                f"parallel.context is {context}, and {attention.label} ({count} blocks) reads tokens in order",
                "use --parallel.context 1",
            )
        elif isinstance(attention, DeltaAttention):
            linear.append(attention.value_heads)
        reason = (
            f"attention in windows of {kind.window:,} tokens"
            if 0 < kind.window < seq_len
            else "attention with sinks"
            if kind.has_sinks
            else f"{attention.label} with values of {attention.value_dim} elements and keys of {attention.query_dim}"
            if isinstance(attention, LatentAttention) and attention.value_dim != attention.query_dim
            else ""
        )
        if reason and method == "ring":
            yield ConfigError(
                f"parallel.context-method is ring, which has no {reason}", "use --parallel.context-method ulysses"
            )
    yield from find_context_problems(shape.heads, linear, tensor, context, method)


def find_context_problems(
    heads: int, linear: Sequence[int], tensor: int, context: int, method: ContextMethod
) -> Iterator[ConfigError]:
    """Yield if context ranks cannot get the same number of heads (`models/linear_attention/delta_heads.py`).

    Args:
        heads: query heads of a layer; linear: value heads of layers of linear attention.
    """
    value_heads = {count // tensor for count in linear}
    counts = {} if method == "ring" else {"attention heads": heads // tensor}
    counts |= {"value heads of linear attention": math.gcd(*value_heads)} if value_heads else {}
    refused = [f"{count} {name}" for name, count in counts.items() if count % context]
    if refused:
        has_other_way = method != "ring" and not any(count % context for count in value_heads)
        each = f" on each of {tensor} tensor ranks" if tensor > 1 else ""
        yield ConfigError(
            f"parallel.context is {context}, which does not divide the model's {' and '.join(refused)}{each}",
            f"use {_list_divisors(math.gcd(*counts.values()))}"
            + (", or --parallel.context-method ring" if has_other_way else ""),
        )


def find_layer_problems(layers: int, stages: int, chunks: int) -> Iterator[ConfigError]:
    """Yield if a decoder's layers are fewer than the chunks of all stages."""
    if layers < stages:
        yield ConfigError(f"parallel.pipeline is {stages}, the model has {layers} layers", f"use {layers} or less")
    elif layers < stages * chunks:
        yield ConfigError(
            f"parallel.pipeline {stages} x parallel.pipeline_chunks {chunks} = {stages * chunks}, the model has"
            f" {layers} layers",
            "leave --parallel.pipeline-chunks out"
            if layers // stages == 1
            else f"use --parallel.pipeline-chunks {layers // stages} or less",
        )


def find_tuner_problems(job: LoopJob, model: ModelFacts) -> Iterator[ConfigError]:
    """Yield if a model lacks what the tuner would train; families that are not known are left to its builder."""
    if not isinstance(job, TuneJob):
        return
    try:
        if model.is_adapter:
            layer_names.require_adapter_tuner(model.folder or model.name, job.tuner)
            return
        if job.tuner == "freeze":
            list(layer_names.compile_freeze_patterns(job.freeze))
        blocks = layer_names.count_blocks(model.config)
        if blocks is None or not model.is_whole:
            return
        if job.tuner == "freeze":
            layer_names.require_blocks(job.freeze, blocks)
        elif job.tuner == "lora":
            layer_names.select_target_modules(layer_names.list_linear_layers(model.config), job.lora.target_modules)
    except ConfigError as error:
        yield error


def _find_strategy_problems(job: LoopJob, mesh: MeshShape) -> Iterator[ConfigError]:
    if job.parallel.strategy == "single" and mesh.gradient_size > 1:
        yield ConfigError(
            f"parallel.strategy is single, and {mesh.gradient_size} ranks share the gradients", "use ddp, or one device"
        )
    if not isinstance(job, RlJob) or job.rollout.engine != "local":
        return
    for name, divides in (
        (f"parallel.strategy {job.parallel.strategy}", _divides_weights(job, mesh)),
        (f"parallel.tensor {mesh.tensor}", mesh.tensor > 1),
        (f"parallel.expert {mesh.expert}", mesh.expert > 1),
    ):
        if divides:
            yield ConfigError(
                f"{name} divides the weights, and answers are drawn from whole ones",
                "use parallel.strategy ddp, with adapters (--tuner lora) where memory is short, or let a server answer:"
                " --rollout.engine vllm",
            )


def _divides_weights(job: LoopJob, mesh: MeshShape) -> bool:
    return job.parallel.strategy in ("zero2", "zero3") and mesh.gradient_size > 1


def _find_quantize_problems(job: TuneJob, mesh: MeshShape, is_whole_model: bool) -> Iterator[ConfigError]:
    """Yield if quantized weights would be trained or divided."""
    if job.tuner != "lora" and is_whole_model:
        message = f"quantize is {job.quantize}, and the model itself is trained"
        yield ConfigError(message, "use --tuner lora, or --quantize none")
    for name, divides in (
        (f"parallel.strategy is {job.parallel.strategy}", _divides_weights(job, mesh)),
        (f"parallel.tensor is {mesh.tensor}", mesh.tensor > 1),
    ):
        if divides:
            yield ConfigError(
                f"quantize is {job.quantize}, and {name}, which divides the weights",
                "packed weights are whole on every device: use ddp without parallel.tensor, or --quantize none",
            )


def find_batch_problems(batch: BatchSettings, ranks: int) -> Iterator[ConfigError]:
    """Yield if the global batch is not a multiple of the micro-batches of all ranks, where both are set.

    Args:
        ranks: number of data-parallel processes.
    """
    if batch.global_batch_tokens is None or batch.micro_batch_tokens is None:
        return
    micro, target = batch.micro_batch_tokens, batch.global_batch_tokens
    if target % (micro * ranks):
        yield ConfigError(
            f"batch.global_batch_tokens {target} is not a multiple of {ranks} ranks x {micro} micro-batch tokens"
            f" = {micro * ranks}",
            f"set batch.global_batch_tokens to {max(1, target // (micro * ranks)) * micro * ranks},"
            " or change batch.micro_batch_tokens",
        )


def find_share_problems(job: LoopJob, mesh: MeshShape, processes: int) -> Iterator[ConfigError]:
    """Yield why a batch cannot be divided among processes; a plan rounds it instead, and says so."""
    if isinstance(job, RlJob):
        yield from find_answer_problems(job, mesh.data_size)
    if processes == 1 or not is_auto(job):  # which may choose a mesh whose processes share a batch
        yield from find_batch_problems(job.batch, mesh.data_size)


def find_answer_problems(job: RlJob, ranks: int) -> Iterator[ConfigError]:
    """Yield if the answers of an update are not a multiple of the micro-batches of all ranks."""
    answers, each = count_update_answers(job), job.device_batch_size * ranks
    if answers % each:
        yield ConfigError(
            f"an update has {answers} answers, not a multiple of {ranks} ranks x device_batch_size"
            f" {job.device_batch_size} = {each}",
            "change device_batch_size, examples_per_step or num_samples",
        )


def count_update_answers(job: RlJob) -> int:
    """Return the answers that an update of the weights learns from, on all ranks."""
    return job.examples_per_step * job.num_samples // job.updates


def _find_pipeline_problems(job: LoopJob) -> Iterator[ConfigError]:
    """Yield what of a job stages cannot train."""
    stages = job.parallel.pipeline
    if stages == 1:
        return
    if type(job) not in (PretrainJob, SftJob):
        yield ConfigError(
            f"parallel.pipeline is {stages}, and {find_command_name(job, COMMANDS.values())} does not train in stages",
            "leave parallel.pipeline at 1: pretrain and sft take it",
        )
        return
    for what, hint in _list_unsupported_in_stages(job):
        yield ConfigError(f"parallel.pipeline is {stages}, and {what}", f"{hint}, or leave parallel.pipeline at 1")


def _list_unsupported_in_stages(job: Any) -> Iterator[tuple[str, str]]:
    if job.eval.sample_prompts:
        yield "eval.sample_prompts needs the whole model on one process", "leave them out"
    if job.save.memory_every:
        yield f"save.memory_every is {job.save.memory_every}", "use --save.memory-every 0"
    if job.parallel.check_replicas:
        yield f"parallel.check_replicas is {job.parallel.check_replicas}", "use --parallel.check-replicas 0"
    if job.parallel.offload != "none":
        yield f"parallel.offload is {job.parallel.offload}", "use --parallel.offload none"
    if job.parallel.deepspeed is not None:
        yield f"parallel.deepspeed is {job.parallel.deepspeed}", "leave it out"
    if isinstance(job, TuneJob):
        yield from _list_unsupported_tuning(job)


def _list_unsupported_tuning(job: Any) -> Iterator[tuple[str, str]]:
    if job.tuner == "freeze":
        yield "tuner is freeze, which may leave a stage nothing to train", "use --tuner full or lora"
    if job.quantize != "none":
        yield f"quantize is {job.quantize}", "use --quantize none"
    if job.adapter:
        yield f"adapter is {job.adapter[0]}", "merge it first with `anabatic merge`"
    if job.lora.init == "pissa":
        yield "lora.init is pissa", "use --lora.init default"
    if job.lora.use_dora:
        yield "lora.use_dora is true", "use --lora.use-dora false"
    if job.lora.modules_to_save:
        yield f"lora.modules_to_save is {', '.join(job.lora.modules_to_save)}", "leave it out"
    if job.curriculum.use and job.curriculum.by == "loss":
        yield "curriculum.by is loss", "use another order"


def _list_divisors(number: int, smallest: int = 1) -> str:
    divisors = [str(size) for size in range(smallest, number + 1) if number % size == 0]
    return " or ".join(divisors)
