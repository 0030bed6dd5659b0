"""Bundles hold what a supporter needs and no secret, and read as the machine that they came from."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabatic.core.errors import Failure
from anabatic.doctor import bundle, redaction
from anabatic.doctor.check_runner import run_checks
from anabatic.doctor.target_machine import open_root
from unit.doctor import roots
from unit.doctor.states import STATES

HOME = "/" + "home/zhangwei"
SECRETS = (
    "hf_abcdefghijklmnopqrstuvwxyz",
    "ghp_0123456789abcdef0123456789",
    "hunter2hunter2",
    "AKIAABCDEFGHIJKLMNOP",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc123",
    "0123456789abcdef0123456789abcdef",
)
PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIEowIBAAKCAQEA\n-----END RSA PRIVATE KEY-----"
FORMS = (
    "export HF_TOKEN={}",
    "password: {}",
    '{{"api_key": "{}"}}',
    "--password {} --verbose",
    "login with password {} failed",
    "Authorization: Bearer {}",
    "https://user:{}@example.org/repo.git",
    "AWS_SECRET_ACCESS_KEY='{}'",
    "wandb_api_key={},",
    "http://x/?access_token={}&y=1",
)


def unpacked(archive: Path, folder: Path) -> tuple[Path, str]:
    """Return the root in an archive, and everything in it as one text."""
    with tarfile.open(archive) as tar:
        everything = ""
        for member in tar.getmembers():
            assert member.isfile() and not member.name.startswith(("/", ".."))
            file = tar.extractfile(member)
            assert file is not None
            content = file.read()
            everything += member.name + "\n" + content.decode() + "\n"
            place = folder / member.name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
    return folder / bundle.ARCHIVE_FOLDER, everything


@pytest.mark.parametrize(
    "name", ["healthy container", "two cann installed", "container without devices", "not sourced"]
)
def test_a_bundle_reads_as_the_machine(name: str, tmp_path: Path) -> None:
    base, change, _ = STATES[name]
    machine = base().but(**change).machine(tmp_path / "machine")
    before = run_checks(machine)
    bundle.write_bundle(tmp_path / "out.tar.gz", machine, before)
    root, _ = unpacked(tmp_path / "out.tar.gz", tmp_path / "out")
    after = run_checks(open_root(root))
    assert [(line.finding_type.id, line.describe_result("en"), line.describe_fix("zh")) for line in after] == [
        (line.finding_type.id, line.describe_result("en"), line.describe_fix("zh")) for line in before
    ]


def test_no_secret_leaves(tmp_path: Path) -> None:
    cann = f"{HOME}/Ascend/ascend-toolkit/latest"
    env = {**roots.sourced(cann), "HOME": HOME, "USER": "zhangwei", "HF_TOKEN": SECRETS[0], "MY_DB": SECRETS[2]}
    env["HCCL_AUTH_TOKEN"], env["ASCEND_PROCESS_LOG_PATH"] = SECRETS[3], f"{HOME}/logs"
    log = f"[ERROR] HCCL(77,python): token={SECRETS[4]} by zhangwei in {HOME}/job\n[INFO] quiet\n"
    made = roots.a2().but(
        gone=("/usr/local/Ascend/ascend-toolkit",),
        files={
            **roots.cann(cann, "8.3.RC1", "ascend910b"),
            f"{HOME}/logs/debug/plog/plog-77_1.log": log,
            "/proc/cmdline": f"root=/dev/sda password={SECRETS[2]}\n",
            "/etc/os-release": f"NAME=x\n{PEM}\n",
            "/proc/net/tcp": "sl local_address\n 0: 00000000:0016 0:0 0A 0\n 1: 0100A8C0:A1B2 DDCCBBAA:01BB 01 0\n",
        },
        env=env,
        facts={"npu-smi": roots.smi(8, users={0: "zhangwei"})},
    )
    machine = made.machine(tmp_path / "machine")
    bundle.write_bundle(tmp_path / "out.tar.gz", machine, run_checks(machine))
    root, everything = unpacked(tmp_path / "out.tar.gz", tmp_path / "out")
    for secret in (*SECRETS, "MIIEow", "zhangwei", "DDCCBBAA"):
        assert secret not in everything
    assert "[ERROR] HCCL(77,python): token=[removed] by USER in" in everything
    assert "quiet" not in everything
    assert (root / "home/USER/Ascend/ascend-toolkit/latest/opp/version.info").is_file()
    assert "MY_DB=[removed]" in everything
    assert json.loads((root / "anabatic-doctor/report.json").read_text())["lines"]


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_secrets(form: str) -> None:
    for secret in SECRETS:
        told = redaction.redact_text(f"before {form.format(secret)} after", set())
        assert secret not in told
        assert told.startswith("before ")


@pytest.mark.parametrize("piece", ["a", "-", "a.", "a-", "token", "--", "eyJ-", "1", "://", "\t"])
def test_a_long_text_without_blanks_is_redacted_in_time(piece: str) -> None:
    """With repetitions that are not bounded this takes hours."""
    long = piece * (100_000 // len(piece))
    assert SECRETS[2] not in redaction.redact_text(f"{long} password={SECRETS[2]} {long}", {"wei"})


def test_what_is_no_secret_stays() -> None:
    for text in (
        "torch 2.13.0+cpu",
        "/usr/local/Ascend/cann-9.1.0/lib64",
        "0000:C1:00.0",
        "monkey: 7",
        "25.5.1",
        "the password is required",
    ):
        assert redaction.redact_text(text, {"wei"}) == text
    assert redaction.redact_values({"packages": {"tokenizers": "0.21"}, "token": "x"}, set()) == {
        "packages": {"tokenizers": "0.21"},
        "token": "[removed]",
    }


@given(st.text(), st.sets(st.text(min_size=3, max_size=6), max_size=2))
def test_any_text_is_redacted(text: str, names: set[str]) -> None:
    assert isinstance(redaction.redact_text(text, names), str)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    machine = roots.cpu().machine(tmp_path)
    with pytest.raises(Failure, match="cannot write"):
        bundle.write_bundle(tmp_path / "no" / "such" / "folder.tar.gz", machine, run_checks(machine))
