"""`anabatic rl`: questions, answers by the weights that are trained, rewards, and the loop of all trainings."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from anabatic.config.infer import Batching
from anabatic.config.rl import RlJob
from anabatic.config.sections.common import DerivedSizes
from anabatic.core import log
from anabatic.core.errors import ConfigError, DataError
from anabatic.core.formatting import format_count
from anabatic.data.batching.packing import Batch
from anabatic.data.chat import hidden_parts
from anabatic.data.readers.document import Message
from anabatic.data.readers.long_rows import LongRowCounter
from anabatic.data.scoring import questions as reading
from anabatic.data.scoring.questions import Question
from anabatic.data.tokenizer.hf_folder import encode_chat
from anabatic.device.device import Device
from anabatic.infer.cache_sizing import size_cache
from anabatic.infer.engine import Engine
from anabatic.infer.picture_prompts import PictureReader, make_picture_reader
from anabatic.infer.tool_execution import PythonTool, open_python_tool
from anabatic.models import fused_ops
from anabatic.models.forward import ModelRoot
from anabatic.parallel.sharding import resolve_sharding
from anabatic.plan import job_rules
from anabatic.recipes.training.served_rollouts import serve_rollouts
from anabatic.recipes.training.server_process import ServerProcess
from anabatic.recipes.training.session import log_plan, training_session
from anabatic.recipes.training.trained_model import (
    TrainableModel,
    TrainedModel,
    build_model,
    load_weights,
    make_model_saver,
    quantize_frozen,
    require_weight_files,
)
from anabatic.recipes.training.trainer import Trainer
from anabatic.rl.heldout_rewards import HeldoutRewards
from anabatic.rl.policy_loss import ALGORITHMS, ClipRange
from anabatic.rl.rewards import (
    ModelReward,
    RewardSet,
    ScoreFunction,
    list_judged_columns,
    require_tests,
    score_tests,
)
from anabatic.rl.rollout import RolloutGenerator, TurnFunction
from anabatic.rl.rollout_batches import PromptedQuestions, RolloutBatches
from anabatic.rl.rollout_loss import RolloutLoss
from anabatic.sandbox.sandbox_runner import Sandbox
from anabatic.train import sizing
from anabatic.train.context import TrainContext
from anabatic.train.metrics.recorder import MetricsRecorder
from anabatic.train.objectives import Objective
from anabatic.train.sizing import StepSizes

FULL_LR, ADAPTER_LR = 1e-6, 1e-5


@dataclass
class _Questions:
    """Questions with their prompts: to learn from, and held out."""

    train: list[Question]
    train_prompts: list[list[int]]
    heldout: list[Question]
    heldout_prompts: list[list[int]]
    pictures: PictureReader | None = None


@dataclass(frozen=True)
class RolloutSource:
    """Batches of answers that the trained weights write themselves: a `BatchSource`."""

    context: TrainContext[RlJob]
    questions: _Questions
    rewards: RewardSet
    make_generator: Callable[..., RolloutGenerator]
    pad_id: int
    score: Callable[[Batch], list[float]]
    eot_id: int = 0

    @property
    def has_heldout(self) -> bool:
        """Whether questions are held out."""
        return bool(self.questions.heldout)

    def describe_sources(self) -> dict[str, Any]:
        """Return the fields of the event `data`."""
        data = self.context.job.data
        fields: dict[str, Any] = {"train": [{"source": source, "kind": "questions"} for source in data.train]}
        if self.has_heldout:
            fields["heldout"] = [{"source": source, "kind": "questions"} for source in data.valid or data.train]
            if not data.valid:
                total = len(self.questions.train) + len(self.questions.heldout)
                fields["heldout_fraction"] = len(self.questions.heldout) / total
        return fields

    def open_stream(
        self, objective: Objective, sizes: StepSizes, state: dict[str, Any], stopping: Callable[[], bool]
    ) -> RolloutBatches:
        """Return the batches of rollouts, from where `state` says."""
        job = self.context.job
        batches = RolloutBatches(
            job,
            self.context.world,
            PromptedQuestions(
                self.questions.train,
                self.questions.train_prompts,
                None if self.questions.pictures is None else self.questions.pictures.rules,
            ),
            self.rewards,
            functools.partial(self.make_generator, self.questions.train, stopping),
            self.pad_id,
            stopping,
            self.score,
        )
        batches.load_state_dict(state)
        return batches

    def describe_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return what a logged row says about the rewards."""
        return dict(state["told"])

    def make_evaluator(
        self, objective: Objective, sizes: StepSizes, metrics: MetricsRecorder
    ) -> Callable[[int], dict[str, Any]]:
        """Return what measures the rewards of held-out questions after a step."""
        questions = self.questions
        if not questions.heldout:
            return lambda step: {}
        generator = functools.partial(self.make_generator, questions.heldout, lambda: False)
        heldout = HeldoutRewards(
            self.context.job, questions.heldout, questions.heldout_prompts, self.rewards, generator, self.context.world
        )
        return lambda step: _measure_heldout_rewards(heldout, step, metrics)

    def log_summary(self, state: dict[str, Any]) -> None:
        """Nothing is drawn by level."""


