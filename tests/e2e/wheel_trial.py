"""What a user of the wheel does with Python and a browser: `python wheel_trial.py FOLDER`, JSON on stdout.

Needs nothing of the tests, so that it also runs in an environment that holds the wheel and the extra `serve` alone. The
commands that need no extra are in `bare.py`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIZES = {
    "schedule": {"max_steps": 3},
    "batch": {"seq_len": 64, "micro_batch_tokens": 128, "global_batch_tokens": 256},
    "device": {"type": "cpu", "threads": 1},
}
TOKEN = "of-the-trial"
LOGIN = {"Authorization": f"Bearer {TOKEN}"}
SCRIPTS = re.compile(r'<script src="([^"]+)"')


class StepCounter:
    """A callback."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_step(self, step: int, row: dict[str, Any]) -> None:
        """Note a step that was logged."""
        self.steps.append(step)


def train_in_python() -> dict[str, Any]:
    """Fine-tune twice in three lines, ask the model, compare the runs on one page."""
    sys.path.append(str(Path(__file__).resolve().parents[2] / "src"))  # behind the wheel's own packages
    import anabatic
    from anabatic_testing.tiny_models import save_tiny_chat_model

    save_tiny_chat_model(Path())
    Path("model").rename("MODEL")
    rows = [{"query": f"the wind {number}", "response": "moves upward"} for number in range(60)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    counter = StepCounter()
    first = anabatic.sft(model="MODEL", data="rows.jsonl", tuner="lora", out="runs/one", callbacks=[counter], **SIZES)
    second = anabatic.sft(model="MODEL", data="rows.jsonl", out="runs/two", **SIZES)
    answer = second.chat("the wind 1")
    report = subprocess.run(
        [sys.executable, "-m", "anabatic", "report", "runs/one", "runs/two", "--out", "compared.html"],
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "steps": counter.steps,
        "losses": [row["loss"] for row in first.metrics if "loss" in row],
        "answer": answer,
        "compared": Path("compared.html").read_text(encoding="utf-8")[:15] if report.returncode == 0 else report.stderr,
    }


def visit(words: list[str], paths: list[str], use: Callable[[str], Any]) -> dict[str, Any]:
    """Start a server, fetch its pages and the programs that they name, use its API, stop it."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    line = [sys.executable, "-m", "anabatic", *words, "--port", str(port)]
    variables = {**os.environ, "ANABATIC_STUDIO_TOKEN": TOKEN}
    pages: dict[str, int] = {}
    with open("server.log", "w+", encoding="utf-8") as log:
        server = subprocess.Popen(line, stdout=log, stderr=log, env=variables)
        try:
            for path in paths:
                pages[path], text = fetch(f"http://127.0.0.1:{port}/{path}", server)
                for script in SCRIPTS.findall(text):
                    pages[script.rsplit("/", 1)[-1]] = fetch(f"http://127.0.0.1:{port}/{script}", server)[0]
            used = use(f"http://127.0.0.1:{port}") if server.poll() is None else None
            server.send_signal(signal.SIGTERM)
            code = server.wait(60)
        finally:
            server.kill()
        log.seek(0)
        return {"pages": pages, "used": used, "code": code, "log": log.read()[-2000:]}


def send(address: str, body: dict[str, Any] | None = None) -> Any:
    """Return the JSON of an answer; `body` is posted."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, data, {"Content-Type": "application/json", **LOGIN})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def ask(address: str) -> Any:
    """Return the finish reason of a chat."""
    messages = [{"role": "user", "content": "the wind 1"}]
    answer = send(f"{address}/v1/chat/completions", {"model": "MODEL", "messages": messages, "max_tokens": 4})
    return answer["choices"][0]["finish_reason"]


def queue_job(address: str) -> Any:
    """Train from the studio's form; return the job's state and the log's end."""
    text = json.dumps({"model": "MODEL", "data": {"train": ["rows.jsonl"]}, "out": "runs/three", **SIZES})
    job = send(f"{address}/api/jobs", {"command": "sft", "text": text, "name": "three"})["id"]
    for _ in range(1200):
        row = next(row for row in send(f"{address}/api/jobs")["jobs"] if row["id"] == job)
        if row["state"] not in ("queued", "running"):
            break
        time.sleep(0.1)
    return [row["state"], send(f"{address}/api/jobs/{job}/log")["text"][-1000:]]


def fetch(address: str, server: subprocess.Popen[bytes]) -> tuple[int, str]:
    """Return status and text; waits for a server that is starting."""
    for _ in range(1200):
        try:
            with urllib.request.urlopen(urllib.request.Request(address, headers=LOGIN), timeout=60) as answer:
                return int(answer.status), answer.read().decode("utf-8")
        except urllib.error.HTTPError as error:
            with error:
                return error.code, ""
        except OSError:
            if server.poll() is not None:
                return 0, ""
            time.sleep(0.1)
    return 0, ""


def main(folder: str) -> None:
    """Try everything, and print what came of it."""
    os.chdir(folder)
    found = {"package": __import__("anabatic").__file__, "python": train_in_python()}
    found["serve"] = visit(["serve", "MODEL", "--device.type", "cpu"], ["", "v1/models", "health"], ask)
    found["studio"] = visit(["studio", "runs"], ["", "chat", "api/runs", "api/form?command=sft"], queue_job)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
