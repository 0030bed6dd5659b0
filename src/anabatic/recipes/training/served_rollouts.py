"""Answers of inference servers for `anabatic rl`: opens the servers, and gives them the weights that are trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from anabatic.config.export import MergeJob
from anabatic.config.rl import RlJob
from anabatic.core import log
from anabatic.data.scoring.questions import Question
from anabatic.infer.engine import find_stop_ids
from anabatic.infer.remote.inference_servers import SERVERS
from anabatic.infer.remote.served_engine import ServedEngine, ServerPool
from anabatic.recipes.export import merge
from anabatic.recipes.training.server_process import ServerProcess
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
    own: ServerProcess,
) -> Callable[..., RolloutGenerator]:
    """Return what makes a generator from questions, who may stop it, and the optimizer steps behind the weights.

    Args:
        save: writes the model, or its adapter; every rank calls it.
        prompts: of the questions; the shortest are asked to prove that both sides hold the same model.
        max_len: tokens of a prompt and its answer at most.
        own: the server that this training has started.

    Raises:
        RequestFailure: a server does not answer.
        ConfigError: it is of another kind.
    """
    job, device, settings = context.job, context.device, context.job.rollout
    servers = [SERVERS[settings.engine](url.rstrip("/").removesuffix("/v1")) for url in settings.url]
    for number, server in enumerate(servers):
        if settings.command is None or number:
            server.require_ready()
        else:
            own.wait_until_ready(server)
    log.info(f"{settings.engine} answers at {', '.join(server.url for server in servers)}")
    pad_id = start.tokenizer.pad_token_id or 0

    def score(rollouts: Sequence[Rollout], temperature: float) -> list[float]:
        return loss.score(rollouts, pad_id, job.batch.resolved_seq_len, temperature)

    sync = WeightSync(
        folder=Path(settings.folder or Path(job.out) / "rollout"),
        pool=ServerPool(servers, find_stop_ids(start.model, start.tokenizer)),
        save=save,
        merge=None if start.lora is None else _merge_adapter,
        score=score,
        prompts=sorted(prompts, key=len),
        temperature=job.sampling.temperature,
        max_diff=settings.max_logprob_diff or (MAX_DIFF_FP32 if device.dtype == torch.float32 else MAX_DIFF_HALF),
        world=context.world,
    )

    sync.pool.keep_running = own.keep_running

    def make_generator(questions: list[Question], stopping: Callable[[], bool], step: int) -> RolloutGenerator:
        sync.publish(step)
        engine = ServedEngine(sync.pool, start.tokenizer, max_len, job.rollout_batch)
        generator = RolloutGenerator(engine, device, questions, loss.root, job.turns, turn, stopping)
        generator.metrics = sync.metrics
        return generator

    return make_generator


def _merge_adapter(folder: Path, out: Path) -> None:
    merge.run(MergeJob(model=str(folder), out=str(out)))
