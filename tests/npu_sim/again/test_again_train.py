"""The tests of `tests/smoke` on two simulated NPUs."""

from smoke.test_train import *  # noqa: F403 - the same tests with another home