def run(job: RlJob) -> int:
    """Train as the job says; return the exit code."""
    with training_session(job) as context:
        job, device, world = context.job, context.device, context.world
        start = build_model(job, context.model, device, world)
        sharding = resolve_sharding(job.parallel, world, device)
        if job.quantize != "none":
            quantize_frozen(job, start)
        require_weight_files(start)
        micro_steps = job_rules.count_update_answers(job) // (job.device_batch_size * world.data_group.size)
        questions = _read_questions(job, start)
        with (
            open_python_tool(job.python, job.sandbox, start.tokenizer) as tool,
            _open_rewards(job, questions, device) as rewards,
            ServerProcess(
                job.rollout.command if world.is_main_process else None, Path(job.out) / "rollout-server.log"
            ) as server,
        ):
            turn = rewards.get_turn_function() if job.turns > 1 else None
            root = load_weights(job, start, sharding, device, world)
            log.info(fused_ops.apply_fused_setting(start.model, job.fused, device.type))
            plan = DerivedSizes()
            sizes = _resolve_sizes(job, plan, start, len(questions.train), micro_steps)
            log_plan(plan, start.model, world, sharding)
            pad_id = start.tokenizer.pad_token_id or 0
            save = make_model_saver(start, world)
            loss = _make_loss(job, root, device)
            fits = _count_needed_tokens(job, questions, turn)
            if job.rollout.engine == "local":
                make_generator = _make_generator_factory(
                    job, root, start.tokenizer, device, questions, turn, tool, fits
                )
            else:
                _require_servable(questions, tool)
                make_generator = serve_rollouts(context, start, loss, save, questions.train_prompts, fits, turn, server)
            source = RolloutSource(context, questions, rewards, make_generator, pad_id, loss.score_batch)
            model = TrainedModel(root, sharding, start.tokenizer, save, is_chat=True)
            objective = _make_objective(job, loss)
            code = Trainer(context, model, objective, source, plan, sizes, generates=True).train_and_save()
    return code


def _make_loss(job: RlJob, root: ModelRoot, device: Device) -> RolloutLoss:
    algorithm = ALGORITHMS[job.algorithm]
    clip = ClipRange(job.clip_low or algorithm.default_clip.low, job.clip_high or algorithm.default_clip.high)
    correction = (job.rollout.correction, job.rollout.correction_cap)
    return RolloutLoss(root, device, algorithm, clip, job.kl_coef, job.sampling.temperature, correction)


def _make_objective(job: RlJob, loss: RolloutLoss) -> Objective:
    return Objective(
        job.batch.resolved_seq_len,
        loss,
        lambda _: {},
        pack_batch=loss.pack,
        metric_sums=loss.sums,
        metric_names=loss.names,
    )


@contextmanager
def _open_rewards(job: RlJob, questions: _Questions, device: Device) -> Iterator[RewardSet]:
    """Yield what judges answers, once the rows are known to have what it needs."""
    names = {spec.partition("=")[0] for spec in job.rewards}
    rows = [*questions.train, *questions.heldout]
    other: dict[str, ScoreFunction] = {}
    with ExitStack() as stack:
        if "tests" in names:
            require_tests(rows)
            limits, settings = job.sandbox.to_sandbox_limits(), job.sandbox
            box = Sandbox(limits, allow_weaker=settings.allow_weaker, workers=settings.workers)
            other["tests"] = functools.partial(score_tests, sandbox=stack.enter_context(box))
        for name in names:
            if name.startswith("model:"):
                other[name] = ModelReward(Path(name.removeprefix("model:")).expanduser(), device).score_rollout
        room_left = job.sampling.max_new_tokens
        rewards = stack.enter_context(
            RewardSet(job.rewards, pattern=job.reward_pattern, timeout=job.reward_timeout, room=room_left, other=other)
        )
        rewards.require_answers(rows)
        yield rewards


