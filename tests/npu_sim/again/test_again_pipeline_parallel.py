"""Layers that two simulated NPUs share."""

from e2e.test_pipeline_parallel import pytestmark, test_a_pretraining_is_divided_and_put_together_twice

__all__ = ["pytestmark", "test_a_pretraining_is_divided_and_put_together_twice"]
