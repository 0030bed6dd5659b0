"""What people really saw: of each public thread the kind of trouble is told, none with a wrong answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anabatic.doctor import knowledge_base
from anabatic.doctor.explain import diagnosis, rendering
from anabatic.doctor.explain.diagnosis import LogReport

KNOWN = knowledge_base.load_knowledge()
LOGS = {
    "memory": ("npu-oom", ["lf-5491", "lf-4277", "sw-9403", "sg-29838"]),
    "workspace": ("npu-oom-workspace", ["va-4678"]),
    "memory is tight, no error": ("npu-cache-retry", ["pt-108"]),
    "stream timeout": ("EE1002", ["pt-48"]),
    "collective timeout": ("EI0002", ["va-3413"]),
    "connect timeout": ("EI0006", ["va-486"]),
    "not a number": ("torch-nan", ["lf-3308", "lf-8439"]),
    "data type of a convolution": ("npu-conv3d", ["lf-7134"]),
    "peer access": ("npu-p2p", ["sw-9135"]),
    "submodule of another version": ("py-no-submodule", ["sw-4886"]),
    "operator compiler": ("E40020", ["pt-29", "lf-5638"]),
    "symbol or function of CANN": ("npu-symbol-cann", ["ta-328", "lf-6309"]),
    "symbol of torch": ("npu-symbol", ["sg-28628"]),
    "operator that torch_npu lacks": ("npu-attribute", ["va-340"]),
    "libraries of CANN": ("npu-import-lib", ["va-262"]),
    "operator without a reason": ("aclnn-call", ["lf-5425"]),
    "kernel missing": ("kernel-missing", ["lf-3796", "va-3046"]),
    "kernel likely missing": ("aclnn-inner", ["va-4859"]),
    "mixed custom kernels": ("op-tiling", ["fla-333"]),
    "CUDA written in": ("torch-cuda-build", ["sw-3594"]),
    "quantised": ("hf-quantised", ["lf-10125"]),
    "bitsandbytes without a device": ("hf-bnb", ["lf-3271"]),
    "two devices": ("torch-device-mix", ["sw-8459", "ve-5571"]),
    "falls back to the CPU": ("npu-fallback", ["sw-1047"]),
    "device number": ("npu-device-select", ["gs-3352", "va-449"]),
    "slow first steps": ("slow-start", ["lf-1444"]),
    "kernel crash, told by the device": ("kernel-crash", ["va-6359"]),
    "kernel crash, told by its code": ("acl-507035", ["pt-66"]),
    "traceback without its end": ("traceback-cut", ["lf-8511"]),
}
"""Kind -> the entry that must come first, and the threads whose log is of this kind."""
FRESH = {
    "sw-7085": "megatron-main-grad",
    "lf-8361": "weights-one-device",
    "va-1443": "EI0002",
    "trl-4790": "engine-communicator",
    "ve-3902": "engine-sleep",
    "ve-332": "EJ0001",
    "un-10686": "peer-no-npu",
    "va-556": "engine-camem",
    "ta-302": "npu-triton-compile",
    "pt-102": "npu-triton-compile",
    "va-2712": "hccl-p2p-group",
    "pt-62": "wait-preprocess",
    "va-8818": "acl-507011",
    "va-11092": "op-tiling",
    "fla-303": "acl-161001",
    "tf-36696": "hf-flash-attn",
    "om-890": "op-jit-compile",
}
"""Threads that came later, and the entry of their kind."""
UNCERTAIN = {"lf-3308", "lf-8439", "lf-5425", "lf-8511"}
"""Only what it is and what to collect can be told: the log names no cause. The others are right."""
WITHOUT_LOG = {
    "hang": ["lf-6428", "sw-2434"],
    "memory-grows": ["lf-6028", "lf-7528", "sw-7989", "lf-9448"],
    "slow": ["sw-3331", "sw-6512", "sw-4233", "sw-6455"],
    "wrong-numbers": ["vi-274"],
}
"""Word that answers -> threads that tell a trouble without an error message."""


@pytest.fixture(scope="module")
def threads(shared_data: Path) -> dict[str, str]:
    """Return the log of each thread by its name."""
    path = shared_data / "real_issues" / "open.jsonl"
    if not path.is_file():
        pytest.skip("no threads beside the checkout")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {row["id"]: row["log"] for row in rows}


def told(log: str) -> LogReport:
    return diagnosis.explain_text(log, KNOWN)


def test_every_log_has_its_kind(threads: dict[str, str]) -> None:
    expected = {thread: entry for entry, names in LOGS.values() for thread in names}
    assert set(expected) == {thread for thread, log in threads.items() if log.strip()}
    found = {thread: first.entry.id for thread in expected if (first := told(threads[thread]).first_cause)}
    assert found == expected
    assert len(expected) >= 38 and len(UNCERTAIN) / len(expected) < 0.2


def test_every_later_log_has_its_kind(shared_data: Path) -> None:
    path = shared_data / "real_issues" / "fresh.jsonl"
    if not path.is_file():
        pytest.skip("no later threads beside the checkout")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = {row["id"]: first.entry.id for row in rows if (first := told(row["log"]).first_cause)}
    assert found == FRESH


def test_where_no_cause_is_named_it_says_so(threads: dict[str, str]) -> None:
    for thread in UNCERTAIN:
        report = told(threads[thread])
        assert report.first_cause is not None and report.first_cause.entry.confidence != "high"
    for thread in ("lf-5425", "lf-8511", "va-486", "va-3413"):
        assert rendering.suggest_next_steps(told(threads[thread]), "en"), thread


def test_troubles_without_a_log_have_a_word(threads: dict[str, str]) -> None:
    for word, names in WITHOUT_LOG.items():
        assert word in rendering.SYMPTOMS and set(names) <= set(threads)
        assert not any(threads[thread].strip() for thread in names)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("RuntimeError: OPS function error: HcclBroadcast, error code is 6", "hccl:6"),
        ("(Worker pid=7) RuntimeError: HCCL function error: hcclCommInit(a, b), error code is 11", "hccl:11"),
        ("[ERROR] HCCL(7,python):2026-11-20-10:42:34.020.677 [x.cc:1][7]call trace: hcclRet -> 19", "hccl:19"),
        ("[ERROR] HCCL(7,python):2026-11-20-10:42:34.020.677 errNo[0x0000000005000009]no answer", "hccl:9"),
        ("launch failed for Sigmoid, errno:561003.", "561003"),
        ("build op model failed, result = 500001[FUNC:x]", "500001"),
        ("wait event to be complete failed, runtime result = 507046[FUNC:x]", "507046"),
        ("aclnnFoo failed with aclnnStatus=161002.", "161002"),
    ],
)
def test_forms_of_codes(line: str, code: str) -> None:
    assert code in [finding.code for finding in told(f"step 1\n{line}\nstep 2\n").findings]
    many = "\n".join(f"{line} {number}" for number in range(300))
    assert code in [finding.code for finding in told(many).findings]


@pytest.mark.parametrize("line", ["result = 123456", "status=200000", "result: 507123", "3/9 [01:00, 12.1s/it]"])
def test_numbers_that_are_no_codes(line: str) -> None:
    assert told(f"step 1\n{line}\nstep 2\n").first_cause is None


def test_what_passes_on_an_error_comes_behind_it() -> None:
    passed = told("[rank1]: RuntimeError: it failed\n[rank1]: EI0006: [PID: 7] Getting socket times out.\n")
    assert [finding.code for finding in passed.findings][0] == "EI0006"
    apart = told("[rank1]: RuntimeError: it failed\n[rank2]: EI0006: [PID: 7] Getting socket times out.\n")
    assert [finding.code for finding in apart.findings][0] == "RuntimeError"


@pytest.mark.parametrize("prefix", ["", "[rank3]: ", "(Worker rank=3 pid=7) ERROR 04-10 11:26:01 [c.py:9] ", "3: "])
def test_exceptions_behind_what_programs_write_before_them(prefix: str) -> None:
    frames = ["Traceback (most recent call last):", '  File "a.py", line 1, in f', "    g()"]
    log = "\n".join(prefix + line for line in [*frames, "ZeroDivisionError: division by zero"])
    first = told(log).first_cause
    assert first is not None and first.code == "ZeroDivisionError"
    cut = told("\n".join(prefix + line for line in frames)).first_cause
    assert cut is not None and cut.code == "traceback-cut" and cut.first_sighting.line == 2


@pytest.mark.parametrize(
    ("last", "code"), [("step 9", "traceback-cut"), ("KeyboardInterrupt", None), ("queue.Empty: nothing", None)]
)
def test_a_traceback_with_a_last_line_is_whole(last: str, code: str | None) -> None:
    first = told(f'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\n{last}\n').first_cause
    assert (first.code if first else None) == code


@pytest.mark.parametrize("prefix", ["", "[rank3]: ", "(Worker rank=3 pid=7) "])
def test_a_traceback_that_ends_in_a_wrapper_is_whole(prefix: str) -> None:
    frames = ["Traceback (most recent call last):", '  File "a.py", line 1, in f', "    x.item()"]
    said = "RuntimeError: The Inner error is reported as above. The current working operator name is Own."
    log = "\n".join(prefix + line for line in [*frames, said])
    assert "traceback-cut" not in [finding.entry.id for finding in told(log).findings]


@pytest.mark.parametrize(
    ("log", "first"),
    [
        ("RuntimeError: Two accelerators cannot be used at the same time in PyTorch: npu and cuda",
         "npu-two-accelerators"),
        ("RuntimeError: call aclnnMul failed, detail:EZ1001: self not implemented for DT_DOUBLE, "
         "should be in dtype support list [DT_FLOAT,DT_BFLOAT16,].", "EZ1001"),
        ("[ERROR] HCCL(7,p):2026-11-20-10:42:34.020.677 listen on ip[192.0.2.4] and specific port[16666] fail.\n"
         "[ERROR] HCCL(7,p):2026-11-20-10:42:34.020.678 call trace: hcclRet -> 7\n"
         "[ERROR] HCCL(7,p):2026-11-20-10:44:34.020.678 wait socket establish timeout, role[1]", "hccl-listen"),
        ("EJ0002: [PID: 7] 2026-11-20-10:42:34.020.677 The network port is down.\n"
         "[ERROR] HCCL(7,p):2026-11-20-10:42:34.020.678 listen on ip[192.0.2.4] and specific port[16666] fail.",
         "EJ0002"),
        ('  File "/opt/te/common/__init__.py", line 250, in _load_cudnn\n    libs = subprocess.check_output(',
         "cuda-hard-coded"),
        ("Optype [Own] of Ops kernel [X] is unsupported. Reason: op type Own is not found in this op store.", "EZ3002"),
        ("torch._inductor.exc.InductorError: ModuleNotFoundError: No module named 'triton.language.own'",
         "triton-package"),
        ("ModuleNotFoundError: No module named 'own.part'", "py-no-submodule"),
    ],
)  # fmt: skip
def test_kinds_that_lie_close_to_each_other(log: str, first: str) -> None:
    found = told(f"step 1\n{log}\nstep 2\n").first_cause
    assert found is not None and found.entry.id == first


def test_one_word_is_enough_and_nothing_is_collected_twice() -> None:
    assert told("all is well\n").first_cause is None
    said = rendering.suggest_next_steps(told("all is well\n"), "en")
    assert any("ascend/log" in step for step in said) and any("explain WORD" in step for step in said)
    assert len(said) == len(set(said)) == len(rendering.suggest_next_steps(told("all is well\n"), "zh"))
    assert not rendering.suggest_next_steps(diagnosis.explain_logs(("hang",), KNOWN), "en")
