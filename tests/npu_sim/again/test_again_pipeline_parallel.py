"""Layers that simulated NPUs share; the order of chunks is the host's."""

from e2e.test_pipeline_parallel import (
    test_a_pretraining_is_divided_and_put_together_twice,
    test_an_adapter_is_trained_in_stages,
)

__all__ = [
    "test_a_pretraining_is_divided_and_put_together_twice",
    "test_an_adapter_is_trained_in_stages",
]
