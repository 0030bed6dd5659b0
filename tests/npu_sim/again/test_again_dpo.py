"""Preferences on two simulated NPUs; what kills and signals do there is shown by the tests of resuming."""

from e2e.test_dpo import pairs, test_it_learns_to_prefer, test_two_processes_equal_one, whole

__all__ = ["pairs", "test_it_learns_to_prefer", "test_two_processes_equal_one", "whole"]
