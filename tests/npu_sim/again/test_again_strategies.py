"""Two of the tests of `tests/e2e/test_strategies.py` on two simulated NPUs, where offloading means something."""

from e2e import test_strategies as strategies

test_killed = strategies.test_an_offloaded_run_is_killed_and_goes_on
test_otherwise = strategies.test_pretraining_divided_is_killed_and_goes_on_otherwise