def _read_questions(job: RlJob, start: TrainableModel) -> _Questions:
    """Read the questions and put them through the chat template.

    Raises:
        DataError: the model has no chat template, or a question leaves no room for an answer.
    """
    tokenizer = start.tokenizer
    if not tokenizer.chat_template:
        raise DataError(f"{start.named_folder} has no chat template", "fine-tune it with `anabatic sft` first")
    from anabatic.data.vision.own_processor import ProcessorRules

    rules = start.pictures
    assert not isinstance(rules, ProcessorRules)  # `job_rules` refuses such a model
    pictures = make_picture_reader(start.tokenizer, rules)
    media = None if pictures is None else job.data.media or ""
    judged = list_judged_columns(job.rewards)
    train, heldout = reading.load_questions(job.data, job.seed, job.eval.rows, judged, media)
    positions = start.model.config.get_text_config().max_position_embeddings
    encode = functools.partial(_encode_prompts, job, tokenizer, pictures)
    train, prompts = encode(train, "data.train", positions)
    heldout, held_prompts = encode(heldout[: job.eval.rows], "held out", 0)
    if not train:
        raise DataError(
            "no question leaves room for an answer", _seq_len_hint(job, positions) or "shorten the questions"
        )
    if not heldout:
        log.warn("nothing is held out: the training has no held-out reward")
    longest = max(map(len, prompts))
    log.info(f"{format_count(len(train))} questions of up to {longest} tokens, {format_count(len(heldout))} held out")
    return _Questions(train, prompts, heldout, held_prompts, pictures)


def _encode_prompts(
    job: RlJob, tokenizer: Any, pictures: PictureReader | None, questions: list[Question], what: str, positions: int
) -> tuple[list[Question], list[list[int]]]:
    """Return the questions that leave room for an answer, and their prompts; the others are skipped and counted.

    Args:
        positions: of the model; 0: however many are too long, it is logged and no error.
    """
    system = [{"role": "system", "content": job.system}] if job.system else []
    turns = [
        [*(system if question.messages[0]["role"] != "system" else []), *question.messages] for question in questions
    ]
    if not turns:
        return [], []
    if pictures is None:
        prompts = _apply_template(tokenizer, questions, turns)
    else:
        questions, prompts = _measure_prompts(pictures, questions, turns)
    room_left = job.batch.resolved_seq_len - 1
    long = LongRowCounter(f"{what}: questions", room_left, job.data.long_share if positions else 1.0)
    for question, prompt in zip(questions, prompts, strict=True):
        if len(prompt) > room_left:
            long.count_row(len(prompt), question.id)
    long.check_fraction(len(questions), _seq_len_hint(job, positions, long.longest_tokens + 1))
    fits = [at for at, prompt in enumerate(prompts) if len(prompt) <= room_left]
    return [questions[at] for at in fits], [prompts[at] for at in fits]


def _apply_template(tokenizer: Any, questions: list[Question], turns: list[list[Message]]) -> list[list[int]]:
    if any(question.tools for question in questions):
        pairs = zip(questions, turns, strict=True)
        return [_encode_with_tools(tokenizer, question, asked) for question, asked in pairs]
    prompts: list[list[int]] = tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    return prompts


def _measure_prompts(
    pictures: PictureReader, questions: list[Question], turns: list[list[Message]]
) -> tuple[list[Question], list[list[int]]]:
    """Return questions with the sizes of their pictures, and their prompts."""
    measured, prompts = [], []
    for question, asked in zip(questions, turns, strict=True):
        ids, grids = pictures.measure_row(asked, question.pictures, question.id, tools=question.tools)
        measured.append(replace(question, picture_grids=tuple(grids)))
        prompts.append(ids)
    return measured, prompts


