"""The tests of adapters on two simulated NPUs."""

from e2e.test_adapters import *  # noqa: F403 - the same tests with another home
from smoke.test_adapter import *  # noqa: F403
