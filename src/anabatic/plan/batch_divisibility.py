"""Checks of sizes that must divide one another, before a device is used. No torch."""

from __future__ import annotations

from anabatic.config.rl import RlJob
from anabatic.config.sections.common import BatchSettings, require_setting
from anabatic.core.errors import ConfigError


def require_divisible_batch(batch: BatchSettings, ranks: int) -> None:
    """Check that the global batch is a multiple of the micro-batches of all ranks, if both are set.

    Args:
        ranks: number of data-parallel processes.

    Raises:
        ConfigError: it is not a multiple.
    """
    if batch.global_batch_tokens is None or batch.micro_batch_tokens is None:
        return
    micro, target = batch.micro_batch_tokens, batch.global_batch_tokens
    if target % (micro * ranks):
        raise ConfigError(
            f"batch.global_batch_tokens {target} is not a multiple of {ranks} ranks x {micro} micro-batch tokens"
            f" = {micro * ranks}",
            f"set batch.global_batch_tokens to {max(1, target // (micro * ranks)) * micro * ranks},"
            " or change batch.micro_batch_tokens",
        )


def count_micro_steps(job: RlJob, ranks: int) -> int:
    """Return the number of micro-batches of answers per update on one rank.

    Raises:
        ConfigError: the answers of an update are not a multiple of the micro-batches of all ranks.
    """
    answers = job.examples_per_step * job.num_samples // job.updates
    answers_per_micro_step = job.device_batch_size * ranks
    require_setting(
        answers % answers_per_micro_step == 0,
        f"an update has {answers} answers, not a multiple of {ranks} ranks x device_batch_size"
        f" {job.device_batch_size} = {answers_per_micro_step}",
        "change device_batch_size, examples_per_step or num_samples",
    )
    return answers // answers_per_micro_step
