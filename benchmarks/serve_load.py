"""Does a server stand a thousand requests of clients that behave badly?

    python benchmarks/serve_load.py [--requests N] [--clients N] [--seed S] [--json FILE]

A real `anabatic serve` process with a tiny random model. Clients ask at the same time: most behave, others leave in the
middle of an answer, send bodies that are torn or wrong or too large, prompts that are too long, or read slowly. Every
answer, also the part that a leaving client saw, is compared with what a lone engine makes of the same prompt and seed.
At the end the server must live, hold nothing for anybody, and take as much memory as after the first part.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import torch

from anabatic.config.chat import Sampling
from anabatic.data.tokenizer.hf_folder import encode_chat
from anabatic.infer.engine import Engine
from anabatic.models.pretrained import load_model, save_model
from anabatic_testing.random_models import build_byte_tokenizer, build_random_model
from option_types import positive_int

CHAT = "/v1/chat/completions"
CONTEXT = 128
PARTS = 10
"""The memory of the server is looked at after each part of the requests."""
WRONG: tuple[tuple[bytes, int], ...] = (
    (b"", 400),
    (b"{", 400),
    (b"\xff\xfe\x00", 400),
    (b'{"messages": 5}', 400),
    (b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}', 400),
    (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": -1}', 400),
    (b'{"messages": [{"role": "user", "content": "x"}], "model": "nobody"}', 404),
    (b'{"messages": [{"role": "user", "content": "x"}], "unknown": 1}', 400),
    (b"[" * 50_000, 400),
)
"""Bodies, and the status that they deserve."""


@dataclass
class Question:
    """A request, and the answer that a lone engine gives."""

    body: dict[str, Any]
    expected: str = ""


@dataclass
class Tally:
    """What happened."""

    kinds: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def check(self, right: bool, fault: str) -> None:
        if not right:
            self.faults.append(fault)


def questions_of(count: int, rng: random.Random) -> list[Question]:
    """Requests of mixed lengths: greedy, drawn, with and without a template's room for long answers."""
    made = []
    for number in range(count):
        words = " ".join(rng.choice(["rain", "wind", "the", "你好", "an", "3"]) for _ in range(rng.randint(1, 12)))
        body = {"messages": [{"role": "user", "content": f"{number} {words}"}], "max_tokens": rng.randint(1, 40)}
        body |= {"temperature": 0} if number % 2 else {"temperature": 1, "top_k": 20, "seed": number}
        made.append(Question(body))
    return made


def answer_alone(questions: list[Question], folder: Path, tokenizer: Any) -> None:
    """Write down what an engine answers that has one request at a time."""
    engine = Engine(load_model(folder, torch.device("cpu"), torch.float32), tokenizer, max_batch=1, max_len=CONTEXT)
    for question in questions:
        body = question.body
        ids = encode_chat(tokenizer, body["messages"])
        drawn = {"temperature": float(body["temperature"]), "seed": body.get("seed"), "top_k": body.get("top_k", 50)}
        question.expected = engine.generate([ids], Sampling(max_new_tokens=body["max_tokens"], **drawn))[0].text


