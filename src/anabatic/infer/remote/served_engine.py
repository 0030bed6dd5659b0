"""Inference servers in the place of the engine of this process: several share the questions, and one that dies is left
out until it answers again with the current weights."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any

from anabatic.config.chat import Sampling
from anabatic.core import log
from anabatic.core.errors import DataError, Failure
from anabatic.infer.remote.inference_servers import InferenceServer, InterruptedAnswer, ServedAnswer
from anabatic.infer.remote.json_client import RequestFailure
from anabatic.infer.request import Completion
from anabatic.infer.text_stream import decode_tokens

_POLL_SECONDS = 0.5
"""Seconds of a step in which nothing is finished."""
_PATIENCE_SECONDS = 600.0
"""Seconds without any server that answers, after which the training ends: a server that restarts loads for minutes."""
_RETURN_SECONDS = 5.0
"""Seconds between two questions whether a server answers again."""


@dataclass(eq=False)
class ServedRequest:
    """A prompt on its way. `salt`, by which the engine of this process shares prompts, is not sent."""

    prompt: list[int]
    sampling: Sampling
    salt: bytes = b""
    finish_reason: str = ""


class ServerPool:
    """Servers and which of them answer.

    Args:
        stop_ids: tokens that end an answer.

    Attributes:
        restore: gives a server that has come back the current weights, and has it prove that it answers with them.
        keep_running: starts a server again that this process has started and that has ended; called by the thread that
            starts all of them.
    """

    def __init__(self, servers: Sequence[InferenceServer], stop_ids: Iterable[int]) -> None:
        self.servers = list(servers)
        self.restore: Callable[[InferenceServer], None] = lambda server: None
        self.keep_running: Callable[[], None] = lambda: None
        self.stop_ids = sorted(stop_ids)
        self._lock = threading.Lock()
        self._busy = dict.fromkeys(self.servers, 0)
        self._lost: dict[InferenceServer, float] = {}
        self._reasons: dict[InferenceServer, str] = {}

    @property
    def answering(self) -> list[InferenceServer]:
        """Those that are not left out."""
        return [server for server in self.servers if server not in self._lost]

    def generate(self, prompt: list[int], sampling: Sampling, has_given_up: Callable[[], bool]) -> ServedAnswer:
        """Ask the server that has the least to do; another one where it is lost.

        Raises:
            Failure: no server has answered for ten minutes, or the caller has given up.
        """
        last, since = "", time.monotonic()
        while not has_given_up() and time.monotonic() - since < _PATIENCE_SECONDS:
            self._take_back()
            server = self._choose()
            if server is None:
                last = "; ".join(self._reasons.values()) or last
                time.sleep(_POLL_SECONDS)
                continue
            try:
                return server.generate(prompt, sampling, self.stop_ids)
            except InterruptedAnswer as error:
                last = str(error)
                time.sleep(_POLL_SECONDS)
            except RequestFailure as error:
                if not error.is_temporary:
                    raise
                last, since = str(error), time.monotonic()
                self.leave_out(server, last)
            finally:
                with self._lock:
                    self._busy[server] -= 1
        raise Failure(f"no server answers: {last or 'given up'}", "look whether the servers of --rollout.url run")

    def wait_for_one(self) -> None:
        """Wait until a server answers.

        Raises:
            Failure: none has for ten minutes.
        """
        since = time.monotonic()
        while not self.answering:
            if time.monotonic() - since > _PATIENCE_SECONDS:
                reasons = "; ".join(self._reasons.values())
                raise Failure(f"no server answers: {reasons}", "look whether the servers of --rollout.url run")
            time.sleep(_POLL_SECONDS)
            self.keep_running()
            self._take_back()

    def leave_out(self, server: InferenceServer, why: str) -> None:
        """Ask a server nothing until it answers again."""
        with self._lock:
            if server not in self._lost:
                log.warn(f"{server.url} is left out until it answers again: {why}")
                self._reasons[server] = why
                self._lost[server] = time.monotonic() + _RETURN_SECONDS

    def _choose(self) -> InferenceServer | None:
        with self._lock:
            live = self.answering
            if not live:
                return None
            server = min(live, key=lambda one: self._busy[one])
            self._busy[server] += 1
            return server

    def _take_back(self) -> None:
        """Take a server back that answers again, once it has the current weights."""
        with self._lock:
            due = [server for server, at in self._lost.items() if time.monotonic() >= at][:1]
            for server in due:
                self._lost[server] = float("inf")  # no other thread asks it meanwhile
        for server in due:
            try:
                server.require_ready()
                self.restore(server)
            except RequestFailure as error:
                why, self._lost[server] = str(error), time.monotonic() + _RETURN_SECONDS
                if why != self._reasons.get(server):
                    log.warn(f"{server.url} is still left out: {why}")
                    self._reasons[server] = why
                continue
            with self._lock:
                del self._lost[server], self._reasons[server]
            log.info(f"{server.url} answers again")


class ServedEngine:
    """What `RolloutGenerator` needs of an engine, done by servers.

    Args:
        max_len: tokens of a prompt and its answer together at most.
        concurrency: requests under way at a time.
    """

    def __init__(self, pool: ServerPool, tokenizer: Any, max_len: int, concurrency: int) -> None:
        self.tokenizer, self.max_len = tokenizer, max_len
        self._pool, self._executor = pool, ThreadPoolExecutor(concurrency)
        self._pending: dict[Future[ServedAnswer], ServedRequest] = {}
        self._answers: dict[ServedRequest, ServedAnswer] = {}
        self._is_cancelled = False

    def request(
        self, prompt: Sequence[int], sampling: Sampling, name: str = "the prompt", pictures: object = None
    ) -> ServedRequest:
        """Check a prompt and return its request, not yet submitted.

        Raises:
            DataError: it leaves no room for an answer.
        """
        room = self.max_len - len(prompt)
        if room < 1:
            what = f"{name} has {len(prompt)} tokens; with an answer at most {self.max_len} fit"
            raise DataError(what, f"shorten it to {self.max_len - 1} tokens or fewer")
        return ServedRequest(list(prompt), replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room)))

    def submit(self, requests: Iterable[ServedRequest]) -> None:
        """Send requests, `concurrency` of them at a time."""
        for request in requests:
            asked = self._executor.submit(self._pool.generate, request.prompt, request.sampling, self._has_given_up)
            self._pending[asked] = request

    def step(self) -> list[ServedRequest]:
        """Wait a moment for answers; return the requests that finished.

        Raises:
            Failure: no server answers.
        """
        self._pool.keep_running()
        done, _ = wait(self._pending, _POLL_SECONDS, FIRST_COMPLETED)
        finished = []
        for future in done:
            request = self._pending.pop(future)
            answer = self._answers[request] = future.result()
            request.finish_reason = answer.finish_reason
            finished.append(request)
        return finished

    def get_completion(self, request: ServedRequest) -> Completion:
        """Return the answer of a finished request."""
        answer = self._answers.pop(request)
        ended_by_id = answer.ids[-1] in self._pool.stop_ids
        text = decode_tokens(self.tokenizer, answer.ids[:-1] if ended_by_id else answer.ids)
        if answer.finish_reason == "stop":
            found = [at for stop in request.sampling.stop if (at := text.find(stop)) >= 0]
            text = text[: min(found)] if found else text
        return Completion(answer.ids, text, answer.finish_reason, answer.logprobs, chosen=[1] * len(answer.ids))

    def cancel_requests(self, requests: Iterable[ServedRequest]) -> None:
        """Wait for nobody any more."""
        self._is_cancelled = bool(self._pending)
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._pending.clear()

    def _has_given_up(self) -> bool:
        return self._is_cancelled
