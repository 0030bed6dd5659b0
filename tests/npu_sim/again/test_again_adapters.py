"""An adapter on two simulated NPUs; the order of a curriculum's rows is the host's."""

from smoke.test_adapter import *  # noqa: F403 - the same test with another home
