"""The first cause among ranks; files of every kind; codes; own entries."""

from __future__ import annotations

import gzip
import io
import json
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabatic.cli import app
from anabatic.doctor import knowledge_base
from anabatic.doctor.explain import diagnosis, log_files, log_scan, matcher, missing_packages

KNOWN = knowledge_base.load_knowledge()
OOM = "torch.OutOfMemoryError: NPU out of memory. Tried to allocate 2.00 GiB (NPU 1; 60.97 GiB total capacity)\n"
WAITED = "EI0002: [PID: 7] {} the wait execution of the Notify register times out\n"


def run(*words: str | Path) -> int:
    """Run `anabatic explain` and return its exit code."""
    with pytest.raises(SystemExit) as stop:
        app.main(["explain", *map(str, words)])
    assert isinstance(stop.value.code, int)
    return stop.value.code


def explained(*words: str | Path) -> diagnosis.LogReport:
    return diagnosis.explain_logs(tuple(map(str, words)), KNOWN)


def test_a_cause_beats_consequences_that_were_written_before_it(tmp_path: Path) -> None:
    (tmp_path / "rank-0.log").write_text("start\n" + WAITED.format("2026-11-21-09:00:00.000.000") * 3)
    (tmp_path / "rank-1.log").write_text("2026-11-21 10:00:00,500 ERROR stop\n" + OOM)
    (tmp_path / "rank-2.log").write_text(WAITED.format("2026-11-21-10:31:00.000.000"))
    report = explained(tmp_path)
    assert report.first_cause is not None and report.first_cause.entry.id == "npu-oom"
    assert (report.first_cause.first_sighting.line, report.first_cause.ranks) == (2, [1])
    assert (
        report.first_cause.first_sighting.time is not None
        and report.first_cause.first_sighting.time.isoformat() == "2026-11-21T10:00:00.500000"
    )
    waited = report.findings[1]
    assert (waited.entry.id, waited.count, waited.ranks) == ("EI0002", 4, [0, 2])
    assert report.silent_ranks == [] and report.is_ordered_by_time


def test_the_earliest_of_several_causes_is_first(tmp_path: Path) -> None:
    error = "E1121 10:00:{:02d}.000000 77 x.cpp:1] error code is {}\n"
    (tmp_path / "rank-0.log").write_text(error.format(9, 507015))
    (tmp_path / "rank-1.log").write_text(error.format(3, 507053))
    (tmp_path / "rank-2.log").write_text(error.format(5, 507899))
    assert [finding.code for finding in explained(tmp_path).findings] == ["507053", "507899", "507015"]


def test_a_warning_is_only_a_note(tmp_path: Path) -> None:
    for warning in ("[W1121 09:00:00.1 socket.cpp:7] ", "[WARNING] HCCL(1,python): ", "2026-11-21 09:00:00,1 WARNING "):
        report = diagnosis.explain_text(f"{warning}error code is 507015\nEI0002: waited\n", KNOWN)
        assert [(finding.code, finding.role) for finding in report.findings] == [
            ("EI0002", "consequence"),
            ("507015", "notice"),
        ]
        report = diagnosis.explain_text(f"{warning}error code is 507015\nerror code is 507015\n", KNOWN)
        assert [(finding.role, finding.first_sighting.line, finding.count) for finding in report.findings] == [
            ("cause", 2, 2)
        ]


def test_a_rank_that_is_silent_while_others_wait_is_named(tmp_path: Path) -> None:
    for rank in (0, 1, 3):
        (tmp_path / f"rank-{rank}.log").write_text(WAITED.format("2026-11-21-10:31:00.000.000"))
    (tmp_path / "rank-2.log").write_text("2026-11-21 10:00:00,000 INFO step 7\n")
    report = explained(tmp_path)
    assert report.first_cause is not None and report.first_cause.entry.role == "consequence"
    assert report.silent_ranks == [2]


