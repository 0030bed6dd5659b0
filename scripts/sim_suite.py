"""Run a folder of other people's test files on simulated NPUs: used by torch_npu_tests.py and pytorch_tests.py.

Files run side by side, each in a process of its own with a limit for every test. A stopped run continues where it was.
Tests that need what a simulator cannot have are listed, with the reason, in sim_suite_exceptions.yaml.
"""

from __future__ import annotations

import argparse
import collections
import fnmatch
import json
import os
import queue
import re
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
WORKER = Path(__file__).with_name("sim_suite_worker.py")
EXCEPTIONS = Path(__file__).with_name("sim_suite_exceptions.yaml")
OUTCOMES = ("passed", "failed", "timeout", "crashed", "skipped", "excepted")
BAD = ("failed", "timeout", "crashed")

CAUSES = (
    (r"operator (\S+) is not simulated", "operator {}"),
    (r"(aclnn\w+) or \1GetWorkspaceSize not in", "{}"),
    (r"(acl\w+|Hccl\w+|rt[A-Z]\w+) is not simulated", "{}"),
    (r"ModuleNotFoundError: No module named '([\w.]+)'", "module {}"),
    (r"ImportError: (cannot import name '\w+')", "{}"),
    (r"(Could not run '[\w:.]+') with arguments from the '(\w+)' backend", "{}"),
    (r"FileNotFoundError: .*?'([^']*)'", "file {}"),
    (r"Tensor-likes are not (close|equal)", "other numbers"),
    (r"(AttributeError: [^\n]{1,100})", "{}"),
    (r"(\w*Error: [^\n]{1,90})", "{}"),
    (r"(process ended by \w+)", "{}"),
    (r"(ran longer than its limit)", "longer than the limit"),
)
"""What the end of a failure's text says about its cause: the first that matches."""


@dataclass
class FileResult:
    """One test file."""

    name: str
    tests: dict[str, dict[str, Any]] = field(default_factory=dict)
    collected: int = 0
    chosen: int = 0
    finished: bool = False

    def count(self, *outcomes: str) -> int:
        """Return how many tests ended so."""
        return sum(row["outcome"] in outcomes for row in self.tests.values())


MACHINE_PATH = re.compile(r"(?<![\w.])(?:/[\w.+-]+)+/(?=[\w.+-])")
"""The folders of an absolute path, which are those of one machine."""


def find_cause(text: str) -> str:
    """Return a short name for what made a test fail."""
    text = MACHINE_PATH.sub("", text)
    for pattern, name in CAUSES:
        if found := list(re.finditer(pattern, text)):
            return name.format(*found[-1].groups())
    return text.strip().splitlines()[-1][:100] if text.strip() else "no text"


DISABLED = Path("unsupported_test_cases", ".pytorch-disabled-tests.json")
"""Below the folder test of Ascend/pytorch: what its own CI does not run, because it fails on real NPUs."""
DISABLED_NEEDS = {"needs": "more than a real NPU has: in torch_npu's own list of tests that fail there"}
DISABLED_NEEDS["needs_zh"] = "真实 NPU 也不具备的功能：在 torch_npu 自己的失败测试清单中"


@dataclass(frozen=True)
class Exceptions:
    """Why tests may fail."""

    rows: list[dict[str, str]]
    disabled: frozenset[tuple[str, str]] = frozenset()
    """(method, class) of torch_npu's own list."""

    def find(self, file: str, test: str, error: str) -> str:
        """Return what a test needs that a simulator cannot have; "" for one that has to pass."""
        for row in self.rows:
            if fnmatch.fnmatchcase(f"{file}::{test}", row.get("tests", "*")) and re.search(row.get("error", ""), error):
                return row["needs"]
        class_name, _, method = test.partition("::")
        names = {class_name, class_name.replace("PRIVATEUSE1", "NPU"), re.sub("(PRIVATEUSE1|NPU)$", "", class_name)}
        methods = {method, re.sub(r"_npu(_[a-z0-9_]+)?$", "", method)}
        if any((method, name) in self.disabled for name in names for method in methods):
            return DISABLED_NEEDS["needs"]
        return ""


