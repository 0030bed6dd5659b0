"""Write the pictures of the web pages, docs/*/assets/screen-*.webp, in both languages: about two minutes on two cores.

usage: python scripts/make_screenshots.py                  write all pictures
       python scripts/make_screenshots.py queue report     write some
       python scripts/make_screenshots.py --to FOLDER      write them to FOLDER/en and FOLDER/zh
       python scripts/make_screenshots.py --format png     to look at them where WebP cannot be shown

The studio is a real one, with trainings that are made for the pictures in a temporary folder. Two things are prepared:
the conversation of the chat page, and the model of 7B, of which there is only the configuration.
It needs chromium and chromedriver, and a font with Chinese characters.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from selenium import webdriver

ROOT = Path(__file__).resolve().parent.parent
CONTENT = ROOT / "scripts" / "screenshots.yaml"
LANGUAGES = {"en": "en-US", "zh": "zh-CN"}
MAX_BYTES = 120_000
QUALITY = 74
WAIT_SECONDS = 180.0
CHAT_MODELS = ("sft-lr-0.001", "sft-lr-0.004")
COMPARED = ("sft-lr-0.004", "sft-lr-0.001", "sft-lr-0.0002")
CHIP = "910B3"
BIG_MODEL = "models/Qwen2.5-7B-Instruct"


@dataclass(frozen=True)
class Shot:
    """A picture: `prepare` opens what is shown; `height` is that of the window in CSS pixels."""

    name: str
    prepare: Callable[[Scene], None]
    theme: str = "light"
    width: int = 1280
    height: int = 800


@dataclass
class Scene:
    """What a picture is made of."""

    browser: Any
    studio: Studio
    home: Path
    language: str
    content: dict[str, Any]

    def find(self, css: str) -> Any:
        """Return the first element that matches."""
        return self.browser.find_element("css selector", css)

    def wait(self, script: str) -> None:
        """Wait until a JavaScript expression is true.

        Raises:
            RuntimeError: it did not become true in time.
        """
        wait_until(lambda: self.browser.execute_script(f"return Boolean({script})"), script)

    def open(self, path: str) -> None:
        """Open a page of the studio anew."""
        self.browser.get(f"{self.studio.url}/?token={self.studio.token}")  # logs in: browsers keep the cookie
        self.browser.get("about:blank")
        self.browser.get(self.studio.url + path)


@dataclass
class Studio:
    """A running `anabatic studio`."""

    url: str
    token: str

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the JSON answer.

        Raises:
            RuntimeError: the studio refused, with what it said.
        """
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.token}"}
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{path}: {error.read().decode()}") from error

    def submit(self, name: str, command: str, recipe: dict[str, Any]) -> int:
        """Queue a job; return its number."""
        text = yaml.safe_dump({"out": f"runs/{name}", **recipe}, sort_keys=False, allow_unicode=True)
        return int(self.ask("/api/jobs", {"command": command, "text": text, "name": name})["id"])

    def wait_for_job(self, number: int) -> None:
        """Wait until a job has finished.

        Raises:
            RuntimeError: it failed.
        """
        wait_until(lambda: self._is_finished(number), f"job {number}")

    def _is_finished(self, number: int) -> bool:
        state = next(job["state"] for job in self.ask("/api/jobs")["jobs"] if job["id"] == number)
        if state in ("failed", "stopped", "killed"):
            raise RuntimeError(f"job {number} {state}: {self.ask(f'/api/jobs/{number}/log')['text'][-2000:]}")
        return bool(state == "finished")


def wait_until(is_true: Callable[[], bool], what: str, seconds: float = WAIT_SECONDS) -> None:
    """Wait for a condition.

    Raises:
        RuntimeError: it did not come true in time.
    """
    end = time.monotonic() + seconds
    while not is_true():
        if time.monotonic() > end:
            raise RuntimeError(f"{what}: not after {seconds:g} s")
        time.sleep(0.1)


# --- what is shown ----------------------------------------------------------------------------------------------------


