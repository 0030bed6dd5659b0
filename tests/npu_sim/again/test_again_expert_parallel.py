"""Experts that two simulated NPUs share."""

from e2e.test_expert_parallel import (
    mixture,
    test_experts_are_divided_put_together_and_divided_again,
)

__all__ = ["mixture", "test_experts_are_divided_put_together_and_divided_again"]
