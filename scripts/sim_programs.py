"""Run programs of other projects, unmodified, on simulated NPUs and beside it on the CPU; one table of what they did.

python scripts/sim_programs.py                 # run all of scripts/programs/*.yaml, print the table
python scripts/sim_programs.py --only trl      # one of them, or one run: trl/sft
python scripts/sim_programs.py --docs          # also write results.json and the pages
python scripts/sim_programs.py --docs --only none    # write the pages from results.json alone
python scripts/sim_programs.py --prepare       # only make the environments

Each program gets a virtual environment with pinned versions below the cache folder (`programs/`), which has
`anabatic sim` from this checkout on its path. Programs that are not in a package come from their repository at a pinned
commit.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))
from anabatic.core.paths import get_cache_root, write_atomic  # noqa: E402 - of this checkout
from sim_program_specs import FOLDER, Program, Run, Source, read_programs  # noqa: E402

RESULTS = FOLDER / "results.json"
PAGE = "docs/{language}/concepts/sim-programs.md"
BEGIN, END = "<!-- programs: python scripts/sim_programs.py --docs -->", "<!-- end of programs -->"
ALWAYS_INSTALLED = ("psutil", "pyyaml", "rich")
"""What `anabatic sim` itself imports."""
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "WANDB_MODE": "disabled",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "COLUMNS": "200",
}
"""No run may load anything, and all of them share the cores of one machine."""
RESULT_WORDS = {
    "equal": ("same losses", "loss 一致"),
    "close": ("losses within tolerance", "loss 在容差内"),
    "runs": ("runs", "可运行"),
    "differs": ("other losses", "loss 不一致"),
    "fails": ("fails", "失败"),
    "fails everywhere": ("fails, on the CPU too", "失败（CPU 上也失败）"),
    "not run": ("not run yet", "尚未运行"),
}
LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "tune")
"""What follows these and their options is the program."""
_ERROR_LINE = re.compile(
    r"^(?:\[rank\d+\]:\s*|\S*\d\]:\s*)?((?:[A-Za-z_][\w.]*)?(?:Error|Exception|Interrupt|Exit)\b.*)", re.M
)
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def cache_folder() -> Path:
    """Environments, checkouts and logs."""
    return get_cache_root() / "programs"


def _call(words: Sequence[str], log: Path, **options: Any) -> None:
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ {shlex.join(words)}\n")
        file.flush()
        code = subprocess.run(words, stdout=file, stderr=subprocess.STDOUT, **options).returncode
    if code:
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1]
        raise RuntimeError(f"{shlex.join(words)[:200]}: exit {code}: {last} ({log})")


def prepare_environment(program: Program) -> Path:
    """Return the folder of the program's virtual environment; programs with the same requirements share one."""
    torch = [word for word in program.requirements if word.startswith(("torch==", "torchvision==", "torchaudio=="))]
    key = hashlib.sha256(
        "\0".join((*sorted(program.requirements), *program.bare, *program.removed, sys.version)).encode()
    ).hexdigest()[:12]
    folder = cache_folder() / "environments" / key
    if (folder / "ready").is_file():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.with_suffix(".log")
    log.unlink(missing_ok=True)
    _say(f"{program.name}: an environment with {' '.join(program.requirements)}")
    _call([sys.executable, "-m", "venv", str(folder)], log)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-compile"]
    index = ["--index-url", os.environ["TORCH_INDEX"]] if os.environ.get("TORCH_INDEX") else []
    _call([*pip, *index, *torch], log)  # the CPU build before anything asks for another
    _call([*pip, *program.requirements, *ALWAYS_INSTALLED], log)
    if program.bare:
        _call([*pip, "--no-deps", *program.bare], log)
    for pattern in program.removed:
        for file in folder.glob(f"lib/python3*/site-packages/{pattern}"):
            file.unlink()
    (folder / "ready").write_text("\n".join(program.requirements) + "\n", encoding="utf-8")
    return folder