def read_exceptions(disabled: Path | None) -> Exceptions:
    """Return the rows of sim_suite_exceptions.yaml, and torch_npu's own list where there is one."""
    rows = yaml.safe_load(EXCEPTIONS.read_text(encoding="utf-8"))["exceptions"]
    names: set[tuple[str, str]] = set()
    if disabled:
        for line in json.loads(disabled.read_text(encoding="utf-8")):
            if found := re.fullmatch(r"(\S+) \((?:\S*\.)?(\w+)\)", line):
                names.add((found[1], found[2]))
    return Exceptions([{key: str(value) for key, value in row.items()} for row in rows], frozenset(names))


def read_file_result(path: Path, name: str, exceptions: Exceptions | None = None) -> FileResult:
    """Read one result file; a failure that an exception names becomes `excepted`."""
    result = FileResult(name)
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue  # the last line of a killed process
        if "collected" in row:
            result.collected, result.chosen = max(result.collected, row["collected"]), row["chosen"]
        if "test" in row:
            result.tests[row["test"]] = row
        result.finished = result.finished or "end" in row
    if len(result.tests) > 1 and result.tests.get("(collect)", {}).get("outcome") == "skipped":
        result.tests.pop("(collect)")
    for test, row in result.tests.items():
        if exceptions and row["outcome"] in BAD and (needs := exceptions.find(name, test, row.get("error", ""))):
            row["outcome"], row["needs"] = "excepted", needs
    return result


def count_missing(result: FileResult) -> None:
    """Count what was to run and has no result as too slow: the time of its file was over, or the run was stopped."""
    for number in range(result.chosen - len(result.tests)):
        result.tests[f"(not run {number})"] = {"outcome": "timeout", "error": "not run: the time of the file was over"}


def forget_results(path: Path, again: str) -> None:
    """Drop what shall run again: failures, or everything."""
    if not path.is_file():
        return
    kept = []
    if again == "failed":
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line) if line.startswith("{") and line.endswith("}") else {}
            if row.get("outcome") in ("passed", "skipped") and row["test"] != "(collect)":
                kept.append(line)
        if len(kept) == sum('"outcome"' in line for line in path.read_text(encoding="utf-8").splitlines()):
            return  # nothing failed
    path.write_text("".join(line + "\n" for line in kept), encoding="utf-8")


