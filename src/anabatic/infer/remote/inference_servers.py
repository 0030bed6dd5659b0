"""Inference servers that answer for the model being trained: vLLM and SGLang, over HTTP alone.

Routes and fields: vLLM 0.23.0 and 0.33.0 (vllm/entrypoints/openai, vllm/entrypoints/serve), vllm-ascend 0.23, SGLang
0.5.23 (sglang/srt/entrypoints/http_server.py). Whether a server has a route is learned by asking it: what answers 404
and can be done without, is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from anabatic.config.chat import Sampling
from anabatic.core.errors import BROKEN_DATA_ERRORS, ConfigError
from anabatic.infer.remote.json_client import JsonClient, RequestFailure

_CACHE_WAITS = (0.1, 0.5, 2.0, 8.0)
"""Seconds before the cache is emptied once more: vLLM refuses while a request still holds a block."""
_NEVER_REPEATED: tuple[float, ...] = ()
_READY_SECONDS = 10.0
"""Seconds in which a server says that it is there."""


@dataclass(frozen=True)
class ServedAnswer:
    """An answer of a server.

    Attributes:
        ids: its tokens, the one that ended it included.
        logprobs: of each token, as the server had it.
        finish_reason: `stop` or `length`.
    """

    ids: list[int]
    logprobs: list[float]
    finish_reason: str


class MissingRoute(ConfigError):
    """A server has not been started so that it can load what it is given."""


class InterruptedAnswer(Exception):
    """The server gave an answer up, because it was paused or ended: it is asked for again."""


class InferenceServer(Protocol):
    """A server that holds a copy of the model.

    Attributes:
        adapter: name of the adapter that answers; empty: the model itself does.
        version: of its weights, as it names it in its answers; empty: it does not.
        temperature_hint: how it is started so that log-probabilities are those at the temperature of the draws.
    """

    url: str
    adapter: str
    version: str
    temperature_hint: str

    def require_ready(self) -> None:
        """Raise `RequestFailure` if it does not answer."""

    def generate(self, prompt: list[int], sampling: Sampling, stop_ids: list[int]) -> ServedAnswer:
        """Return the answer to a prompt of tokens.

        Raises:
            RequestFailure: it does not answer.
            InterruptedAnswer: it gave the answer up.
            ConfigError: it answers without tokens or log-probabilities.
        """

    def load_weights(self, folder: Path, version: int) -> None:
        """Replace the weights by those of a folder that the server sees under the same path.

        Raises:
            RequestFailure: it does not answer, or cannot load them.
            MissingRoute: it has no route for that.
        """

    def load_adapter(self, folder: Path, name: str) -> None:
        """Answer with an adapter of this name from now on. Raises as `load_weights` does.

        The name that it has already: the server may have lost it, or somebody else has given it back.
        """

    def list_checksums(self) -> dict[str, str]:
        """Return name -> dtype and SHA-256 of each weight, as `weight_loading.describe_tensor`; empty: it cannot tell.

        Raises:
            RequestFailure: it does not answer.
        """


class VllmServer:
    """vLLM's OpenAI-compatible server, with the routes of its development mode."""

    temperature_hint = "start vLLM with --logprobs-mode processed_logprobs"
    _weights_hint = "start it with VLLM_SERVER_DEV_MODE=1 in its environment, or use --tuner lora"
    _adapter_hint = "start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, `--enable-lora --max-lora-rank R`"

    def __init__(self, url: str) -> None:
        self.url = url
        self._client, self._commands = JsonClient(url, (1.0,)), JsonClient(url, _NEVER_REPEATED)
        self._base = self.adapter = self.version = ""

    def require_ready(self) -> None:
        """Ask for the name of its model; a server without that route answers for the one it has."""
        try:
            told = JsonClient(self.url, timeout=_READY_SECONDS).get("/v1/models")
        except RequestFailure as error:
            if error.status != 404:
                raise
            return
        try:
            self._base = str(told["data"][0]["id"])
        except BROKEN_DATA_ERRORS as error:
            raise _make_stranger_error(self.url, "/v1/models", told) from error

    def generate(self, prompt: list[int], sampling: Sampling, stop_ids: list[int]) -> ServedAnswer:
        """Ask `/v1/completions` with tokens, for tokens and the log-probability of each."""
        model = self.adapter or self._base
        body = {
            **({"model": model} if model else {}),
            "prompt": prompt,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or 0,
            "seed": sampling.seed,
            "stop": sampling.stop,
            "stop_token_ids": stop_ids,
            "logprobs": 0,
            "return_token_ids": True,
            **({"return_weight_versions": True} if self.version else {}),
        }
        try:
            told = self._client.post("/v1/completions", body)
        except RequestFailure as error:
            if error.status == 404 and self.adapter:  # it has been restarted
                raise RequestFailure(f"{self.url} has lost the adapter {model}", error.hint) from error
            raise
        try:
            choice = told["choices"][0]
            if choice["finish_reason"] not in ("stop", "length"):
                raise InterruptedAnswer(f"{self.url} ended an answer by {choice['finish_reason']}")
            if self.version and choice["weight_versions"][0]["version"] != self.version:
                raise _make_lost_error(self.url)
            ids, logprobs = choice["token_ids"], (choice["logprobs"] or {}).get("token_logprobs")
        except BROKEN_DATA_ERRORS as error:
            raise _make_stranger_error(self.url, "/v1/completions", told) from error
        return _check_answer(self.url, ids, logprobs, choice["finish_reason"])

    def load_weights(self, folder: Path, version: int) -> None:
        """Reload the weights of all workers (`/collective_rpc`), and forget the keys and values of the old ones."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        with self._paused():
            self._command("/collective_rpc", body, self._weights_hint)
            self._empty_cache()

    def load_adapter(self, folder: Path, name: str) -> None:
        """Load it, then drop the one before.

        With a name that is used again, vLLM 0.23 reads the folder at every request (prime-rl works around the same).
        """
        before, body = self.adapter, {"lora_name": name, "lora_path": str(folder)}
        try:
            self._command("/v1/load_lora_adapter", body, self._adapter_hint)
        except RequestFailure as error:
            if name != before or error.status != 400 or "already" not in error.said:
                raise
        self.adapter = name
        if before not in ("", name):
            _ask_if_known(lambda: self._commands.post("/v1/unload_lora_adapter", {"lora_name": before}), (400, 404))

    def list_checksums(self) -> dict[str, str]:
        """Nothing: `/weight_checker` of 0.33 hashes in a way of its own."""
        return {}

    def _command(self, path: str, body: dict[str, Any], remedy: str) -> None:
        try:
            self._commands.post(path, body)
        except RequestFailure as error:
            if error.status in (404, 405):
                raise MissingRoute(f"{self.url} has no {path}: it cannot load new weights", remedy) from error
            raise

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """No answer begins under one set of weights and ends under another."""
        has_pause = _ask_if_known(lambda: self._commands.post("/pause?mode=abort"))
        try:
            yield
        finally:
            if has_pause:
                self._commands.post("/resume")

    def _empty_cache(self) -> None:
        for wait in (*_CACHE_WAITS, None):
            told: Any = None

            def ask() -> None:
                nonlocal told
                told = self._commands.post("/reset_prefix_cache")

            known = _ask_if_known(ask)
            if not known or not isinstance(told, dict) or told.get("success") is not False:
                return
            if wait is None:
                raise RequestFailure(
                    f"{self.url} does not empty its prefix cache", "restart it: a request holds blocks"
                )
            time.sleep(wait)


class AnabaticServer(VllmServer):
    """`anabatic serve`, which speaks vLLM's routes."""

    temperature_hint = "start anabatic serve with --scaled-logprobs"
    _weights_hint = _adapter_hint = "start anabatic serve with --weights-folder FOLDER and an API key"

    def load_weights(self, folder: Path, version: int) -> None:
        """Load them, and ask what they are called: a server that is started again has another name for its weights."""
        super().load_weights(folder, version)
        self.version = str(self._commands.get("/weight_info")["weight_version"])

    def list_checksums(self) -> dict[str, str]:
        """Ask `/weight_checker`."""
        told: dict[str, str] = self._commands.post("/weight_checker", {"action": "checksum"})["checksums"]
        return told