def prepare_source(source: Source) -> Path:
    """Return the checkout of a pinned commit, without its history."""
    name = source.repository.rpartition("/")[2]
    key = hashlib.sha256("\0".join(source.paths).encode()).hexdigest()[:6]
    folder = cache_folder() / "sources" / f"{name}-{source.commit[:12]}-{key}"
    if (folder / ".git" / "ready").is_file():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    log = folder.with_suffix(".log")
    git = ["git", "-C", str(folder)]
    _call([*git, "init", "--quiet"], log)
    _call([*git, "fetch", "--quiet", "--depth", "1", "--filter=blob:none", source.repository, source.commit], log)
    _call([*git, "checkout", "--quiet", "FETCH_HEAD", "--", *source.paths], log)
    (folder / ".git" / "ready").touch()
    return folder


def find_places(program: Program, environment: Path) -> dict[str, object]:
    """Return what stands for `{name}` in commands, apart from `{work}`."""
    inputs = prepare_inputs(environment) if program.inputs else None
    places: dict[str, object] = {"model": inputs and inputs / "qwen2", "data": inputs, "here": FOLDER}
    for number, source in enumerate(program.sources, 1):
        places["source" if number == 1 else f"source_{number}"] = prepare_source(source)
    return places


def prepare_inputs(environment: Path) -> Path:
    """Return the folder of tiny models and rows that inputs.py makes with this environment."""
    script = FOLDER / "inputs.py"
    folder = environment / f"inputs-{hashlib.sha256(script.read_bytes()).hexdigest()[:12]}"
    if not folder.is_dir():
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        log = environment / "inputs.log"
        words = [str(environment / "bin" / "python"), str(script), str(part)]
        _call(words, log, env={**_clean_environment(environment), **OFFLINE})
        part.rename(folder)
    return folder


def _clean_environment(environment: Path) -> dict[str, str]:
    dropped = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")
    kept = {
        key: value for key, value in os.environ.items() if key not in dropped and not key.startswith("ANABATIC_SIM_")
    }
    kept["PATH"] = f"{environment / 'bin'}{os.pathsep}{kept['PATH']}"
    return kept


@dataclass
class Side:
    """What one command did."""

    code: int
    seconds: float
    losses: list[float]
    error: str
    output: str


@dataclass
class Outcome:
    """A row of the table."""

    run: str
    title: str
    version: str
    command: str
    devices: int
    losses: list[float]
    cpu_losses: list[float]
    difference: float | None
    result: str
    cause: dict[str, str]
    seconds: float
    date: str


def find_losses(pattern: str | None, output: str) -> list[float]:
    """Return the numbers that `pattern` finds."""
    return [float(text) for text in re.findall(pattern, output)] if pattern else []


def find_error(output: str) -> str:
    """Return the line that names the error: the last exception that is not a launcher's, else the last line."""
    errors = [found.strip() for found in _ERROR_LINE.findall(output)]
    own = [line for line in errors if not re.search(r"ChildFailedError|CalledProcessError|SystemExit", line)]
    lines = own or errors or output.strip().splitlines()[-1:]
    return lines[-1][:400] if lines else "no output"


