"""What these tests share is made once (tests/e2e/fixtures.py)."""

from e2e.fixtures import base, base2, both, home, hub, shared_home
from npu_sim.conftest import _built, sim

__all__ = ["_built", "base", "base2", "both", "home", "hub", "shared_home", "sim"]
