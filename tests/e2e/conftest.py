"""What these tests share is made once (tests/e2e/fixtures.py)."""

from e2e.fixtures import base, base2, both, home, hub, shared_home

__all__ = ["base", "base2", "both", "home", "hub", "shared_home"]