def _encode_with_tools(tokenizer: Any, question: Question, turns: list[Message]) -> list[int]:
    hidden_parts.require_shown(turns, question.tools, tokenizer, question.id)
    return encode_chat(tokenizer, turns, question.tools)


def _seq_len_hint(job: RlJob, positions: int, required: int = 0) -> str:
    """Return the advice to raise batch.seq_len, where the model has room for that."""
    maximum = min(positions, required or positions)
    return f"give --batch.seq-len {maximum}" if maximum > job.batch.resolved_seq_len else ""


def _resolve_sizes(
    job: RlJob, plan: DerivedSizes, start: TrainableModel, questions: int, micro_steps: int
) -> StepSizes:
    lr = FULL_LR if start.lora is None else ADAPTER_LR
    plan.add_value("lr", job.optim.lr, lr, "gentle, for a trained model")
    if job.optim.name == "muon":
        plan.add_value("matrix_lr", job.optim.matrix_lr, 100 * lr, "100 x lr")
    steps = job.schedule.max_steps
    if steps is None:
        rounds = sizing.count_rounds(job.schedule.epochs or 1.0, questions, job.examples_per_step)
        plan.add_value(
            "steps", None, rounds * job.updates, f"{job.schedule.epochs or 1:g} epochs of {questions:,} questions"
        )
    else:
        plan.add_value("steps", steps, steps, "given")
    passes = plan.values["steps"] / job.updates * job.examples_per_step / questions
    plan.add_value("epochs", None, passes, f"of {questions:,} questions")
    nominal = job.device_batch_size * (
        job.sampling.max_new_tokens if ALGORITHMS[job.algorithm].normalizer != "answer" else 1
    )
    return StepSizes(
        nominal,
        micro_steps,
        int(plan.values["steps"]),
        float(plan.values["lr"]),
        float(plan.values.get("matrix_lr", 0.0)),
    )


def _make_generator_factory(
    job: RlJob,
    root: ModelRoot,
    tokenizer: Any,
    device: Device,
    asked: _Questions,
    turn: TurnFunction | None,
    tool: PythonTool | None,
    fits: int,
) -> Callable[..., RolloutGenerator]:
    """Return what makes an engine over the very weights that are trained. Its cache is freed with it, so that training
    has the memory."""
    batching = Batching(batch=job.rollout_batch, max_len=fits, cache_gib=job.cache_gib)
    tokens = size_cache(root.model, device, batching, job.device.nproc)

    def make_generator(questions: list[Question], stopping: Callable[[], bool], step: int) -> RolloutGenerator:
        engine = Engine(
            root.model,
            tokenizer,
            max_batch=batching.batch,
            max_len=fits,
            root=root,
            cache_tokens=tokens,
            step_tokens=batching.step_tokens,
            scaled=True,
            tool=tool,
        )
        return RolloutGenerator(engine, device, questions, root, job.turns, turn, stopping, asked.pictures)

    return make_generator


def _count_needed_tokens(job: RlJob, asked: _Questions, turn: TurnFunction | None) -> int:
    """Return the tokens that a prompt and its answer have at most."""
    longest = max(map(len, [*asked.train_prompts, *asked.heldout_prompts]))
    fits = job.batch.resolved_seq_len
    return fits if turn is not None else min(fits, longest + job.sampling.max_new_tokens + 1)


def _require_servable(asked: _Questions, tool: PythonTool | None) -> None:
    """Refuse what the engine of this process does and a server does not.

    Raises:
        ConfigError: questions have pictures, or the model runs code within its answers.
    """
    if any(question.pictures for question in [*asked.train, *asked.heldout]):
        raise ConfigError("servers are asked in tokens, and questions have pictures", "use --rollout.engine local")
    if tool is not None:
        raise ConfigError("servers do not run the code of answers", "use --python false, or --rollout.engine local")


def _measure_heldout_rewards(heldout: HeldoutRewards, step: int, metrics: MetricsRecorder) -> dict[str, Any]:
    row, rollouts = heldout.measure_rewards(step)
    for one in rollouts[:: heldout.job.eval.samples][: heldout.job.eval.show]:
        metrics.log_sample(
            step, heldout.questions[one.question].last_turn_text, one.text, between="\n", reward=one.reward
        )
    return row
