"""The grammar of --fault."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabatic.core.errors import ConfigError
from anabatic_sim import fault_injection, machine_spec
from anabatic_sim.fault_injection import InjectedFault

COUNTED = sorted(set(fault_injection.FAULT_KINDS) - {"slow", "slow-link", "health"})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("oom", InjectedFault("oom")),
        ("aicore@1#100", InjectedFault("aicore", 1, 100)),
        ("hccl-timeout#3", InjectedFault("hccl-timeout", -1, 3)),
        ("slow@2", InjectedFault("slow", 2)),
        ("slow@2=1.5", InjectedFault("slow", 2, 1, "1.5")),
        ("health@0=warning", InjectedFault("health", 0, 1, "warning")),
    ],
)
def test_what_is_understood(text: str, expected: InjectedFault) -> None:
    assert fault_injection.parse_fault(text, 4) == expected


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
        fault_injection.parse_fault(text, 4)


def test_too_many() -> None:
    with pytest.raises(ConfigError, match="33 faults, at most 32"):
        machine_spec.build_machine(fault=("oom",) * 33)


@given(st.sampled_from(COUNTED), st.integers(-1, 63), st.integers(1, 2**40))
def test_text_and_fault_agree(kind: str, device: int, after: int) -> None:
    fault = InjectedFault(kind, device, after)
    assert fault_injection.parse_fault(str(fault), 64) == fault


@given(st.text(max_size=20))
def test_any_text_is_a_fault_or_an_error(text: str) -> None:
    try:
        found = fault_injection.parse_fault(text, 2)
    except ConfigError:
        return
    assert fault_injection.parse_fault(str(found), 2) == found
    assert found.to_struct_values()[0] in range(1, 9)