class SglangServer:
    """SGLang's own routes."""

    temperature_hint = "have SGLang report log-probabilities at the temperature"

    def __init__(self, url: str) -> None:
        self.url = url
        self._client, self._commands = JsonClient(url, (1.0,)), JsonClient(url, _NEVER_REPEATED)
        self.adapter = self.version = ""

    def require_ready(self) -> None:
        """Ask for what it knows of its model."""
        told = JsonClient(self.url, timeout=_READY_SECONDS).get("/model_info")
        if not isinstance(told, dict) or "model_path" not in told:
            raise _make_stranger_error(self.url, "/model_info", told)

    def generate(self, prompt: list[int], sampling: Sampling, stop_ids: list[int]) -> ServedAnswer:
        """Ask `/generate`; tokens are those of the triples of log-probability, token and text."""
        limits = {
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "stop": sampling.stop,
            "stop_token_ids": stop_ids,
            "sampling_seed": None if sampling.seed is None else sampling.seed % 2**31,
        }
        body = {
            "input_ids": prompt,
            "sampling_params": limits,
            "return_logprob": True,
            "lora_path": self.adapter or None,
        }
        told = self._client.post("/generate", body)
        try:
            reason = told["meta_info"]["finish_reason"]["type"]
            if reason not in ("stop", "length"):
                raise InterruptedAnswer(f"{self.url} ended an answer by {reason}")
            if self.version and told["meta_info"]["weight_version"] != self.version:
                raise _make_lost_error(self.url)
            triples = told["meta_info"]["output_token_logprobs"]
            ids, logprobs = [one[1] for one in triples], [one[0] for one in triples]
        except BROKEN_DATA_ERRORS as error:
            raise _make_stranger_error(self.url, "/generate", told) from error
        return _check_answer(self.url, ids, logprobs, reason)

    def load_weights(self, folder: Path, version: int) -> None:
        """Reload the weights from a folder and forget the keys and values of the old ones."""
        name = f"{version}-{time.time_ns():x}"
        body = {"model_path": str(folder), "flush_cache": True, "weight_version": name, "abort_all_requests": True}
        self._require_success("/update_weights_from_disk", body, "message")
        self.version = name

    def load_adapter(self, folder: Path, name: str) -> None:
        """Load it, then drop the one before."""
        before, body = self.adapter, {"lora_name": name, "lora_path": str(folder)}
        try:
            self._require_success("/load_lora_adapter", body, "error_message")
        except RequestFailure as error:
            if name != before or "already" not in error.said:
                raise
        self.adapter = name
        if before not in ("", name):
            _ask_if_known(lambda: self._commands.post("/unload_lora_adapter", {"lora_name": before}), (400, 404))

    def list_checksums(self) -> dict[str, str]:
        """Nothing: `/weights_checker` hashes in a way of its own."""
        return {}

    def _require_success(self, path: str, body: dict[str, Any], reason: str) -> None:
        try:
            told = self._commands.post(path, body)
        except RequestFailure as error:
            if error.status in (404, 405):
                raise MissingRoute(f"{self.url} has no {path}", "use SGLang 0.5 or newer") from error
            raise
        if not isinstance(told, dict) or told.get("success") is not True:
            said = told.get(reason) if isinstance(told, dict) else told
            what = f"{self.url}{path} failed: {str(said)[:300]}"
            raise RequestFailure(what, "look at the log of the server", said=str(said)[:300])


