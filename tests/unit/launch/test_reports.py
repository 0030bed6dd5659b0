"""What ranks leave is told in the order in which it happened, the first in full."""

from __future__ import annotations

import signal

from anabatic.launch.local.worker_reports import WorkerReport, is_stop_requested

LOCKED = "error: another training run works in runs/a\nhint: wait for it, or choose --out DIR"
CLOSED = f"error: unexpected RuntimeError: Connection closed by peer {'x' * 200}\nhint: add --debug for the traceback"


def test_what_only_followed_an_error_of_ours_is_one_line() -> None:
    told = WorkerReport([0, 1], {LOCKED: [0], CLOSED: [1]}, {0: 1, 1: 1}, {0: 1, 1: 1})
    first, second = told.format_messages()
    assert first == f"[rank 0] {LOCKED}"
    assert second.startswith("[rank 1] followed: RuntimeError: Connection closed by peer xx")
    assert second.endswith("…") and len(second) < 140 and "\n" not in second


def test_what_nobody_expected_stays_as_it_is() -> None:
    told = WorkerReport([0, 1], {CLOSED: [1], LOCKED: [0]}, {0: 1, 1: 1}, {0: 1, 1: 1})
    assert told.format_messages() == [f"[rank 1] {CLOSED}", f"[rank 0] {LOCKED}"]
    assert told.summarize_failure().startswith("[rank 1] unexpected RuntimeError")
    assert WorkerReport([0], {CLOSED: [0]}).format_messages() == [CLOSED]


def test_a_rank_that_was_killed_is_no_stop_though_the_agent_has_told_the_others_to_leave() -> None:
    starting = WorkerReport([0, 1], codes={0: 143}, failed={1: -signal.SIGKILL})
    assert starting.stop_exit_code() == 0
    assert WorkerReport([0, 1], codes={0: 143}, failed={1: -signal.SIGTERM}).stop_exit_code() == 143
    assert WorkerReport([0, 1], {CLOSED: [1]}, {0: 143, 1: 1}, {1: 1}).stop_exit_code() == 143
    assert WorkerReport([0, 1], {LOCKED: [1]}, {0: 143, 1: 2}, {1: 2}).stop_exit_code() == 0
    assert not is_stop_requested([-signal.SIGKILL, 143])
    assert is_stop_requested([1, 143]) and is_stop_requested([-signal.SIGTERM])
