"""`anabatic rl`: questions, answers by the weights that are trained, rewards, and the loop of all trainings."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anabatic.config.infer import Batching
from anabatic.config.rl import RlJob
from anabatic.config.shared import require
from anabatic.core import log
from anabatic.core.errors import DataError
from anabatic.core.text import count
from anabatic.data import questions as reading
from anabatic.data.long_rows import LongRows
from anabatic.data.questions import Question
from anabatic.device.device import Device
from anabatic.infer.engine import Engine
from anabatic.infer.plan import room
from anabatic.infer.tool import PythonTool, python_tool
from anabatic.models import fuse
from anabatic.models.build import Plan
from anabatic.models.forward import Root
from anabatic.parallel.shard import settle
from anabatic.plan import divide
from anabatic.recipes.begin import begun, say_plan
from anabatic.recipes.sft import Opened, filled, opened, packed, require_weights
from anabatic.recipes.training import Corpus, Training
from anabatic.rl import programs
from anabatic.rl.held import HeldOut
from anabatic.rl.loss import ALGORITHMS, Clip
from anabatic.rl.objective import RolloutLoss
from anabatic.rl.reward_model import RewardModel
from anabatic.rl.rewards import Rewards, Score
from anabatic.rl.rollout import Generator, Turn
from anabatic.rl.rounds import Rounds
from anabatic.sandbox.box import Sandbox
from anabatic.train import plan as planning
from anabatic.train.goal import Goal
from anabatic.train.metrics import Metrics
from anabatic.train.plan import Sizes

FULL_LR, ADAPTER_LR = 1e-6, 1e-5


@dataclass
class _Asked:
    """Questions with their prompts: to learn from, and held out."""

    train: list[Question]
    prompts: list[list[int]]
    held: list[Question]
    held_prompts: list[list[int]]


def run(job: RlJob) -> int:
    """Train as the job says; return the exit code."""
    with begun(job) as (job, folder, device, world, found):
        start = opened(job, device, world)
        division = settle(job.parallel, world, device)
        whole = not division.sharded and world.tensor.size == 1
        hint = "use parallel.strategy ddp, with adapters (--tuner lora) where memory is short"
        require(whole, f"{division.strategy} divides the weights, and answers are drawn from whole ones", hint)
        packed(job, start.model, start.named, start.lora, start.shares, division)
        require_weights(start.named, start.base)
        micro_steps = divide.micro_steps(job, world.data.size)
        asked = _questions(job, start)
        with (
            python_tool(job.python, job.sandbox, start.tokenizer) as tool,
            _rewards(job, asked, device) as rewards,
        ):
            turn = rewards.turn() if job.turns > 1 else None
            root = filled(job, start, division, device, world)
            log.info(fuse.settle(start.model, job.fused, device.type))
            plan = Plan()
            sizes = _sizes(job, plan, start, len(asked.train), micro_steps)
            say_plan(plan, start.model, world, division)
            algorithm = ALGORITHMS[job.algorithm]
            clip = Clip(job.clip_low or algorithm.clip.low, job.clip_high or algorithm.clip.high)
            loss = RolloutLoss(root, device, algorithm, clip, job.kl_coef, job.sampling.temperature)
            engines = _engines(job, root, start.tokenizer, device, asked, turn, tool)
            pad_id = start.tokenizer.pad_token_id or 0

            def rounds(state: dict[str, Any], stopping: Callable[[], bool]) -> Rounds:
                return Rounds(
                    job, asked.train, asked.prompts, rewards, algorithm,
                    functools.partial(engines, asked.train, stopping), world, micro_steps, pad_id, state,
                    stopping,
                )  # fmt: skip

            training = Training(
                job, folder, device, world, root, division, start.tokenizer, Corpus([], None), plan, sizes, found
            )
            training.chat, training.lora, training.base, training.shares = True, start.lora, start.base, start.shares
            training.goal = Goal(job.batch.length, loss, lambda _: {}, pack=loss.pack, sums=loss.sums, names=loss.names)
            training.source, training.describe = rounds, lambda state: dict(state["told"])
            if asked.held:
                stay = functools.partial(engines, asked.held, lambda: False)
                held = HeldOut(job, asked.held, asked.held_prompts, rewards, stay, world)
                training.measure = functools.partial(_measure, held)
            code = training.go()
    return code


@contextmanager
def _rewards(job: RlJob, asked: _Asked, device: Device) -> Iterator[Rewards]:
    """Yield what judges answers, once the rows are known to have what it needs."""
    names = {spec.partition("=")[0] for spec in job.rewards}
    rows = [*asked.train, *asked.held]
    other: dict[str, Score] = {}
    with ExitStack() as stack:
        if "tests" in names:
            programs.require(rows)
            limits, settings = job.sandbox.limits(), job.sandbox
            box = Sandbox(limits, allow_weaker=settings.allow_weaker, workers=settings.workers)
            other["tests"] = functools.partial(programs.passes_tests, sandbox=stack.enter_context(box))
        for name in names:
            if name.startswith("model:"):
                other[name] = RewardModel(Path(name.removeprefix("model:")).expanduser(), device).score
        room_left = job.sampling.max_new_tokens
        rewards = stack.enter_context(
            Rewards(job.rewards, pattern=job.reward_pattern, timeout=job.reward_timeout, room=room_left, other=other)
        )
        rewards.require(rows)
        yield rewards


def _questions(job: RlJob, start: Opened) -> _Asked:
    """Read the questions and put them through the chat template.

    Raises:
        DataError: the model has no chat template, or a question leaves no room for an answer.
    """
    tokenizer = start.tokenizer
    if not tokenizer.chat_template:
        raise DataError(f"{start.named} has no chat template", "fine-tune it with `anabatic sft` first")
    train, held = reading.read(job.data, job.seed, job.eval.rows)
    positions = start.model.config.max_position_embeddings
    train, prompts = _prompts(job, tokenizer, train, "data.train", positions)
    held, held_prompts = _prompts(job, tokenizer, held[: job.eval.rows], "held out", 0)
    if not train:
        raise DataError("no question leaves room for an answer", _longer(job, positions) or "shorten the questions")
    if not held:
        log.warn("nothing is held out: the training has no held-out reward")
    longest = max(map(len, prompts))
    log.info(f"{count(len(train))} questions of up to {longest} tokens, {count(len(held))} held out")
    return _Asked(train, prompts, held, held_prompts)


def _prompts(
    job: RlJob, tokenizer: Any, asked: list[Question], what: str, positions: int
) -> tuple[list[Question], list[list[int]]]:
    """Return the questions that leave room for an answer, and their prompts; the others are passed over and counted.

    Args:
        positions: of the model; 0: however many are too long, it is told and no error.
    """
    system = [{"role": "system", "content": job.system}] if job.system else []
    turns = [[*(system if question.messages[0]["role"] != "system" else []), *question.messages] for question in asked]
    if not turns:
        return [], []
    prompts: list[list[int]] = tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    room_left = job.batch.length - 1
    long = LongRows(f"{what}: questions", room_left, job.data.long_share if positions else 1.0)
    for question, prompt in zip(asked, prompts, strict=True):
        if len(prompt) > room_left:
            long.add(len(prompt), question.id)
    long.require(len(asked), _longer(job, positions, long.longest + 1))
    fits = [at for at, prompt in enumerate(prompts) if len(prompt) <= room_left]
    return [asked[at] for at in fits], [prompts[at] for at in fits]


def _longer(job: RlJob, positions: int, wanted: int = 0) -> str:
    """Return the advice to raise batch.seq_len, where the model has room for that."""
    most = min(positions, wanted or positions)
    return f"give --batch.seq-len {most}" if most > job.batch.length else ""


def _sizes(job: RlJob, plan: Plan, start: Opened, questions: int, micro_steps: int) -> Sizes:
    lr = FULL_LR if start.lora is None else ADAPTER_LR
    plan.add("lr", job.optim.lr, lr, "gentle, for a trained model")
    if job.optim.name == "muon":
        plan.add("matrix_lr", job.optim.matrix_lr, 100 * lr, "100 x lr")
    steps = job.schedule.max_steps
    if steps is None:
        rounds = planning.rounds(job.schedule.epochs or 1.0, questions, job.examples_per_step)
        plan.add("steps", None, rounds * job.updates, f"{job.schedule.epochs or 1:g} epochs of {questions:,} questions")
    else:
        plan.add("steps", steps, steps, "given")
    passes = plan.values["steps"] / job.updates * job.examples_per_step / questions
    plan.add("epochs", None, passes, f"of {questions:,} questions")
    nominal = job.device_batch_size * (job.sampling.max_new_tokens if ALGORITHMS[job.algorithm].per != "answer" else 1)
    return Sizes(
        nominal, micro_steps, int(plan.values["steps"]), float(plan.values["lr"]),
        float(plan.values.get("matrix_lr", 0.0)),
    )  # fmt: skip


def _engines(
    job: RlJob,
    root: Root,
    tokenizer: Any,
    device: Device,
    asked: _Asked,
    turn: Turn | None,
    tool: PythonTool | None,
) -> Callable[..., Generator]:
    """Return what makes an engine over the very weights that are trained. Its cache is freed with it, so that training
    has the memory."""
    longest = max(map(len, [*asked.prompts, *asked.held_prompts]))
    fits = min(job.batch.length, longest + job.sampling.max_new_tokens + 1) if turn is None else job.batch.length
    batching = Batching(batch=job.rollout_batch, max_len=fits, cache_gib=job.cache_gib)
    tokens = room(root.model, device, batching, job.device.nproc)

    def make(questions: list[Question], stopping: Callable[[], bool]) -> Generator:
        engine = Engine(
            root.model, tokenizer, max_batch=batching.batch, max_len=fits, root=root,
            cache_tokens=tokens, step_tokens=batching.step_tokens, scaled=True, tool=tool,
        )  # fmt: skip
        return Generator(engine, device, questions, root, job.turns, turn, stopping)

    return make


def _measure(held: HeldOut, step: int, metrics: Metrics) -> dict[str, Any]:
    row, rollouts = held.measure()
    for one in rollouts[:: held.job.eval.samples][: held.job.eval.show]:
        metrics.sample(step, held.questions[one.question].text, one.text, between="\n", reward=one.reward)
    return row
