"""A model with linear attention whose tokens or heads two simulated NPUs divide."""

from e2e.test_linear_attention import (
    model,
    test_two_processes_divide_the_heads,
    test_two_processes_share_the_tokens_of_a_batch,
)

__all__ = [
    "model",
    "test_two_processes_divide_the_heads",
    "test_two_processes_share_the_tokens_of_a_batch",
]