def write_home(home: Path, content: dict[str, Any]) -> None:
    """Write the files that the trainings read."""
    (home / "data").mkdir()
    rows = []
    for number in range(400):
        question, answer = content["questions"][number % len(content["questions"])]
        first, second = number % 19 + 2, number * 7 % 23 + 3
        values = {"a": first, "b": second, "sum": first + second, "product": first * second}
        rows.append([{"role": "user", "content": question.format(**values)}])
        rows[-1].append({"role": "assistant", "content": answer.format(**values)})
    lines = [json.dumps({"messages": row}, ensure_ascii=False) + "\n" for row in rows]
    (home / "data" / "questions.jsonl").write_text("".join(lines[:360]), encoding="utf-8")
    (home / "data" / "held-out.jsonl").write_text("".join(lines[360:]), encoding="utf-8")
    (home / BIG_MODEL).mkdir(parents=True)
    (home / BIG_MODEL / "config.json").write_text(json.dumps(content["big_model"]), encoding="utf-8")


@contextmanager
def run_studio(home: Path) -> Iterator[Studio]:
    """Start a studio in `home`; end it, and the jobs that still run, at the end."""
    command = [sys.executable, "-m", "anabatic", "studio", "runs", "--port", "0"]
    environment = {**os.environ, "ANABATIC_CACHE": str(home / "cache"), "HF_HUB_CACHE": str(home / "no-hub")}
    token = environment["ANABATIC_STUDIO_TOKEN"] = secrets.token_urlsafe(24)
    with open(home / "studio.log", "w+", encoding="utf-8") as log:
        process = subprocess.Popen(command, cwd=home, env=environment, stderr=log, stdout=log)
        try:
            yield Studio(wait_for_address(process, home / "studio.log"), token)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


