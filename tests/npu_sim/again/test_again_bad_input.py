"""Numbers that are no numbers on two simulated NPUs; all other bad input is refused before a device is touched."""

from e2e.test_bad_input import (
    test_a_model_that_is_broken_already_is_told_at_the_first_step,
    test_a_training_that_diverged_is_a_failure,
)

__all__ = [
    "test_a_model_that_is_broken_already_is_told_at_the_first_step",
    "test_a_training_that_diverged_is_a_failure",
]
