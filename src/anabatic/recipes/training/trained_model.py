"""The model of a training: found, built without memory, quantised, loaded, compiled, given its step, and saved."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from anabatic.config.sections.common import DEFAULT_SEQ_LEN, require_setting
from anabatic.config.sections.train_jobs import LoopJob, Lora, TuneJob, Vision
from anabatic.core import log, paths
from anabatic.data.chat import custom_templates
from anabatic.data.tokenizer.hf_folder import load_tokenizer
from anabatic.device import compile_cache
from anabatic.device.compile_time import COMPILE_CLOCK
from anabatic.device.compiled_code import CompiledCode
from anabatic.device.device import Device, should_compile
from anabatic.models import fused_ops, weight_casts, weight_files
from anabatic.models.experts.routing import make_recorder
from anabatic.models.forward import ModelRoot
from anabatic.models.lora import adapter, adapter_config, merging
from anabatic.models.lora.merging import WeightedAdapter
from anabatic.models.model_init import has_experts, materialize_model, resolve_weight_dtype
from anabatic.models.pretrained import (
    build_meta_causal_lm,
    enable_activation_checkpointing,
    find_tokenizer_folder,
    load_folder_weights,
    read_config,
    require_tokenizer_fits,
    resolve_base_folder,
    resolve_merged_adapters,
    resolve_model_folder,
    save_model,
)
from anabatic.models.weights_reader import iter_quantized_weights
from anabatic.parallel import pipeline_parameters
from anabatic.parallel.collectives import barrier
from anabatic.parallel.sharding import ShardingPlan, wrap_ddp
from anabatic.parallel.world import World
from anabatic.plan import layer_names
from anabatic.plan.model_facts import ModelFacts, find_model_facts, max_positions, model_name, with_model
from anabatic.train.context import TrainContext
from anabatic.train.objectives import Objective
from anabatic.train.optim.optimizer import HeadRates, LearningRates, Optimizer
from anabatic.train.sizing import StepSizes
from anabatic.train.step import TrainStep

if TYPE_CHECKING:
    from anabatic.data.vision.model_pictures import ModelPictures

_DEFAULT_VISION = Vision()


@dataclass(frozen=True)
class TrainedModel:
    """A model where it is trained.

    Attributes:
        save: writes a folder of the model as it is now; every rank calls it.
        is_chat: it answers in turns: samples are answers to a user.
        head_rates: learning rates of its own head.
    """

    root: ModelRoot
    sharding: ShardingPlan
    tokenizer: Any
    save: Callable[[Path], None]
    is_chat: bool = False
    head_rates: HeadRates = HeadRates()

    @property
    def network(self) -> PreTrainedModel:
        """The model itself, without the wrapper that computes losses."""
        return self.root.model

    def compile(self, context: TrainContext[LoopJob], steps: int) -> CompiledCode | None:
        """Compile the model's blocks for a run of that many steps, where that pays and is possible.

        Returns:
            What keeps the compiled code for the next start; None: nothing is compiled, or torch keeps it by itself.
        """
        compiled, reason = should_compile(context.job.device, context.device.device_row, steps)
        if context.world.tensor_group.size > 1:
            compiled, reason = False, "layers that add up among processes are not compiled"
        if not context.job.batch.packing:
            compiled, reason = False, "padded batches have another shape each"
        if any(iter_quantized_weights(self.network)):
            compiled, reason = False, "packed weights take turns in the same memory"
        missing = compile_cache.find_missing_compiler(context.device.type) if compiled else None
        if missing:
            compiled, reason = False, missing
        report = log.warn if context.job.device.compile == "on" and not compiled else log.info
        report(f"torch.compile {'on' if compiled else 'off'} ({reason})")
        if compiled:
            code = compile_cache.use_cached_code()
            COMPILE_CLOCK.watch_compiling()
            place = compile_cache.get_torch_folder() if code is None else code.store
            log.info(f"{fused_ops.compile_blocks(self.network)} modules are compiled at first use, cached at {place}")
            return code
        return None

    def make_step(self, context: TrainContext[LoopJob], objective: Objective, sizes: StepSizes) -> TrainStep:
        """Return the training step of this model: its optimizer, and its gradients reduced over the data group."""
        device, world = context.device, context.world
        optimizer = Optimizer(
            self.network,
            context.job.optim,
            LearningRates(sizes.lr, sizes.matrix_lr, self.head_rates),
            device,
            world,
            self.sharding.get_state_device(device),
            self.root.expert_params,
        )
        if device.device_row.cast_weights_together and not self.sharding.is_sharded and world.tensor_group.size == 1:
            weight_casts.install_block_casts(self.network, device)
        balance = context.job.optim.router_aux_loss
        routing = None
        if balance or has_experts(self.network):
            routing = make_recorder(self.network, balance, device.torch_device, world.context_group)
        if routing is not None and routing.coefficient:
            log.info(f"router loss: {routing.coefficient:g} times the load-balancing loss of transformers")
        return TrainStep(
            wrap_ddp(self.root, self.sharding, device, world),
            objective.loss_fn,
            optimizer,
            sizes.micro_batch_tokens,
            objective.pack_batch,
            objective.metric_sums,
            objective.metric_names,
            routing=routing,
        )


@dataclass(frozen=True)
class TrainableModel:
    """A model to be trained further, without memory, with what belongs to it.

    Attributes:
        named_folder: its folder, perhaps an adapter's; base_folder: the one with the weights; merged_adapters: adapters
        that go into them.
        lora: settings of the adapter that is trained; None: the model itself is.
        pictures: how it wants its pictures; None: it sees none.
    """

    named_folder: Path
    base_folder: Path
    merged_adapters: list[WeightedAdapter]
    tokenizer_folder: Path
    tokenizer: Any
    model: PreTrainedModel
    lora: Lora | None
    pictures: ModelPictures | None = None

    @property
    def is_adapter(self) -> bool:
        """Whether the job names an adapter, whose training continues."""
        return self.named_folder != self.base_folder


def find_training_model(job: LoopJob, world: World) -> ModelFacts:
    """Return what is known of the model of a job, which is fetched if it lies on a hub."""
    name, hub = model_name(job), getattr(job, "hub", None)
    found = find_model_facts(job)
    if not name:
        return found
    is_known = found.is_adapter is False and max_positions(found.config) is not None
    if is_known and hub is None and str(found.folder) == name:  # whole, and here under this very name
        return replace(found, base_folder=found.folder)
    folder = resolve_model_folder(name, hub, world)
    base = resolve_base_folder(folder, hub, world)
    found = find_model_facts(with_model(job, str(base)))
    if max_positions(found.config) is None:  # config.json leaves it to the default of its family
        found = replace(found, config={"max_position_embeddings": DEFAULT_SEQ_LEN} | read_config(base).to_dict())
    return replace(found, is_adapter=folder != base, folder=folder, base_folder=base)


def build_model(job: TuneJob, facts: ModelFacts, device: Device, world: World) -> TrainableModel:
    """Build the model of a job without memory.

    Args:
        facts: of `find_training_model`.
    """
    named_folder, base_folder = facts.folder, facts.base_folder
    assert named_folder is not None and base_folder is not None  # a training begins with a model that is here
    adapters_to_merge = resolve_merged_adapters(job.adapter, named_folder, job.hub, world)
    tokenizer_folder = Path(job.tokenizer) if job.tokenizer else find_tokenizer_folder(named_folder, adapters_to_merge)
    template_folder = tokenizer_folder
    if job.chat_template is not None:
        template_folder = custom_templates.folder_with_template(tokenizer_folder, job.chat_template)
    tokenizer = load_tokenizer(template_folder)
    model, lora = _build_meta_model(job, named_folder, base_folder, device, tokenizer, template_folder)
    return TrainableModel(
        named_folder,
        base_folder,
        adapters_to_merge,
        template_folder,
        tokenizer,
        model,
        lora,
        _read_pictures(job, named_folder, base_folder, template_folder, model),
    )


def _sees(model: PreTrainedModel) -> bool:
    return getattr(model.config, "vision_config", None) is not None


def _read_pictures(
    job: TuneJob, named_folder: Path, base_folder: Path, tokenizer_folder: Path, model: PreTrainedModel
) -> ModelPictures | None:
    if not _sees(model):
        return None
    from anabatic.data.vision.model_pictures import read_model_pictures
    from anabatic.models.vision.processor_files import find_processor_folder

    folder = find_processor_folder(named_folder, base_folder)
    rules = read_model_pictures(folder, tokenizer_folder, model.config.to_dict(), **job.vision.get_bounds())
    if not job.vision.cache_gib:
        return rules
    from anabatic.data.vision.picture_cache import PictureCache
    from anabatic.data.vision.picture_rules import PictureRules

    assert isinstance(rules, PictureRules)  # `job_rules` refuses the cache for others

    given = getattr(job.data, "cache", None)
    root = Path(given).expanduser() if given else paths.get_cache_root()
    return replace(rules, cache=PictureCache(root / "pictures", round(job.vision.cache_gib * 2**30)))


def choose_trained_prefixes(job: TuneJob, model: PreTrainedModel, is_full: bool) -> tuple[str, ...]:
    """Return how the names begin of what may be trained; of a model of text alone everything."""
    if not _sees(model):
        if job.vision != _DEFAULT_VISION:
            log.warn("the model sees no pictures: the settings of vision are not used")
        return ("",)
    from anabatic.models.vision import model_parts

    parts = model_parts.choose_parts(job.vision.train, is_full)
    prefixes = model_parts.find_trained_prefixes(model, parts)
    log.info(f"a model that sees; trained: {', '.join(parts)}")
    if adapter.runs_own_forward(model):
        log.info(
            f"rows are not packed: {model.config.model_type} is not among the kinds that are proven equal when packed;"
            " each row goes through transformers' own forward pass"
        )
    return prefixes


def _build_meta_model(
    job: TuneJob, named_folder: Path, base_folder: Path, device: Device, tokenizer: Any, tokenizer_folder: Path
) -> tuple[PreTrainedModel, Lora | None]:
    """Return the model without memory, what is trained requiring gradients, and the adapter's settings if it is one.

    What is frozen is kept in the format of the matrix products, what is trained as `optim.weights` says.
    """
    trained = resolve_weight_dtype(job.optim, device)
    tuner = job.tuner
    if tuner == "auto":
        tuner = "full" if named_folder == base_folder else "lora"
    for section, needed in (("lora", "lora"), ("freeze", "freeze")):
        if tuner != needed and getattr(job, section) != type(getattr(job, section))():
            log.warn(f"tuner is {tuner}: the settings of {section} are not used")
    model = build_meta_causal_lm(base_folder, trained if tuner == "full" else device.dtype)
    lora, prefixes = None, choose_trained_prefixes(job, model, tuner == "full")
    require_tokenizer_fits(model.config, tokenizer, tokenizer_folder)
    if named_folder != base_folder:
        layer_names.require_adapter_tuner(named_folder, job.tuner)
        lora = adapter.insert_saved_adapter(model, named_folder)
        unused = job.lora != Lora()
        note = "; the settings of lora are not used: it continues as it is" if unused else ""
        (log.warn if unused else log.info)(f"continuing with the adapter {named_folder} of rank {lora.r}{note}")
    elif tuner == "lora":
        lora = job.lora
        targets = adapter.insert_adapter(model, lora, prefixes)
        log.info(f"LoRA of rank {lora.r} in {len(targets)} layers, scaled by {adapter.compute_scale(lora):g}")
    elif tuner == "freeze":
        adapter.freeze_parameters(model, job.freeze)
    elif prefixes != ("",):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith(prefixes))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(trained)
    if job.recompute != "none":
        enable_activation_checkpointing(model, job.recompute)
    return model, lora


def quantize_frozen(job: TuneJob, start: TrainableModel) -> None:
    """Hold the frozen weights in few bits, if asked for.

    Raises:
        ConfigError: the adapter that the job names changes the weights.
    """
    lora, named_folder = start.lora, start.named_folder
    assert job.quantize != "none"  # the caller has asked
    what = f"quantize is {job.quantize}"
    require_setting(lora is None or not lora.use_dora, f"{what}, and {named_folder} has DoRA", "use --quantize none")
    require_setting(
        not start.merged_adapters,
        f"{what}, and adapters become part of the weights",
        "merge them first with `anabatic merge`",
    )
    log.info(f"{adapter.quantize_frozen_layers(start.model, job.quantize)} linear layers are frozen in {job.quantize}")


def require_weight_files(start: TrainableModel) -> None:
    """Require readable weight files, before the rows are read."""
    is_adapter = start.is_adapter
    weight_files.require_weight_files(start.base_folder)
    if is_adapter:
        adapter_config.require_adapter_weights(start.named_folder)


def load_weights(
    job: TuneJob, found: TrainableModel, sharding: ShardingPlan, device: Device, world: World
) -> ModelRoot:
    """Bring it to where it is trained and give it its first weights."""
    root = materialize_model(found.model, sharding, device, world)
    load_folder_weights(found.model, found.base_folder)
    if found.merged_adapters:
        merging.merge_adapters(found.model, found.merged_adapters)
    if found.is_adapter:
        adapter.load_adapter(found.model, found.named_folder)
    elif found.lora is not None:
        adapter.init_adapter_weights(found.model, found.lora, job.seed)
    return root


def make_file_copier(start: TrainableModel) -> Callable[[Path], None] | None:
    """Return what copies the files of a model that sees, with the sizes it is trained with, into a folder; None: it
    sees none."""
    if start.pictures is None:
        return None
    from anabatic.data.vision.picture_rules import PictureRules
    from anabatic.models.vision.processor_files import copy_processor_files

    rules = start.pictures if isinstance(start.pictures, PictureRules) else None
    return lambda folder: copy_processor_files(start.base_folder, folder, rules)


def hold_all_stages(model: PreTrainedModel, world: World, trained_only: bool = False) -> AbstractContextManager[None]:
    """Hold the parameters of all stages of a pipeline while a model is written; every rank calls this."""
    if world.pipeline_group.size == 1:
        return nullcontext()
    return pipeline_parameters.gathered_parameters(model, world.pipeline_group, trained_only)


def make_model_saver(start: TrainableModel, world: World) -> Callable[[Path], None]:
    """Return what writes a Hugging Face folder of the model as it is, or an adapter's; every rank calls it."""
    merged = merging.make_merged_record(start.merged_adapters) if start.merged_adapters else {}
    keep_files = make_file_copier(start)

    def save_folder(folder: Path) -> None:
        with hold_all_stages(start.model, world, trained_only=start.lora is not None):
            if start.lora is None:
                save_model(start.model, folder, start.tokenizer, world.is_main_process, keep_files)
            elif world.pipeline_group.rank == 0:
                adapter.save_adapter(
                    start.model,
                    folder,
                    start.tokenizer,
                    start.lora,
                    start.base_folder,
                    world.is_main_process,
                    merged,
                    keep_files,
                )
        barrier(world)

    return save_folder
