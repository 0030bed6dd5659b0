"""Layers that simulated NPUs share."""

from e2e.test_pipeline_parallel import (
    test_a_pretraining_is_divided_and_put_together_twice,
    test_an_adapter_is_trained_in_stages,
    test_stages_have_two_chunks_each,
)

__all__ = [
    "test_a_pretraining_is_divided_and_put_together_twice",
    "test_an_adapter_is_trained_in_stages",
    "test_stages_have_two_chunks_each",
]