def run_side(words: Sequence[str], run: Run, variables: Mapping[str, str], work: Path, log: Path) -> Side:
    """Run a command in `work`, with a limit in time; its output goes to `log`."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    started = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        file.write(f"$ {shlex.join(words)}\n")
        file.flush()
        child = subprocess.Popen(
            words, cwd=work, env=dict(variables), stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = child.wait(run.seconds)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGTERM)
            code = -1 if child.wait(60) else 0
            file.write(f"TimeoutError: did not end within {run.seconds} s\n")
    output = _ANSI.sub("", log.read_text(encoding="utf-8", errors="replace").partition("\n")[2])
    return Side(
        code,
        time.monotonic() - started,
        find_losses(run.losses, output) if code == 0 else [],
        find_error(output) if code else "",
        output,
    )


def run_devices(program: Program, run: Run, devices: int) -> Outcome:
    """Run a command on `devices` simulated NPUs and on the CPU."""
    environment = prepare_environment(program)
    places = find_places(program, environment)
    name = re.sub(r"\W+", "-", f"{program.name}-{run.name}")  # settings are not all quoted by everybody
    work = cache_folder() / "work" / f"{name}-{devices}"
    logs = cache_folder() / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    text = run.commands()[devices]
    sides = {}
    for where in ("npu", "cpu") if run.on_cpu else ("npu",):
        folder = work.with_name(f"{work.name}-{where}")
        words = shlex.split(fill(text, {**places, "work": folder}))
        variables = {**_clean_environment(environment), **OFFLINE, **run.environment}
        variables["HF_HOME"] = str(folder / "hub")
        if where == "npu":
            python = str(environment / "bin" / "python")
            words = [python, "-m", "anabatic", "sim", "--npus", str(devices), "--", *words]
            variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT / "src"), variables.get("PYTHONPATH"))))
        else:
            words += shlex.split(fill(run.cpu[devices - 1], {**places, "work": folder}))
            variables |= run.cpu_environment
        variables = {key: fill(value, {**places, "work": folder}) for key, value in variables.items()}
        _say(f"{run.key}, {devices} x {where}")
        sides[where] = run_side(words, run, variables, folder, logs / f"{folder.name}.log")
        _say(f"{run.key}, {devices} x {where}: exit {sides[where].code} {sides[where].error} {sides[where].losses[:4]}")
        if sides[where].code == 0:
            shutil.rmtree(folder, ignore_errors=True)
    if run.like:
        other = read_results()[run.like if "@" in run.like else f"{run.like}@{devices}"]
        sides["cpu"] = Side(0, 0.0, other.cpu_losses, "", "")
    return judge(program, run, devices, sides["npu"], sides.get("cpu"))


def fill(text: str, places: Mapping[str, object]) -> str:
    """Put folders in the place of `{name}`; other braces stay."""
    for name, value in places.items():
        text = text.replace("{" + name + "}", str(value))
    return text


def judge(program: Program, run: Run, devices: int, npu: Side, cpu: Side | None) -> Outcome:
    """Compare both sides."""
    difference: float | None = None
    cause: dict[str, str] = {}
    if npu.code:
        result = "fails everywhere" if cpu and cpu.code else "fails"
        cause = {"en": npu.error, "zh": npu.error}
        known = run.expected.get(devices)
        if known and known["match"] in npu.output:
            cause = {"en": known["en"], "zh": known["zh"]}
    elif run.losses is None or cpu is None:
        result = "runs"
    elif cpu.code:
        result, cause = "runs", {"en": f"on the CPU: {cpu.error}", "zh": f"CPU 上：{cpu.error}"}
    elif not npu.losses or len(npu.losses) != len(cpu.losses):
        counts = len(npu.losses), len(cpu.losses)
        result = "differs"
        cause = {
            "en": f"{counts[0]} losses, on the CPU {counts[1]}",
            "zh": f"loss {counts[0]} 个，CPU 上 {counts[1]} 个",
        }
    else:
        difference = max(abs(a - b) for a, b in zip(npu.losses, cpu.losses, strict=True))
        result = "equal" if difference == 0 else "close" if difference <= run.tolerance else "differs"
        difference = None if difference != difference else difference  # NaN is no JSON
    return Outcome(
        run=run.key,
        title=program.title,
        version=program.version,
        command=shown_command(run.commands()[devices]),
        devices=devices,
        losses=npu.losses[:50],
        cpu_losses=cpu.losses[:50] if cpu else [],
        difference=difference,
        result=result,
        cause=cause,
        seconds=round(npu.seconds, 1),
        date=time.strftime("%Y-%m-%d"),
    )


def shown_command(text: str) -> str:
    """Return the start of a command: what is run, without its settings."""
    words = shlex.split(text)
    shown = [fill(word, {"source": "", "source_2": "", "here": "scripts/programs"}).lstrip("/") for word in words]
    kept: list[str] = []
    for index, word in enumerate(shown):
        if word.startswith("-") and word not in ("-m",) and kept and kept[0] not in LAUNCHERS:
            break
        if index and "=" in word and not word.startswith("-"):
            break
        kept.append(word)
        if word.endswith((".py", ".sh", ".yaml")) or (len(kept) > 1 and kept[-2] == "-m"):
            break
    return " ".join(kept)


def render_table(outcomes: Sequence[Outcome], language: int) -> str:
    """Return the generated part of a page."""
    head = (
        "| program | version | command | devices | losses | largest difference | result |",
        "| 程序 | 版本 | 命令 | 设备数 | loss 数 | 最大差值 | 结果 |",
    )[language]
    lines = [head, "|---|---|---|---:|---:|---:|---|"]
    code = ("en", "zh")[language]
    for row in outcomes:
        word = RESULT_WORDS[row.result][language]
        cause = row.cause.get(code, "").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
        result = f"{word}: {cause}" if cause else word
        difference = "-" if row.difference is None else "0" if row.difference == 0 else f"{row.difference:.1e}"
        name = row.run.partition("/")[2]
        lines.append(
            f"| {row.title}, {name} | {row.version} | `{row.command}` | {row.devices} | {len(row.losses) or '-'} "
            f"| {difference} | {result} |"
        )
    return "\n".join(lines)


def read_results(path: Path = RESULTS) -> dict[str, Outcome]:
    """Return the stored rows by `PROGRAM/RUN@DEVICES`."""
    if not path.is_file():
        return {}
    return {key: Outcome(**row) for key, row in json.loads(path.read_text(encoding="utf-8")).items()}


def expected_keys(programs: Sequence[Program]) -> list[str]:
    """Return the keys of results.json in the order of the table."""
    return [f"{run.key}@{devices}" for program in programs for run in program.runs for devices in run.commands()]


def add_result(key: str, outcome: Outcome) -> None:
    """Put a row into results.json; two of these programs can work on different rows."""
    with (cache_folder() / "results.lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        outcomes = {**read_results(), key: outcome}
        order = expected_keys(read_programs())  # as they are now; rows of runs that are gone are left out
        rows = {name: asdict(outcomes[name]) for name in order if name in outcomes}
        write_atomic(RESULTS, json.dumps(rows, indent=1, ensure_ascii=False) + "\n")


def list_rows(programs: Sequence[Program], outcomes: Mapping[str, Outcome]) -> list[Outcome]:
    """Return a row for every command, also for those without a result."""
    rows = []
    for program in programs:
        for run in program.runs:
            for devices, text in run.commands().items():
                empty = Outcome(
                    run.key,
                    program.title,
                    program.version,
                    shown_command(text),
                    devices,
                    [],
                    [],
                    None,
                    "not run",
                    {},
                    0,
                    "",
                )
                rows.append(outcomes.get(f"{run.key}@{devices}", empty))
    return rows


def write_pages(outcomes: Mapping[str, Outcome], programs: Sequence[Program]) -> None:
    """Write the table into the pages."""
    rows = list_rows(programs, outcomes)
    for language, folder in enumerate(("en", "zh")):
        page = ROOT / PAGE.format(language=folder)
        before, rest = page.read_text(encoding="utf-8").split(BEGIN)
        table = render_table(rows, language)
        page.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.split(END)[1]}", encoding="utf-8")


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _chosen(programs: Sequence[Program], only: Sequence[str]) -> Iterator[tuple[Program, Run]]:
    for program in programs:
        for run in program.runs:
            if not only or program.name in only or run.key in only:
                yield program, run


def main() -> int:
    """Run what is chosen; return 1 when something differs from what its file expects."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="a program, or PROGRAM/RUN")
    parser.add_argument("--devices", type=int, choices=(1, 2), help="only the runs on this number of devices")
    parser.add_argument("--docs", action="store_true", help="write results.json and the pages")
    parser.add_argument("--prepare", action="store_true", help="only make environments and checkouts")
    arguments = parser.parse_args()
    programs = read_programs()
    names = {program.name for program in programs} | {run.key for program in programs for run in program.runs}
    if unknown := [name for name in arguments.only if name not in names | {"none"}]:
        known = ", ".join(sorted(program.name for program in programs))
        parser.error(f"--only {unknown[0]}: no such program or run; programs: {known}")
    bad = 0
    fresh: list[Outcome] = []
    for program, run in _chosen(programs, arguments.only):
        if arguments.prepare:
            find_places(program, prepare_environment(program))
            continue
        for devices in run.commands():
            if arguments.devices not in (None, devices):
                continue
            outcome = run_devices(program, run, devices)
            fresh.append(outcome)
            bad += not is_expected(run, outcome)
            if arguments.docs:
                add_result(f"{run.key}@{devices}", outcome)
    if arguments.docs:
        write_pages(read_results(), read_programs())
    sys.stdout.write(render_table(fresh, 0) + "\n")
    return 1 if bad else 0


def is_expected(run: Run, outcome: Outcome) -> bool:
    """Return whether a run did what its file says: the same losses, or the known failure."""
    known = run.expected.get(outcome.devices)
    if known:
        return outcome.cause.get("en") == known["en"]
    return outcome.result in ("equal", "close", "runs")


if __name__ == "__main__":
    sys.exit(main())