def start_worker(npus: int) -> subprocess.Popen[str]:
    """Start one simulated machine with a worker in it."""
    words = [sys.executable, "-m", "anabatic", "sim", "--npus", str(npus), "--", sys.executable, str(WORKER)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}
    return subprocess.Popen(words, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def run_files(jobs: list[dict[str, Any]], count: int, npus: int) -> None:
    """Run the files on `count` simulated machines; say how far it is."""
    waiting: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)
    ended: list[str] = []

    def serve() -> None:
        while True:
            worker = start_worker(npus)
            assert worker.stdin and worker.stdout
            while True:
                try:
                    job = waiting.get_nowait()
                except queue.Empty:
                    worker.stdin.close()
                    worker.wait()
                    return
                worker.stdin.write(json.dumps(job) + "\n")
                worker.stdin.flush()
                answer = worker.stdout.readline()
                ended.append(job["name"])
                result = read_file_result(Path(job["results"]), job["name"])
                counts = f"{result.count('passed')} passed, {result.count(*BAD)} not, {result.count('skipped')} skipped"
                print(f"{len(ended)}/{len(jobs)} {job['name']}: {counts}", flush=True)
                if not answer:  # the worker itself died
                    worker.kill()
                    break

    threads = [threading.Thread(target=serve) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def format_row(name: str, results: list[FileResult]) -> str:
    """Return one row of a table: files without a failure, tests by outcome, the share of those that had to pass."""
    counts = [sum(result.count(outcome) for result in results) for outcome in OUTCOMES]
    tried = sum(counts[: 1 + len(BAD)])
    share = f"{100 * counts[0] / tried:.1f} %" if tried else "-"
    clean = sum(bool(result.tests) and not result.count(*BAD) for result in results)
    files = f"{clean} / {len(results)}" if len(results) > 1 else "1" if clean else "0"
    return "| " + " | ".join([name, files, *map(str, counts), share]) + " |"


HEADS = (
    (
        "files without a failure",
        "passed",
        "failed",
        "too slow",
        "crashed",
        "skipped",
        "excepted",
        "passed of those that must",
    ),
    ("无失败的文件", "通过", "失败", "超时", "崩溃", "跳过", "例外", "通过率"),
)


def format_head(first: str, language: int) -> str:
    """Return the head of a table."""
    return f"| {first} | " + " | ".join(HEADS[language]) + " |\n|---|" + "---:|" * len(HEADS[language])


def summarize(results: list[FileResult], language: int = 0) -> str:
    """Return a table with a row for each folder, and the sum."""
    folders: dict[str, list[FileResult]] = collections.defaultdict(list)
    for result in results:
        folder, _, file = result.name.rpartition("/")
        folders[folder.partition("/")[0] or ("." if len(results) > 20 else file)].append(result)
    lines = [format_head(("folder", "目录")[language], language)]
    lines += [format_row(f"`{folder}`", folders[folder]) for folder in sorted(folders)]
    return "\n".join([*lines, format_row(("all", "合计")[language], results)])


def list_needs(results: list[FileResult], exceptions: Exceptions, language: int) -> str:
    """Return what the excepted tests need, with their number."""
    counts = collections.Counter(row["needs"] for result in results for row in result.tests.values() if "needs" in row)
    other = {row["needs"]: row["needs_zh"] for row in [*exceptions.rows, DISABLED_NEEDS]}
    lines = [f"- {other[need] if language else need}: {count}" for need, count in counts.most_common()]
    return "\n".join(lines)


def rank_causes(results: list[FileResult]) -> list[tuple[str, list[str]]]:
    """Return the causes of what failed with their tests, the most frequent first."""
    causes: dict[str, list[str]] = collections.defaultdict(list)
    for result in results:
        for test, row in result.tests.items():
            if row["outcome"] in BAD:
                causes[find_cause(row.get("error", ""))].append(f"{result.name}::{test}")
    return sorted(causes.items(), key=lambda item: -len(item[1]))


@dataclass(frozen=True)
class Suite:
    """What a program runs and where its table stands."""

    name: str
    program: str
    description: str
    tests: Path
    tests_help: str


def parse_options(suite: Suite) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=suite.description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tests", type=Path, default=suite.tests, help=suite.tests_help)
    parser.add_argument(
        "--disabled", type=Path, help=f"torch_npu's own list of tests that fail (default: test/{DISABLED})"
    )
    parser.add_argument(
        "--only", nargs="+", default=[""], help="files whose path contains one of these; FILE::PART also chooses tests"
    )
    parser.add_argument("--without", default="", help="not the files whose path contains this")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / suite.name)
    parser.add_argument("--again", choices=("no", "failed", "all"), default="no", help="what has a result already")
    parser.add_argument("--jobs", type=int, default=2, help="files at a time")
    parser.add_argument("--npus", type=int, default=2, help="devices of the simulated machine")
    parser.add_argument("--most", type=int, default=300, help="tests of a file: a sample of those with more; 0: all")
    parser.add_argument("--spawn", action="store_true", help="let each rank of a test import torch anew")
    parser.add_argument("--test-seconds", type=float, default=60)
    parser.add_argument("--file-seconds", type=float, default=900)
    parser.add_argument("--causes", type=int, default=60, help="how many causes of failures to list")
    parser.add_argument("--summary", action="store_true", help="run nothing, only print the tables")
    parser.add_argument("--docs", action="store_true", help="also rewrite the table on the fidelity page")
    options = parser.parse_args()
    if options.jobs < 1 or options.npus < 1 or options.most < 0:
        parser.error("--jobs and --npus must be at least 1, --most at least 0")
    options.root = options.tests.resolve() / "test"
    if not options.root.is_dir():
        parser.error(f"{options.root} is not there; --tests: {suite.tests_help}")
    found = options.root / DISABLED
    options.disabled = options.disabled or (found if found.is_file() else None)
    parts = [words.partition("::") for words in options.only]
    options.part = parts[0][2]
    names = sorted(str(path.relative_to(options.root)) for path in options.root.rglob("test_*.py"))
    names = [name for name in names if any(only in name for only, _, _ in parts)]
    options.names = [name for name in names if not (options.without and options.without in name)]
    if not options.names or (options.part and len(parts) > 1):
        parser.error(f"--only: no test file below {options.root}, or tests of several: {' '.join(options.only)}")
    return options


