"""Strategies on two simulated NPUs; checkpoints are the host's, so numbers of processes change on processors alone."""

from e2e.test_strategies import (
    test_a_run_of_one_process_goes_on_in_two_that_share_the_heads,
    test_an_offloaded_run_is_killed_and_goes_on,
    test_pretraining_divided_is_killed_and_goes_on_otherwise,
    test_two_divided_processes_train_as_one_does,
)

__all__ = [
    "test_a_run_of_one_process_goes_on_in_two_that_share_the_heads",
    "test_an_offloaded_run_is_killed_and_goes_on",
    "test_pretraining_divided_is_killed_and_goes_on_otherwise",
    "test_two_divided_processes_train_as_one_does",
]
