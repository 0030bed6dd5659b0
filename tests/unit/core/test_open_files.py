"""The limit of open files is raised, never lowered."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.process


PROGRAM = """
import resource, sys
from anabatic.core.process_info import allow_open_files
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 300))
for count in (50, 200, 150, 1000):
    limit = allow_open_files(count)
    assert limit == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    print(limit)
"""


def test_the_limit_is_raised_as_far_as_the_system_allows() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["100", "200", "200", "300"]
