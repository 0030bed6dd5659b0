"""The grammar of --fault."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabatic.core.errors import ConfigError
from anabatic.sim import faults, machine
from anabatic.sim.faults import Fault

COUNTED = sorted(set(faults.KINDS) - {"slow", "health"})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("oom", Fault("oom")),
        ("aicore@1#100", Fault("aicore", 1, 100)),
        ("hccl-timeout#3", Fault("hccl-timeout", -1, 3)),
        ("slow@2", Fault("slow", 2)),
        ("slow@2=1.5", Fault("slow", 2, 1, "1.5")),
        ("health@0=warning", Fault("health", 0, 1, "warning")),
    ],
)
def test_what_is_understood(text: str, expected: Fault) -> None:
    assert faults.parse(text, 4) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected KIND"),
        ("aicor", 'Did you mean "aicore"'),
        ("oom@4", "names device 4, there are 4"),
        ("oom#0", "#0 means nothing"),
        ("oom=3", "takes no value"),
        ("slow#2", "#2 means nothing"),
        ("slow=0.5", "expected 1 to 1000"),
        ("slow=x", "expected 1 to 1000"),
        ("health", "names no health"),
        ("health=bad", "names no health"),
        ("oom@-1", "expected KIND"),
        ("oom@0@1", "expected KIND"),
    ],
)
def test_what_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        faults.parse(text, 4)


def test_too_many() -> None:
    with pytest.raises(ConfigError, match="33 faults, at most 32"):
        machine.build(fault=("oom",) * 33)


@given(st.sampled_from(COUNTED), st.integers(-1, 63), st.integers(1, 2**40))
def test_text_and_fault_agree(kind: str, device: int, after: int) -> None:
    fault = Fault(kind, device, after)
    assert faults.parse(str(fault), 64) == fault


@given(st.text(max_size=20))
def test_any_text_is_a_fault_or_an_error(text: str) -> None:
    try:
        found = faults.parse(text, 2)
    except ConfigError:
        return
    assert faults.parse(str(found), 2) == found
    assert found.row()[0] in range(1, 9)