def wait_for_address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Return the address that a studio printed.

    Raises:
        RuntimeError: it ended.
    """
    found: list[str] = []

    def is_there() -> bool:
        if process.poll() is not None:
            raise RuntimeError(log.read_text(encoding="utf-8"))
        found[:] = re.findall(r"studio at (http://[\w.:]+)/", log.read_text(encoding="utf-8"))
        return bool(found)

    wait_until(is_there, "the address of the studio")
    return found[0]


def train(studio: Studio, content: dict[str, Any]) -> None:
    """Queue the trainings of the pictures, wait for them, then queue two more, of which one runs."""
    jobs = content["jobs"]
    for name, job in jobs["finished"].items():  # one by one: a job can be queued when the model that it reads is there
        studio.wait_for_job(studio.submit(name, job["command"], job["recipe"]))
    for run in studio.ask("/api/runs")["runs"]:
        if note := content["notes"].get(run["name"]):
            studio.ask(f"/api/runs/{run['id']}/note", note)
    for name, job in jobs["queued"].items():
        studio.submit(name, job["command"], job["recipe"])


def end_jobs(studio: Studio) -> None:
    """Kill what runs, so that nothing outlives the pictures."""
    for job in sorted(studio.ask("/api/jobs")["jobs"], key=lambda job: job["state"] == "running"):
        if job["state"] == "waiting":
            studio.ask(f"/api/jobs/{job['id']}/remove", {})
        for _ in range(2 if job["state"] == "running" else 0):  # the second stop kills
            studio.ask(f"/api/jobs/{job['id']}/stop", {})
    wait_until(
        lambda: all(job["state"] not in ("running", "stopping", "waiting") for job in studio.ask("/api/jobs")["jobs"]),
        "the end of the jobs",
    )


# --- pictures ---------------------------------------------------------------------------------------------------------


def show_new_job(scene: Scene) -> None:
    """The recipe of the package for LoRA, filled in, with its plan for one NPU."""
    scene.open("/#/new?recipe=qwen-lora")
    scene.wait("document.getElementById('f-model')?.value === 'MODEL'")
    for key, value in scene.content["new_job"].items():
        field = scene.find(f"[id='f-{key}']")
        script = "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('change', {bubbles: true}))"
        scene.browser.execute_script(script, field, value)
        scene.wait(f"document.getElementById('recipe').value.includes({json.dumps(value)})")
    scene.browser.execute_script(
        "const one = document.querySelector('#plan select');"
        "one.value = [...one.options].find((each) => each.value.includes(arguments[0])).value;"
        "one.dispatchEvent(new Event('change'));"
        "const text = document.getElementById('recipe');"  # its settings, not the comment above them
        "text.scrollTop = (text.value.split('\\n').findIndex((line) => line.startsWith('model:')) - 1)"
        " * parseFloat(getComputedStyle(text).lineHeight)",
        CHIP,
    )
    scene.wait(f"document.querySelector('#plan .fine')?.innerText.includes('{CHIP}')")


def show_runs(scene: Scene) -> None:
    """Three runs next to each other."""
    keys = {run["name"]: run["id"] for run in scene.studio.ask("/api/runs")["runs"]}
    scene.open(f"/#/runs/{','.join(keys[name] for name in COMPARED)}")
    scene.wait(f"document.querySelectorAll('.plot:not([hidden]) path').length >= {len(COMPARED)}")
    scene.wait("document.querySelector('#comparison table')")


def show_run(scene: Scene) -> None:
    """One training: its curves."""
    keys = {run["name"]: run["id"] for run in scene.studio.ask("/api/runs")["runs"]}
    scene.open(f"/#/runs/{keys[COMPARED[0]]}")
    scene.wait("document.querySelectorAll('.plot:not([hidden]) path').length > 6")


def show_evaluations(scene: Scene) -> None:
    """Two evaluations next to each other."""
    keys = {run["name"]: run["id"] for run in scene.studio.ask("/api/runs")["runs"]}
    scene.open(f"/#/runs/{keys['eval-lr-0.004']},{keys['eval-lr-0.0002']}")
    scene.wait("document.querySelector('#evaluation table')")


def show_queue(scene: Scene) -> None:
    """A running job with its log, one that waits, and those that finished."""
    running = next(job["id"] for job in scene.studio.ask("/api/jobs")["jobs"] if job["state"] == "running")
    scene.open(f"/#/queue/{running}")
    scene.wait("document.getElementById('job-log-text').innerText.split('\\n').length > 8")


def show_chat(scene: Scene) -> None:
    """A prepared conversation with two models."""
    names = [server["name"] for server in scene.studio.ask("/api/servers")["servers"]]
    talk = json.loads(json.dumps(scene.content["talk"][scene.language]))
    for turn in talk["turns"]:
        if turn["role"] == "assistant":
            turn["model"] = names[bool(turn.get("second"))]
    settings = {"model": names[0], "second": names[1]}
    scene.open("/chat")
    scene.browser.execute_script(
        "localStorage.setItem('anabatic.talks', JSON.stringify([arguments[0]]));"
        "localStorage.setItem('anabatic.settings', JSON.stringify(arguments[1]))",
        talk,
        settings,
    )
    scene.open("/chat")
    scene.wait("document.querySelector('#talks .talk')")
    scene.browser.execute_script("document.querySelector('#talks .talk').click()")
    scene.wait("document.querySelectorAll('article').length > 2")
    time.sleep(1.5)  # the libraries load and write the formulas


def show_report(scene: Scene) -> None:
    """The report of a run, as its folder has it."""
    scene.browser.get((scene.home / "runs" / COMPARED[0] / "report.html").as_uri())
    scene.wait("document.querySelector('svg')")


def show_models(scene: Scene) -> None:
    """The models of the runs, two of which answer."""
    scene.open("/#/models")
    scene.wait("document.querySelectorAll('#models tr').length > 3")


SHOTS = (
    Shot("new-job", show_new_job, height=900),
    Shot("runs", show_runs, height=1160),
    Shot("run", show_run, "dark", height=900),
    Shot("evaluations", show_evaluations, height=620),
    Shot("queue", show_queue),
    Shot("models", show_models),
    Shot("chat", show_chat, height=1080),
    Shot("report", show_report, height=900),
)


def start_models(studio: Studio) -> None:
    """Load the models of the chat page."""
    for name in CHAT_MODELS:
        studio.ask("/api/servers/start", {"model": f"runs/{name}/final_model", "name": name})
    wait_until(
        lambda: [server["state"] for server in studio.ask("/api/servers")["servers"]] == ["ready"] * len(CHAT_MODELS),
        "the models",
    )


def find_chromium() -> str:
    """Return the program of the browser; empty: there is none."""
    return shutil.which("chromium") or shutil.which("google-chrome") or ""


@contextmanager
def open_browser(language: str) -> Iterator[Any]:
    """Start a headless Chromium that asks for a language."""
    options = webdriver.ChromeOptions()
    options.binary_location = find_chromium()
    with tempfile.TemporaryDirectory() as profile:
        switches = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-device-scale-factor=1")
        for option in (*switches, f"--user-data-dir={profile}", f"--accept-lang={language}", f"--lang={language}"):
            options.add_argument(option)
        driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
        try:
            yield driver
        finally:
            driver.quit()


def take(scene: Scene, shot: Shot, path: Path) -> None:
    """Write one picture.

    Raises:
        RuntimeError: it has more than MAX_BYTES.
    """
    size = {"width": shot.width, "height": shot.height, "deviceScaleFactor": 1, "mobile": False}
    scene.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = {"prefers-color-scheme": shot.theme, "prefers-reduced-motion": "reduce"}
    media = {"features": [{"name": name, "value": value} for name, value in features.items()]}
    scene.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    shot.prepare(scene)
    scene.browser.execute_script("document.activeElement?.blur?.(); return document.fonts.ready.then(() => true)")
    time.sleep(0.7)
    kind = path.suffix[1:]
    options = {"format": kind, **({"quality": QUALITY} if kind == "webp" else {})}
    picture = base64.b64decode(scene.browser.execute_cdp_cmd("Page.captureScreenshot", options)["data"])
    if kind == "webp" and len(picture) > MAX_BYTES:
        raise RuntimeError(f"{path.name}: {len(picture)} bytes, more than {MAX_BYTES}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(picture)
    print(f"{path}: {len(picture) / 1000:.0f} kB", file=sys.stderr)


def find_missing() -> str:
    """Return why no picture can be made, with what to install; empty: everything is there."""
    debian = "on Debian and Ubuntu: sudo apt-get install"
    if not find_chromium():
        return (
            f"error: neither chromium nor google-chrome is in PATH\nhint: install it, {debian} chromium chromium-driver"
        )
    if not shutil.which("chromedriver"):
        return f"error: chromedriver is not in PATH\nhint: install it, {debian} chromium-driver"
    fonts = shutil.which("fc-list")
    if fonts and not subprocess.run([fonts, ":lang=zh-cn"], capture_output=True, check=False).stdout.strip():
        return f"error: no font has Chinese characters\nhint: install one, {debian} fonts-noto-cjk"
    fetch = "scripts/fetch_web_libraries.py"
    if subprocess.run([sys.executable, ROOT / fetch, "--check"], capture_output=True, check=False).returncode:
        return f"error: the chat page has no libraries for formulas and tables\nhint: run python {fetch}; it needs npm"
    return ""


def main() -> None:
    """Write the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(shot.name for shot in SHOTS))
    parser.add_argument("--to", type=Path, help="folder for them instead of docs/LANGUAGE/assets")
    parser.add_argument("--format", choices=("webp", "png"), default="webp")
    options = parser.parse_args()
    if missing := find_missing():
        sys.exit(missing)
    if unknown := set(options.names) - {shot.name for shot in SHOTS}:
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(shot.name for shot in SHOTS)}")
    shots = [shot for shot in SHOTS if not options.names or shot.name in options.names]
    content = json.loads(json.dumps(yaml.safe_load(CONTENT.read_text(encoding="utf-8"))))  # without shared parts
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        write_home(home, content)
        with run_studio(home) as studio:
            try:
                train(studio, content)
                start_models(studio)
                for code, language in LANGUAGES.items():
                    target = options.to / code if options.to else ROOT / "docs" / code / "assets"
                    with open_browser(language) as browser:
                        for shot in shots:
                            scene = Scene(browser, studio, home, code, content)
                            take(scene, shot, target / f"screen-{shot.name}.{options.format}")
            finally:
                end_jobs(studio)


if __name__ == "__main__":
    main()
