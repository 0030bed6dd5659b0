"""Reinforcement learning on two simulated NPUs."""

from e2e.test_rl import pytestmark, test_two_processes_equal_one

__all__ = ["pytestmark", "test_two_processes_equal_one"]
