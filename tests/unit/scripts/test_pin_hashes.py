"""The locks: what is needed on which Python, which files belong to it, and what two indexes disagree on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts"
ALL = {10, 11, 12, 13, 14}


@pytest.fixture(name="locks")
def _locks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    pytest.importorskip("pip")
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import pin_hashes

    yield pin_hashes


def test_pins(locks: Any) -> None:
    text = '# head\ntorch==2.13.0\nA_b==1.0; python_version < "3.11"\nzope.event==2\n'
    assert locks.parse_pins(text) == [locks.Pin("a-b", "1.0", 'python_version < "3.11"'), locks.Pin("zope-event", "2")]
    with pytest.raises(SystemExit, match="no name==version"):
        locks.parse_pins("a==1 ;\n")


@pytest.mark.parametrize(
    ("minors", "marker"),
    [
        (ALL, ""),
        ({10}, 'python_version < "3.11"'),
        ({11, 12, 13, 14}, 'python_version >= "3.11"'),
        ({11, 12}, 'python_version >= "3.11" and python_version < "3.13"'),
        ({10, 14}, 'python_version == "3.10" or python_version == "3.14"'),
    ],
)
def test_markers(locks: Any, minors: set[int], marker: str) -> None:
    assert locks.write_marker(minors) == marker
    name = "a"
    for minor, _, variables in locks.list_environments():
        assert (locks.find_pin([locks.Pin(name, "1", marker)], name, variables) is not None) == (minor in minors)


def test_what_is_needed(locks: Any) -> None:
    pins = locks.parse_pins(
        'a==1; python_version < "3.11"\na==2; python_version >= "3.11"\nb==1\nc==1\nd==1\ne==1\nunused==1\n'
    )
    needs = {
        ("a", "1"): ["b; python_version < '3.11'", "gone; sys_platform == 'win32'"],
        ("a", "2"): ["C[x]>=1", "torch>=2"],
        ("b", "1"): ["a"],
        ("c", "1"): ["d; extra == 'x'", "unused; extra == 'y'"],
        ("d", "1"): ["e; python_full_version < '3.12.5'"],
    }
    read = []

    def requirements(pin: Any) -> list[str]:
        read.append(pin)
        return needs.get((pin.name, pin.version), [])

    found = locks.find_needed(["A", "torch==2"], pins, requirements)
    assert {(pin.name, pin.version): minors for pin, minors in found.items()} == {
        ("a", "1"): {10},
        ("a", "2"): ALL - {10},
        ("b", "1"): {10},
        ("c", "1"): ALL - {10},
        ("d", "1"): ALL - {10},
        ("e", "1"): {11, 12},
    }
    assert len(set(read)) == len(read), "metadata is fetched once"
    with pytest.raises(SystemExit, match=r"a needs gone on Python 3\.10.*\nhint: "):
        locks.find_needed(["a"], pins, lambda pin: ["gone"] if pin.name == "a" else [])


def test_which_files(locks: Any) -> None:
    def choose(names: list[str], minors: set[int]) -> list[str]:
        files = [locks.File(name, name, str) for name in names]
        return [file.name for file in locks.choose_files(files, minors)]

    kept = [
        "a-1-cp310-cp310-manylinux2014_x86_64.manylinux_2_17_x86_64.whl",
        "a-1-cp310-cp310-manylinux_2_28_aarch64.whl",
        "a-1-cp310-cp310-manylinux_2_28_x86_64.whl",
        "a-1-cp311-abi3-manylinux_2_17_aarch64.whl",
        "a-1-cp311-abi3-manylinux_2_17_x86_64.whl",
    ]
    left = [
        "a-1-cp39-cp39-manylinux_2_28_x86_64.whl",
        "a-1-cp312-cp312-musllinux_1_2_x86_64.whl",
        "a-1-cp312-cp312-macosx_11_0_arm64.whl",
        "a-1-cp312-cp312-win_amd64.whl",
        "a-1-cp313-cp313t-manylinux_2_28_x86_64.whl",
        "a-1-cp312-cp312-manylinux_2_28_ppc64le.whl",
        "a-1-pp311-pypy311_pp73-manylinux_2_28_x86_64.whl",
        "a-1.tar.gz",
    ]
    assert choose(kept + left, ALL) == kept
    assert choose(kept + left, {10}) == kept[:3]
    assert choose(["b-1-py2.py3-none-any.whl", "b-1.tar.gz"], ALL) == ["b-1-py2.py3-none-any.whl"]
    assert choose(["c-1-py3-none-manylinux_2_17_x86_64.whl", "c-1.tar.gz"], ALL) == [
        "c-1-py3-none-manylinux_2_17_x86_64.whl",
        "c-1.tar.gz",
    ]
    with pytest.raises(SystemExit, match=r"no wheel for Python 3\.10 on aarch64, .*\nhint: "):
        choose(["c-1-py3-none-manylinux_2_17_x86_64.whl"], ALL)


@pytest.mark.parametrize(
    ("file", "name", "version"),
    [
        ("typing_extensions-4.16.0-py3-none-any.whl", "typing-extensions", "4.16.0"),
        ("ray-2.60.0-1-cp312-cp312-manylinux2014_x86_64.whl", "ray", "2.60.0"),
        ("types-PyYAML-6.0.1.tar.gz", "types-pyyaml", "6.0.1"),
        ("other-1-py3-none-any.whl", "ray", ""),
        ("ray-2.60.0.exe", "ray", ""),
    ],
)
def test_versions_of_files(locks: Any, file: str, name: str, version: str) -> None:
    assert locks.read_version(file, name) == version


LIST_FILES = """
import sys
import pin_hashes
for file in pin_hashes.Index().list_files(pin_hashes.Pin(*sys.argv[1:])):
    print(file.name, file.sha256)
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("second", "version", "said"),
    [
        ("1" * 64, "1", "a_b-1-py3-none-any.whl " + "1" * 64),
        ("2" * 64, "1", f"error: a_b-1-py3-none-any.whl has the checksums {'1' * 64} and {'2' * 64} in two indexes"),
        ("1" * 64, "2", "error: the index gives no sha256 of a_b-2-py3-none-any.whl"),
    ],
    ids=["agree", "disagree", "no checksum"],
)
def test_indexes_of_pip(tmp_path: Path, second: str, version: str, said: str) -> None:
    """The indexes that pip's variables name are read, and one that gives a file another checksum is refused."""
    variables = {**os.environ, "PYTHONPATH": str(SCRIPTS), "PIP_CONFIG_FILE": os.devnull}
    for variable, digest in (("PIP_INDEX_URL", "1" * 64), ("PIP_EXTRA_INDEX_URL", second)):
        page = tmp_path / variable / "a-b" / "index.html"
        page.parent.mkdir(parents=True)
        links = f'<a href="a_b-1-py3-none-any.whl#sha256={digest}">a</a><a href="a_b-2-py3-none-any.whl">b</a>'
        page.write_text(f"<!DOCTYPE html><html><body>{links}</body></html>")
        variables[variable] = (tmp_path / variable).as_uri()
    command = [sys.executable, "-c", LIST_FILES, "a-b", version]
    run = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=False)
    lines = (run.stdout or run.stderr).splitlines()
    assert lines[0] == said and run.returncode == (1 if said.startswith("error") else 0)
    assert not said.startswith("error") or lines[1].startswith("hint: ")


def test_what_is_installed_needs_nothing_else() -> None:
    """On this Python: what the packages of the lock ask for, as their installed metadata says, is in the lock."""
    from packaging.requirements import Requirement

    text = (SCRIPTS.parent / "requirements-dev.txt").read_text(encoding="utf-8")
    locked = set(re.findall(r"^([a-z0-9-]+)==(\S+?)(?:;| \\)", text, re.M))
    names = {name for name, _ in locked}
    missing, read = [], 0
    for name, version in sorted(locked):
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        if found.version != version:
            continue
        read += 1
        for line in found.requires or ():
            needed = re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", line, maxsplit=1)[0]).lower()
            if needed in names or needed == "torch":
                continue
            marker = Requirement(line).marker
            if marker is None or marker.evaluate({"extra": ""}):
                missing.append(f"{name} needs {needed}")
    assert not missing and read > 50
