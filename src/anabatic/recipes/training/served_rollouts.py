"""Answers of inference servers for `anabatic rl`: opens the servers, and gives them the weights that are trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from anabatic.config.rl import RlJob
from anabatic.core import log
from anabatic.data.scoring.questions import Question
from anabatic.infer.engine import find_stop_ids
from anabatic.infer.remote.inference_servers import SERVERS
from anabatic.infer.remote.served_engine import ServedEngine, ServerPool
from anabatic.recipes.training.trained_model import TrainableModel
from anabatic.rl.rollout import Rollout, RolloutGenerator, TurnFunction
from anabatic.rl.rollout_loss import RolloutLoss
from anabatic.rl.weight_sync import WeightSync
from anabatic.train.context import TrainContext

MAX_DIFF_FP32, MAX_DIFF_HALF = 0.01, 0.05
"""Mean difference of log-probabilities between two engines that is rounding."""


def serve_rollouts(
    context: TrainContext[RlJob],
    start: TrainableModel,
    loss: RolloutLoss,
    save: Callable[[Path], None],
    prompts: Sequence[list[int]],
    max_len: int,
    turn: TurnFunction | None,
) -> Callable[..., RolloutGenerator]:
    """Return what makes a generator from questions, who may stop it, and the optimizer steps behind the weights.

    Args:
        save: writes the model, or its adapter; every rank calls it.
        prompts: of the questions; the shortest are asked to prove that both sides hold the same model.
        max_len: tokens of a prompt and its answer at most.

    Raises:
        RequestFailure: a server does not answer.
        ConfigError: it is of another kind.
    """
    job, device, settings = context.job, context.device, context.job.rollout
    servers = [SERVERS[settings.engine](url.rstrip("/").removesuffix("/v1")) for url in settings.url]
    for server in servers:
        server.require_ready()
    log.info(f"{settings.engine} answers at {', '.join(server.url for server in servers)}")
    pad_id = start.tokenizer.pad_token_id or 0

    def score(rollouts: Sequence[Rollout], temperature: float) -> list[float]:
        return loss.score(rollouts, pad_id, job.batch.resolved_seq_len, temperature)

    sync = WeightSync(
        folder=Path(settings.folder or Path(job.out) / "rollout"),
        pool=ServerPool(servers, find_stop_ids(start.model, start.tokenizer)),
        save=save,
        is_adapter=start.lora is not None,
        score=score,
        prompts=sorted(prompts, key=len),
        temperature=job.sampling.temperature,
        max_diff=settings.max_logprob_diff or (MAX_DIFF_FP32 if device.dtype == torch.float32 else MAX_DIFF_HALF),
        world=context.world,
    )

    def make_generator(questions: list[Question], stopping: Callable[[], bool], step: int) -> RolloutGenerator:
        sync.publish(step)
        engine = ServedEngine(sync.pool, start.tokenizer, max_len, job.rollout_batch)
        generator = RolloutGenerator(engine, device, questions, loss.root, job.turns, turn, stopping)
        generator.metrics = sync.metrics
        return generator

    return make_generator
