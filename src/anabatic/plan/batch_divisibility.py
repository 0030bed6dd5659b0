"""Sizes that must divide one another, checked before a device is asked for. No torch."""

from __future__ import annotations

from anabatic.config.rl import RlJob
from anabatic.config.sections.common import BatchSettings, require_setting
from anabatic.core.errors import ConfigError


def require_divisible_batch(batch: BatchSettings, ranks: int) -> None:
    """Make sure that the sizes of a batch that are given fit together.

    Args:
        ranks: processes that divide the data.

    Raises:
        ConfigError: the global batch is no multiple of all ranks' micro-batches.
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
    """Return the micro-batches of answers in an update of one rank.

    Raises:
        ConfigError: the answers of an update are no multiple of all ranks' micro-batches.
    """
    answers = job.examples_per_step * job.num_samples // job.updates
    each = job.device_batch_size * ranks
    require_setting(
        answers % each == 0,
        f"an update has {answers} answers, not a multiple of {ranks} ranks x device_batch_size"
        f" {job.device_batch_size} = {each}",
        "change device_batch_size, examples_per_step or num_samples",
    )
    return answers // each