SERVERS: dict[str, Callable[[str], InferenceServer]] = {
    "vllm": VllmServer,
    "sglang": SglangServer,
    "anabatic": AnabaticServer,
}
"""Name in the settings -> what speaks to it."""


def _ask_if_known(ask: Callable[[], object], unknown: tuple[int, ...] = (404, 405)) -> bool:
    """Ask, and return False where the server has no such route."""
    try:
        ask()
    except RequestFailure as error:
        if error.status not in unknown:
            raise
        return False
    return True


def _make_lost_error(url: str) -> RequestFailure:
    return RequestFailure(f"{url} answers with other weights than it was given", "was it restarted?")


def _make_stranger_error(url: str, path: str, told: object) -> ConfigError:
    return ConfigError(
        f"{url}{path} answers in another form than expected: {str(told)[:200]}",
        "is --rollout.engine the server's kind?",
    )


def _check_answer(url: str, ids: Any, logprobs: Any, reason: str) -> ServedAnswer:
    """Return an answer whose tokens and log-probabilities are numbers, equally many and at least one."""
    sound = isinstance(ids, list) and isinstance(logprobs, list) and len(ids) == len(logprobs) > 0
    if (
        not sound
        or not all(type(one) is int for one in ids)
        or not all(isinstance(one, float | int) for one in logprobs)
    ):
        what = f"{url} answers with {len(ids) if isinstance(ids, list) else 'no'} tokens and "
        what += f"{len(logprobs) if isinstance(logprobs, list) else 'no'} log-probabilities"
        raise ConfigError(what, "use vLLM 0.11 or newer (`return_token_ids`), or SGLang 0.5 or newer")
    return ServedAnswer(ids, [float(one) for one in logprobs], reason)