def list_jobs(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return what is left to run."""
    jobs = []
    for name in options.names:
        path = options.results.resolve() / f"{name}.jsonl"
        if options.again != "no":
            forget_results(path, options.again)
        if not read_file_result(path, name).finished:
            limits = {"seconds": options.test_seconds, "file_seconds": options.file_seconds, "most": options.most}
            places = {"file": str(options.root / name), "root": str(options.root), "results": str(path)}
            places["warm"] = not options.spawn
            jobs.append({"name": name, **places, **limits, "only": options.part})
    return jobs


PAGES = ("docs/en/concepts/sim-fidelity.md", "docs/zh/concepts/sim-fidelity.md")


def write_docs(suite: Suite, results: list[FileResult], exceptions: Exceptions, most: int) -> None:
    """Rewrite the part of the fidelity pages between the suite's marks, and the table of its files in docs/dev."""
    collected, chosen = sum(result.collected for result in results), sum(result.chosen for result in results)
    ran = sum(bool(result.tests) for result in results)
    if not ran:
        raise SystemExit(
            "error: there are no results to write\nhint: run the tests first, or name their folder: --results"
        )
    for language, page in enumerate(PAGES):
        path = ROOT / page
        begin, end = f"<!-- {suite.name}: {suite.program} -->", f"<!-- end of {suite.name} -->"
        before, mark, rest = path.read_text(encoding="utf-8").partition(begin)
        if not mark or end not in rest:
            raise SystemExit(f"error: {page} has no part between {begin} and {end}")
        said = (
            f"{ran} of {len(results)} files ran. They have {collected:,} tests, of which {chosen:,} were to run "
            f"(of a file at most {most or 'all'}).",
            f"{len(results)} 个文件中运行了 {ran} 个，共 {collected:,} 个测试，选取了其中 {chosen:,} 个"
            f"（每个文件至多 {most or '全部'}）。",
        )[language]
        needs = list_needs(results, exceptions, language)
        why = ("Excepted, by what they need:", "例外及其所需：")[language]
        parts = [said, "", summarize(results, language), *(["", why, "", needs] if needs else [])]
        path.write_text(f"{before}{begin}\n\n" + "\n".join(parts) + f"\n\n{end}{rest.partition(end)[2]}", "utf-8")
    table = [
        f"# {suite.name}: every file",
        "",
        f"Written by `python {suite.program} --docs`.",
        "",
        format_head("file", 0),
    ]
    table += [format_row(f"`{result.name}`", [result]) for result in results]
    table += ["", "## Failures by cause", "", "| tests | cause | for example |", "|---:|---|---|"]
    table += [f"| {len(tests)} | {_escape(cause)} | `{tests[0]}` |" for cause, tests in rank_causes(results)]
    (ROOT / f"docs/dev/{suite.name}.md").write_text("\n".join(table) + "\n", encoding="utf-8")


def _escape(text: str) -> str:
    text = re.sub(r"/(?:[\w.-]+/)+([\w.-]+)", r"\1", text)  # paths of this machine say nothing elsewhere
    return "`" + text.replace("`", "'").replace("|", "/").replace("\n", " ") + "`"


def run_suite(suite: Suite) -> int:
    """Run what is left, then print the causes of failures and the table."""
    options = parse_options(suite)
    if not options.summary and (jobs := list_jobs(options)):
        run_files(jobs, min(options.jobs, len(jobs)), options.npus)
    exceptions = read_exceptions(options.disabled)
    results = [read_file_result(options.results / f"{name}.jsonl", name, exceptions) for name in options.names]
    for result in results:
        count_missing(result)
    for cause, tests in rank_causes(results)[: options.causes]:
        print(f"{len(tests):5}  {cause}   ({tests[0]})")
    print(summarize(results))
    print(list_needs(results, exceptions, 0))
    if options.docs:
        write_docs(suite, results, exceptions, options.most)
    return 0
