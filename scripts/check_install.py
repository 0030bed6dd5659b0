"""Install the wheel as users do, and ask the index whether every platform finds what it needs. Needs a network.

usage: python scripts/check_install.py [resolve] [uv]     both where none is named; uv must be on the PATH

resolve: `pip install --dry-run`, wheels only, for each Python on x86_64 and aarch64, with and without the extras.
uv:      `uv tool install` and `uvx` in empty folders; then the demo's plan in an empty folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
MACHINES = ("x86_64", "aarch64")
GLIBCS = tuple(f"2_{minor}" for minor in range(17, 29))
"""Up to that of openEuler 22.03 and Ubuntu 20.04, which CANN supports: manylinux tags are compatible upwards."""
EXTRAS = ("", "serve,vessels,nmea,constrain,monitor,data,modelscope", "track", "ray")


def run(*words: str | Path, **options: object) -> str:
    """Run a program; return its output, or end with its last lines."""
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    if done.returncode:
        sys.exit(f"error: {' '.join(map(str, words))}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return str(done.stdout)


def build_wheel(folder: Path) -> Path:
    run(sys.executable, ROOT / "scripts" / "fetch_web_libraries.py")
    os.environ["ANABATIC_REQUIRE_WEB_LIBRARIES"] = "1"
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT)
    return next(folder.glob("*.whl"))


def resolve(wheel: Path) -> None:
    """Ask the index for every combination."""
    for python in PYTHONS:
        for machine in MACHINES:
            for extras in EXTRAS:
                tags = [f"manylinux_{version}_{machine}" for version in GLIBCS] + [f"manylinux2014_{machine}"]
                platforms = [word for tag in tags for word in ("--platform", tag)]
                with tempfile.TemporaryDirectory() as target:
                    report = run(
                        *(sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"),
                        *("--report", "-", "--only-binary", ":all:", "--target", target, *platforms),
                        *("--python-version", python, "--implementation", "cp"),
                        f"{wheel}[{extras}]" if extras else wheel,
                    )
                names = {row["metadata"]["name"]: row["metadata"]["version"] for row in json.loads(report)["install"]}
                print(f"{python} {machine:8} [{extras}]: {len(names)} wheels, torch {names['torch']}", flush=True)


def try_uv(wheel: Path) -> None:
    """Install and run the tool where nothing else is."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        paths = {"UV_TOOL_DIR": folder / "tools", "UV_TOOL_BIN_DIR": folder / "bin", "HOME": folder}
        environment = {**os.environ, **{name: str(path) for name, path in paths.items()}}
        empty = folder / "empty"
        empty.mkdir()
        run("uv", "tool", "install", wheel, env=environment, cwd=empty)
        for words in (["--version"], ["run", "demo", "--dry-run"], ["help", "packing"], ["recipes", "list"]):
            run(folder / "bin" / "anabatic", *words, env=environment, cwd=empty)
            print(f"uv tool install: anabatic {' '.join(words)}", flush=True)
        report = json.loads(run("uvx", "--from", wheel, "anabatic", "doctor", "--json", env=environment, cwd=empty))
        print(f"uvx anabatic doctor: version {report['version']}, {len(report['lines'])} lines", flush=True)


def main() -> None:
    wanted = sys.argv[1:] or ["resolve", "uv"]
    with tempfile.TemporaryDirectory() as temporary:
        wheel = build_wheel(Path(temporary))
        for name in wanted:
            {"resolve": resolve, "uv": try_uv}[name](wheel)


if __name__ == "__main__":
    main()
