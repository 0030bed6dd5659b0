"""Ranks that share a batch on two simulated NPUs; what takes three processes is shown on processors."""

from e2e.test_context import (
    pairs,
    test_a_pretraining_changes_its_mesh_twice,
    test_an_adapter_is_killed_and_goes_on_bit_by_bit,
    test_answers_that_lie_on_two_processes_are_compared,
)

__all__ = [
    "pairs",
    "test_a_pretraining_changes_its_mesh_twice",
    "test_an_adapter_is_killed_and_goes_on_bit_by_bit",
    "test_answers_that_lie_on_two_processes_are_compared",
]
