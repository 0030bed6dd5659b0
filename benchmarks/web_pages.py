"""What the studio costs compared with LLaMA Board and the web UI of ms-swift: start, memory, transfer, idle load.

    python benchmarks/web_pages.py --llama-board VENV/bin/llamafactory-cli --swift VENV/bin/swift

Each server starts on a free local port in an empty folder, answers a headless Chromium, and then is left alone with the
open page. Nothing is fetched from a hub; files that a page loads from other hosts are not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psutil
from selenium import webdriver

from option_types import positive_int

START_SECONDS = 180.0
LOAD_SECONDS = 8.0
IDLE_SECONDS = 20.0
_OFFLINE = {"HF_HUB_OFFLINE": "1", "GRADIO_ANALYTICS_ENABLED": "False", "BROWSER": "true"}
_IS_BUILT = "return document.querySelectorAll('input, select, textarea').length > 5"


@dataclass(frozen=True)
class Candidate:
    """A server: `command` and `variables` with {port} in them."""

    name: str
    command: list[str]
    variables: dict[str, str] = field(default_factory=dict)


def list_candidates(options: argparse.Namespace) -> list[Candidate]:
    """Return the servers to measure."""
    found = [Candidate("studio", [sys.executable, "-m", "anabatic", "studio", "runs", "--port", "{port}"])]
    if options.llama_board:
        address = {"GRADIO_SERVER_PORT": "{port}", "GRADIO_SERVER_NAME": "127.0.0.1"}
        found.append(Candidate("LLaMA Board", [options.llama_board, "webui"], address))
    if options.swift:
        address = {"WEBUI_PORT": "{port}", "WEBUI_SERVER": "127.0.0.1", "SWIFT_UI_LANG": "en"}
        found.append(Candidate("ms-swift", [options.swift, "web-ui"], address))
    return found


def measure(candidate: Candidate) -> dict[str, float]:
    """Return the figures of one start.

    Raises:
        RuntimeError: the server ended, or did not answer in time.
    """
    port = find_free_port()
    with tempfile.TemporaryDirectory() as folder, run_server(candidate, port, folder) as (process, began):
        url = f"http://127.0.0.1:{port}/"
        wait_for_answer(process, url)
        figures = {
            "first answer, s": time.monotonic() - began,
            "processor time until then, s": cpu_seconds(process.pid),
        }
        with open_browser() as browser:
            began = time.monotonic()
            browser.get(url)
            while not browser.execute_script(_IS_BUILT) and time.monotonic() - began < START_SECONDS:
                time.sleep(0.05)
            figures["page built, s"] = time.monotonic() - began
            time.sleep(LOAD_SECONDS)
            requests, size = read_traffic(browser, url)
            figures |= {"requests": requests, "transferred, kB": size / 1000}
            used, began = cpu_seconds(process.pid), time.monotonic()
            time.sleep(IDLE_SECONDS)
            passed = time.monotonic() - began
            figures["idle: requests a minute"] = 60 * read_traffic(browser, url)[0] / passed
            figures["idle: processor, ms a second"] = 1000 * (cpu_seconds(process.pid) - used) / passed
            figures["resident memory, MB"] = sum(each.memory_info().rss for each in list_processes(process.pid)) / 1e6
    return figures


@contextmanager
def run_server(candidate: Candidate, port: int, folder: str) -> Iterator[tuple[subprocess.Popen[bytes], float]]:
    """Start a server in `folder`; end it and its children at the end."""
    fill = lambda text: text.replace("{port}", str(port))  # noqa: E731
    variables = {name: fill(value) for name, value in candidate.variables.items()}
    began = time.monotonic()
    process = subprocess.Popen(
        [fill(word) for word in candidate.command],
        cwd=folder,
        env={**os.environ, **_OFFLINE, **variables},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield process, began
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if process.poll() is None:
                os.killpg(process.pid, number)
                try:
                    process.wait(15)
                except subprocess.TimeoutExpired:
                    continue


def wait_for_answer(process: subprocess.Popen[bytes], url: str) -> None:
    """Wait until a server answers with its page."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with code {process.returncode}")
        try:
            urllib.request.urlopen(url, timeout=30).read()
            return
        except OSError:  # refused, or closed while it starts
            time.sleep(0.05)
    raise RuntimeError(f"no answer in {START_SECONDS:g} s")


@contextmanager
def open_browser() -> Iterator[Any]:
    """Start a headless Chromium that records its requests."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
    with tempfile.TemporaryDirectory() as profile:
        for option in ("--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,900"):
            options.add_argument(option)
        options.add_argument(f"--user-data-dir={profile}")
        options.set_capability("goog:loggingPrefs", {"performance": "ALL"})
        driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
        try:
            yield driver
        finally:
            driver.quit()


def read_traffic(browser: Any, url: str) -> tuple[int, float]:
    """Return requests to the server since the last call, and the bytes of their answers as transferred."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [row["params"] for row in messages if row["method"] == "Network.requestWillBeSent"]
    own = {row["requestId"] for row in sent if row["request"]["url"].startswith(url)}
    ended = [row["params"] for row in messages if row["method"] == "Network.loadingFinished"]
    return len(own), sum(row["encodedDataLength"] for row in ended if row["requestId"] in own)


def list_processes(pid: int) -> list[psutil.Process]:
    """Return a process and all below it."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process and all below it."""
    return float(sum(sum(each.cpu_times()[:2]) for each in list_processes(pid)))


def find_free_port() -> int:
    """Return a port that was free just now."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def main() -> None:
    """Measure in turns, and print the median and the range of each figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-board", default="", help="llamafactory-cli of an environment with LLaMA-Factory")
    parser.add_argument("--swift", default="", help="swift of an environment with ms-swift and gradio")
    parser.add_argument("--rounds", type=positive_int, default=3)
    options = parser.parse_args()
    candidates = list_candidates(options)
    results: dict[str, list[dict[str, float]]] = {candidate.name: [] for candidate in candidates}
    for _ in range(options.rounds):
        for candidate in candidates:
            results[candidate.name].append(measure(candidate))
    for name, rows in results.items():
        print(f"== {name}, {len(rows)} starts")
        for figure in rows[0]:
            values = [row[figure] for row in rows]
            print(f"  {figure:30} {statistics.median(values):10.1f}   ({min(values):.1f} to {max(values):.1f})")


if __name__ == "__main__":
    main()