class Client:
    """Asks in every way that clients ask."""

    def __init__(self, url: str, questions: list[Question], rng: random.Random, tally: Tally) -> None:
        self._http = httpx2.AsyncClient(base_url=url, timeout=120, limits=httpx2.Limits(max_connections=None))
        self._place = url.removeprefix("http://").split(":")
        self._questions, self._rng, self._tally = questions, rng, tally
        self.ways: dict[str, tuple[int, Callable[[Question], Awaitable[None]]]] = {
            "whole": (40, self.whole),
            "streamed": (20, self.streamed),
            "left in the middle": (10, self.left_in_the_middle),
            "left while waiting": (5, self.left_while_waiting),
            "read slowly": (5, self.read_slowly),
            "malformed": (8, self.malformed),
            "prompt too long": (4, self.prompt_too_long),
            "body too large": (3, self.body_too_large),
            "torn": (5, self.torn),
        }

    async def ask(self) -> None:
        """One request in a way drawn by lot."""
        name = self._rng.choices(list(self.ways), [share for share, _ in self.ways.values()])[0]
        self._tally.kinds[name] += 1
        start = time.monotonic()
        try:
            await self.ways[name][1](self._rng.choice(self._questions))
        except httpx2.HTTPError as error:
            self._tally.faults.append(f"{name}: {type(error).__name__} {error}")
        self._tally.seconds.append(time.monotonic() - start)

    async def close(self) -> None:
        await self._http.aclose()

    async def whole(self, question: Question) -> None:
        answer = await self._http.post(CHAT, json=question.body)
        text = answer.json()["choices"][0]["message"]["content"] if answer.status_code == 200 else answer.text
        self._tally.check(text == question.expected, f"whole: {answer.status_code} {text!r}, not {question.expected!r}")

    async def streamed(self, question: Question) -> None:
        text = await self._stream(question, None, 0.0)
        self._tally.check(text == question.expected, f"streamed: {text!r}, not {question.expected!r}")

    async def left_in_the_middle(self, question: Question) -> None:
        text = await self._stream(question, self._rng.randint(1, 6), 0.0)
        self._tally.check(question.expected.startswith(text), f"left: {text!r} begins no {question.expected!r}")

    async def read_slowly(self, question: Question) -> None:
        text = await self._stream(question, None, 0.03)
        self._tally.check(text == question.expected, f"read slowly: {text!r}, not {question.expected!r}")

    async def _stream(self, question: Question, most: int | None, pause: float) -> str:
        """The text of a stream.

        Args:
            most: chunks after which the client leaves.
            pause: seconds between two looks at what has come.
        """
        text, chunks = "", 0
        async with self._http.stream("POST", CHAT, json=question.body | {"stream": True}) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    choice = json.loads(line.removeprefix("data: "))["choices"][0]
                    text += choice["delta"].get("content") or ""
                    chunks += 1
                    await asyncio.sleep(pause)
                if chunks == most:
                    break
        return text

    async def left_while_waiting(self, question: Question) -> None:
        body = json.dumps(question.body).encode()
        await self._raw(body, len(body), self._rng.uniform(0, 0.2))

    async def torn(self, question: Question) -> None:
        body = json.dumps(question.body).encode()
        await self._raw(body[: len(body) // 2], len(body), self._rng.uniform(0, 0.2))

    async def _raw(self, body: bytes, length: int, wait: float) -> None:
        """Send some bytes, wait, and hang up."""
        _, writer = await asyncio.open_connection(self._place[0], int(self._place[1]))
        writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode() + body)
        await asyncio.sleep(wait)
        writer.close()

    async def malformed(self, _: Question) -> None:
        body, status = self._rng.choice(WRONG)
        await self._refused(body, status)

    async def prompt_too_long(self, question: Question) -> None:
        body = question.body | {"messages": [{"role": "user", "content": "x " * 500}]}
        await self._refused(json.dumps(body).encode(), 400)

    async def body_too_large(self, _: Question) -> None:
        await self._refused(b" " * (2**20 + 1), 413)

    async def _refused(self, body: bytes, status: int) -> None:
        answer = await self._http.post(CHAT, content=body, headers={"Content-Type": "application/json"})
        shaped = set(answer.json().get("error", ())) == {"message", "type", "param", "code"}
        self._tally.check(answer.status_code == status and shaped, f"{body[:60]!r}: {answer.status_code} {answer.text}")


def resident(pid: int) -> float:
    """MiB of a process that lie in memory."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1024


async def crowd(url: str, questions: list[Question], args: argparse.Namespace, pid: int, tally: Tally) -> list[float]:
    """Ask everything; return the server's memory after each part."""
    clients = [Client(url, questions, random.Random(f"{args.seed} {n}"), tally) for n in range(args.clients)]
    memory = []
    for part in range(PARTS):
        left = args.requests // PARTS + (part < args.requests % PARTS)

        async def work(client: Client) -> None:
            nonlocal left
            while left > 0:
                left -= 1
                await client.ask()

        await asyncio.gather(*map(work, clients))
        memory.append(resident(pid))
    await asyncio.gather(*(client.close() for client in clients))
    return memory


def held(url: str) -> dict[str, float]:
    """What the server still does for anybody, by its own figures; clients that left are found at the next token."""
    names = ("num_requests_running", "num_requests_waiting", "cache_blocks_used")
    figures: dict[str, float] = {}
    for _ in range(100):
        text = httpx2.get(f"{url}/metrics").text
        figures = {name: float(re.findall(rf"anabatic_{name}{{[^}}]*}} (\S+)", text)[0]) for name in names}
        if not any(figures.values()):
            break
        time.sleep(0.1)
    return figures


def report(tally: Tally, memory: list[float], figures: dict[str, float], seconds: float, log: str) -> dict[str, Any]:
    """Print what happened, and return it."""
    print(
        f"{sum(tally.kinds.values())} requests in {seconds:.1f} s: "
        + ", ".join(f"{count} {name}" for name, count in tally.kinds.most_common())
    )
    print(f"  wrong: {len(tally.faults)}" + "".join(f"\n    {fault[:300]}" for fault in tally.faults[:10]))
    print(f"  left behind: {figures}; lines of the log: {len(log.splitlines())}")
    print("  memory after each tenth, MiB: " + " ".join(f"{one:.1f}" for one in memory))
    print(f"  from the second tenth to the last: {memory[-1] - memory[1]:+.1f} MiB")
    return {
        "kinds": dict(tally.kinds),
        "faults": tally.faults,
        "held": figures,
        "memory_mib": memory,
        "seconds": seconds,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=positive_int, default=1000)
    parser.add_argument("--clients", type=positive_int, default=64)
    parser.add_argument("--questions", type=positive_int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "tiny"
        tokenizer = build_byte_tokenizer(Path(scratch) / "tokenizer")
        save_model(build_random_model(len(tokenizer)), folder, tokenizer)
        questions = questions_of(args.questions, random.Random(args.seed))
        answer_alone(questions, folder, tokenizer)
        words = ["serve", str(folder), "--port", "0", "--limits.body-mib", "1", "--batching.batch", "16"]
        with (Path(scratch) / "log").open("w+", encoding="utf-8") as log:
            server = subprocess.Popen(
                [sys.executable, "-m", "anabatic", *words],
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            try:
                url = _address(server, Path(log.name))
                tally, start = Tally(), time.monotonic()
                memory = asyncio.run(crowd(url, questions, args, server.pid, tally))
                seconds, figures = time.monotonic() - start, held(url)
                alive = httpx2.get(f"{url}/health").status_code == 200 and server.poll() is None
            finally:
                server.terminate()
                server.wait(timeout=60)
            said = Path(log.name).read_text(encoding="utf-8")
    found = report(tally, memory, figures, seconds, said) | {"alive": alive, "exit_code": server.returncode}
    print(f"  alive to the end: {alive}, exit code {server.returncode}")
    if "Traceback" in said:
        print(said)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0 if alive and not tally.faults and not any(figures.values()) and "Traceback" not in said else 1


def _address(server: subprocess.Popen[bytes], log: Path) -> str:
    """Wait for the line that says where it answers."""
    while server.poll() is None:
        found = re.findall(r"http://[\d.:]+", log.read_text(encoding="utf-8"))
        if found:
            return str(found[0])
        time.sleep(0.1)
    raise SystemExit(log.read_text(encoding="utf-8"))


if __name__ == "__main__":
    sys.exit(main())