def test_ranks_are_read_from_prefixes_and_names(tmp_path: Path) -> None:
    log = tmp_path / "all.log"
    log.write_text(f"[rank3]: {OOM}[rank11]: {OOM}[rank:4] {OOM}[default6]:{OOM}")
    assert explained(log).findings[0].ranks == [3, 4, 6, 11]
    assert log_files.parse_rank(Path("run/attempt_0/5/stderr.log")) == 5
    assert log_files.parse_rank(Path("rank_12.out")) == 12
    assert log_files.parse_rank(Path("train.log")) is None


def test_files_without_times_are_ordered_by_reading_and_it_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.log").write_text("error code is 507053\n")
    (tmp_path / "b.log").write_text("2026-11-21 10:00:00,000 error code is 507015\n")
    assert not explained(tmp_path).is_ordered_by_time
    assert run(tmp_path, "--lang", "en") == 0
    assert "the order is that of reading" in " ".join(capsys.readouterr().out.split())


def test_what_stopped_a_run_before_it_was_started_again_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "rank-0.log"
    start = "2026-11-21 {}:00:00,000 INFO run folder runs/x\n"
    log.write_text(start.format(10) + OOM * 3 + start.format(11) + "error code is 507053\n")
    for block in (16, 100, 1 << 20):
        monkeypatch.setattr(log_files, "BLOCK_BYTES", block)
        report = explained(log)
        assert [finding.code for finding in report.findings] == ["507053"]
        assert report.findings[0].first_sighting.line == 6 and report.scan.num_earlier == 3
    assert run(log, "--lang", "en") == 0
    assert "3 lines from before the last start" in " ".join(capsys.readouterr().out.split())
    assert run(log, "--all", "--json") == 0
    assert json.loads(capsys.readouterr().out)["first"]["id"] == "npu-oom"


def test_blocks_are_joined_and_lines_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "train.log"
    log.write_text("2026-11-21 10:00:00,000 INFO ready\n" + "step\n" * 5000 + OOM + "step\n" * 5000 + OOM)
    for block in (1, 7, 64, 1000, 1 << 20):
        monkeypatch.setattr(log_files, "BLOCK_BYTES", block)
        (finding,) = explained(log).findings
        assert (finding.first_sighting.line, finding.count) == (5002, 2)


def test_a_progress_bar_without_line_breaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "bar.log"
    monkeypatch.setattr(log_files, "MAX_LINE_BYTES", 1 << 16)
    log.write_bytes(b"\r".join(b"%d%%|###|" % n for n in range(100_000)) + b"\r" + OOM.encode())
    (finding,) = explained(log).findings
    assert finding.first_sighting.text == OOM.strip()


