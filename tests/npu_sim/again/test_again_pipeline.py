"""The test of `tests/smoke` on two simulated NPUs."""

from smoke.test_pipeline import *  # noqa: F403 - the same tests with another home
