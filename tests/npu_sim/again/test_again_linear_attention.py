"""The tests of `tests/e2e` on two simulated NPUs."""

from e2e.test_linear_attention import *  # noqa: F403 - the same tests with another home