def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matcher, "MAX_REMEMBERED_LINES", 50)
    monkeypatch.setattr(log_scan, "MAX_SIGHTINGS", 40)
    names = ["".join(chr(97 + (n // 26**k) % 26) for k in range(4)) for n in range(500)]
    log = tmp_path / "many.log"
    log.write_text("".join(f"[rank{n}] {name} {OOM}" for n, name in enumerate(names)))
    monkeypatch.setattr(log_files, "BLOCK_BYTES", 4096)
    report = explained(log)
    assert report.findings[0].count == 40 and report.scan.num_unkept == 460


def test_gz_folder_layout_of_cann_and_default_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "ascend" / "log" / "debug" / "plog"
    place.mkdir(parents=True)
    with gzip.open(place / "plog-77_20261121100000000.log.gz", "wt") as file:
        file.write(WAITED.format("2026-11-21-10:00:00.000.000"))
    (place / "core.bin").write_bytes(b"\0" * 100)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("ASCEND_PROCESS_LOG_PATH", "ASCEND_WORK_PATH"):
        monkeypatch.delenv(name, raising=False)
    assert run("--json", "--lang", "en") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["first"]["id"] == "EI0002" and told["files"][0].endswith(".log.gz")


def test_a_cut_gz_tells_what_came_before(tmp_path: Path) -> None:
    log = tmp_path / "train.log.gz"
    data = gzip.compress((OOM + "".join(f"{n} {n * n}\n" for n in range(50_000))).encode())
    log.write_bytes(data[: len(data) // 2])
    report = explained(log)
    assert "ends early" in report.scan.notes[0]


def test_what_is_no_log_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.log").write_bytes(b"\x7fELF" + b"\0" * 500)
    (tmp_path / "wide.log").write_bytes("error".encode("utf-16"))
    (tmp_path / "good.log").write_text(OOM)
    (tmp_path / "packed.log").write_bytes(bytes(range(256)) * 9)
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for words, message in (
        ([tmp_path / "model.log"], "is binary, no log"),
        ([tmp_path / "wide.log"], "is UTF-16"),
        ([tmp_path / "packed.log"], "is binary, no log"),
        ([""], "a name is empty"),
        ([tmp_path / "empty"], "holds no log"),
        ([tmp_path / "pipe"], "is a pipe"),
        ([tmp_path / "modl.log"], "No such file or directory"),
        (["/dev/zero"], "is no regular file"),
        (["--jsn"], 'unknown option "--jsn"'),
        (["EI0002", tmp_path / "model.log"], "is a code"),
        ([tmp_path / "good.log", tmp_path / "model.log"], "is binary, no log"),
        (["--lang", "fr", "EI0002"], '--lang is "fr"'),
        (["--knowledge", tmp_path / "none.yaml", "EI0002"], "does not exist"),
        (["--knowledge", tmp_path, "EI0002"], "is a folder"),
    ):
        assert run(*words) == 2
        lines = capsys.readouterr().err.splitlines()
        assert message in lines[0] and lines[1].startswith("hint: ")


def test_in_a_folder_what_is_no_log_is_a_note(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(b"\0" * 500)
    (tmp_path / "b.log").write_text(OOM)
    (tmp_path / "c.log").write_text("")
    report = explained(tmp_path)
    assert report.first_cause is not None
    assert [note.rpartition("/")[2] for note in report.scan.notes] == ["a.log is binary, no log", "c.log is empty"]


def test_half_written_and_invalid_text(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_bytes(
        b"\xff\xfe\xfa text \xb1\n"[2:] + b"\x1b[31m\xe4\xb8 NPU out of memory. Tried to allocate 2\0\0\x1b]0;x\x07"
    )
    (finding,) = explained(log).findings
    assert finding.first_sighting.line == 2 and finding.first_sighting.text.isprintable()


def test_standard_input_and_nothing_known(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(OOM.encode()))))
    assert run("-", "--lang", "zh") == 0
    assert "首个原因：npu-oom" in capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(b"all is well\n"))))
    assert run("-") == 1
    assert "`dmesg | tail`" in capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(b""))))
    capsys.readouterr()
    assert run("-", "--json") == 1
    told = json.loads(capsys.readouterr().out)
    assert told["first"] is None and told["notes"] == ["standard input is empty"]


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("EI0006", "HCCL_CONNECT_TIMEOUT"),
        ("ei7777", "HCCL"),
        ("507999", "runtime or the device"),
        ("0x7bc87", "AI core"),
        ("-8020", "another container"),
        ("hccl:9", "timed out"),
        ("ERR01042", "torch_npu's operators"),
    ],
)
def test_codes_are_decoded_also_by_prefix(code: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(code, "--lang", "en") == 0
    assert says in " ".join(capsys.readouterr().out.split())


def test_unknown_codes_in_logs() -> None:
    report = diagnosis.explain_text("EI4711: something new failed\nerror code is 507999\nbatch E12345 done\n", KNOWN)
    assert [finding.code for finding in report.findings] == ["EI4711", "507999"]


@pytest.mark.parametrize(
    ("line", "codes"),
    [
        ("NPU function error: Aclrt, error code is 507015", ["507015"]),
        ("[ERROR] RUNTIME(1,python): sync failed, retCode=0x7bc87, [aicore exception]", ["507015"]),
        ("error: 207001, ret[107002] ERR00100 PTA", ["207001", "107002", "ERR00100"]),
        ("errorCode[507899]; result = -8020; ret is -8020.", ["507899", "-8020"]),
        ("HCCL function error: HcclBarrier(comm), error code is 9", ["hccl:9"]),
        ("mean_error 507015, 1507015, code 507015.5, error 5070150, secret=507015, pretret=507015x", []),
        ("[INFO] RUNTIME(1,python): error code is 507015, EI0006: none", []),
        ("E1121 10:00:00.1 EI0006x xEI0006 0xEI0006 EI00067 ei0006 EI006 E1999", []),
        ("(EI0006) [EZ9999] EL0004.", ["EI0006", "EZ9999", "EL0004"]),
    ],
)
def test_codes_in_lines(line: str, codes: list[str]) -> None:
    found = [
        hit.code for one in matcher.LogMatcher(KNOWN).find_matches(line.encode())[1] for hit in one.matches if hit.code
    ]
    assert found == codes


OWN = """
entries:
  - id: our-proxy
    texts: ["proxy * refused us"]
    codes: ["EI0006"]
    source: our wiki
    en: {meaning: "Our proxy.", cause: "Night.", fix: "Wait."}
"""


def test_own_entries_from_a_file_and_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(OWN)
    known = knowledge_base.load_knowledge((own,))
    report = diagnosis.explain_text("the PROXY at 10.1.2.3 refused us\n", known)
    assert report.first_cause is not None and report.first_cause.entry.get_explanation("zh").fix == "Wait."
    assert known.by_code["EI0006"].id == "our-proxy"
    monkeypatch.setenv(knowledge_base.KNOWLEDGE_VARIABLE, str(own))
    assert knowledge_base.load_knowledge().by_code["EI0006"].id == "our-proxy"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("entries: 3\n", "has no list"),
        ("entrys: []\n", 'has a key "entrys"'),
        ("entries:\n  - codes: [1]\n", "own.yaml:2: an entry has no id"),
        (OWN.replace("source", "sauce"), 'own.yaml:3: entry our-proxy: unknown key "sauce"'),
        (OWN.replace("proxy * refused us", "a * b"), "would match too much"),
        (OWN.replace('cause: "Night.", ', ""), "needs exactly meaning, cause, fix"),
        (OWN.replace("source: our wiki", "role: guilty"), 'role is "guilty"'),
    ],
)
def test_mistakes_in_own_entries_are_named(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(text)
    assert run("--knowledge", own, "EI0006") == 2
    assert message in capsys.readouterr().err


TEXTS = [text for entry in KNOWN.entries for text in entry.texts]
MATCHER = matcher.LogMatcher(KNOWN)


def slow(line: str) -> set[str]:
    """Return the entries whose text stands in `line`, by the definition of a text."""
    low = missing_packages.spell_out_import(line.lower().encode())
    found = set()
    if package := missing_packages.find_missing_package(low, KNOWN):
        return {package[0].id}
    for entry in KNOWN.entries:
        for text in entry.texts:
            rest: bytes | None = low
            for piece in text.lower().split("*"):
                _, there, rest = (rest or b"").partition(piece.encode()) if piece.strip() else (b"", b"x", rest)
                if not there:
                    rest = None
                    break
            if rest is not None:
                found.add(entry.id)
    return found


@given(st.lists(st.one_of(st.text(alphabet="ab 12.\t'", max_size=12), st.sampled_from(TEXTS)), min_size=1, max_size=4))
def test_the_fast_search_finds_what_the_definition_says(parts: list[str]) -> None:
    line = "".join(parts).replace("*", "12").replace("\n", " ")
    found = [hit.entry.id for one in MATCHER.find_matches(line.encode())[1] for hit in one.matches if not hit.code]
    expected = slow(line)
    assert set(found) <= expected and bool(found) == bool(expected)


@given(st.binary(max_size=300))
def test_any_bytes_can_be_read(data: bytes) -> None:
    lines, found = MATCHER.find_matches(data)
    assert all(one.index < len(lines) and one.count == 1 and one.matches for one in found)
    assert log_scan.clean_line(data).isprintable()
